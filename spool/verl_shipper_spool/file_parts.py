"""A file as records: cut into parts that travel, are kept and are counted like any other record.

    {file_id, name, purpose, offset, data}                     every part
    {…, size, sha256}                                          the last one: what the whole has to be

`file_id`: 16 bytes, fresh for every call, so that two files of one name stay two. `name`: a relative path with "/".
`purpose`: "profile", "memory" or "file": trackers may show them apart. Parts of one file stand in one stream, in order.

Must not know: who writes, who ships. On failure: OSError of the file that is read.
"""

from __future__ import annotations

import hashlib
import posixpath
import uuid
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

PART_BYTES = 512 * 1024  # two of them fill a lane's batch; a frame may hold 16 MiB
FILE_BYTES_MAX = 2 * 1024**3  # as shipped; a stream's quota is 4 GiB, and other records want to live, too
GZIP_LEVEL = 1  # of a profiler's JSON: 12 times smaller, at 5 times the speed of level 9
NAME_CHARS_MAX = 250
PROFILE, MEMORY, FILE = "profile", "memory", "file"
_GZIP_WBITS = 31  # zlib's own way to say: with gzip's header, which then names no file and no time
_READ_BYTES = 1024 * 1024


class FileTooLargeError(Exception):
    """More than FILE_BYTES_MAX; parts that were made already lack their end."""


def parts_of(source: BinaryIO, name: str, purpose: str = FILE, *, compress: bool = False) -> Iterator[dict[str, Any]]:
    """Bodies of the file records of what `source` holds from here to its end. `compress`: with gzip, ".gz" to its name.

    Raises OSError, and FileTooLargeError.
    """
    name = clean_name(name) + (".gz" if compress else "")
    base = {"file_id": uuid.uuid4().bytes, "name": name, "purpose": purpose}
    digest = hashlib.sha256()
    offset = 0
    waiting = b""
    for data in _cut(_gzip(_blocks(source)) if compress else _blocks(source)):
        if offset + len(waiting) + len(data) > FILE_BYTES_MAX:
            raise FileTooLargeError(f"{name} is larger than {FILE_BYTES_MAX} bytes")
        if waiting:
            yield {**base, "offset": offset, "data": waiting}
            offset += len(waiting)
        digest.update(data)
        waiting = data
    yield {**base, "offset": offset, "data": waiting, "size": offset + len(waiting), "sha256": digest.digest()}


def is_last(body: dict[Any, Any]) -> bool:
    """Whether a part is the last one of its file."""
    return "sha256" in body


def clean_name(name: str) -> str:
    """A relative path that leads nowhere else: no "..", no leading "/", never empty."""
    text = name.encode("utf-8", "replace").decode().replace("\0", "").replace("\\", "/")
    parts = [part for part in posixpath.normpath("/" + text).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[-NAME_CHARS_MAX:].lstrip("/") or "file"


def _blocks(source: BinaryIO) -> Iterator[bytes]:
    while block := source.read(_READ_BYTES):
        yield block


def _gzip(blocks: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP_WBITS)
    for block in blocks:
        if packed := packer.compress(block):
            yield packed
    yield packer.flush()


def _cut(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of PART_BYTES."""
    rest = bytearray()
    for block in blocks:
        rest += block
        while len(rest) >= PART_BYTES:
            yield bytes(rest[:PART_BYTES])
            del rest[:PART_BYTES]
    if rest:
        yield bytes(rest)
