"""Everything an offline run consists of, kept until the run is over, so that its folder can be written anew.

A tracker's own offline folder is neither synced to disk nor continued after a crash. So what goes into it is kept here
first, durably; after a crash a new process writes a new folder from the beginning and the torn one is removed.

    entry = u32 length, u32 crc32 of the payload from SEED on (both big-endian), payload = MessagePack [row id, value]

Must not know: trackers. On a torn tail: cut off, its batch comes again. On failure: OSError.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, final

import msgpack

HEAD = struct.Struct(">II")
SEED = 0x5EA1ED  # the crc32 of nothing is 0: unseeded, zeros behind the last row would read as empty entries
FILE_MODE = 0o600


@final
class RowLog:
    """One file. `ids` are the rows it holds."""

    def __init__(self, path: str) -> None:
        self.path = path
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
        self.ids: set[str] = set()
        end = 0
        for row_id, _, end in self._entries():  # noqa: B007 - the last end is wanted
            self.ids.add(row_id)
        os.ftruncate(self._fd, end)

    def append(self, rows: Iterable[tuple[str, Any]]) -> None:
        """Add rows that are not there yet; durable when it returns."""
        fresh = {row_id: value for row_id, value in rows if row_id not in self.ids}
        if not fresh:
            return
        content = bytearray()
        for row_id, value in fresh.items():
            payload = msgpack.packb([row_id, value], use_bin_type=True)
            content += HEAD.pack(len(payload), zlib.crc32(payload, SEED)) + payload
        start = os.fstat(self._fd).st_size
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)
            raise
        self.ids.update(fresh)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """All rows in the order in which they were added."""
        return ((row_id, value) for row_id, value, _ in self._entries())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """The run is over: its folder is whole."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def _entries(self) -> Iterator[tuple[str, Any, int]]:
        """Id, value and end of every whole entry."""
        end = 0
        with open(self.path, "rb") as file:
            while len(head := file.read(HEAD.size)) == HEAD.size:
                length, crc = HEAD.unpack(head)
                payload = file.read(length)
                if len(payload) != length or zlib.crc32(payload, SEED) != crc:
                    return
                row_id, value = msgpack.unpackb(payload, strict_map_key=False)
                end += HEAD.size + length
                yield row_id, value, end


def sync_tree(folder: str) -> None:
    """Every file below `folder`, and the folders, onto the disk."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in [*names, "."]:
            full = os.path.join(path, name)
            if os.path.islink(full):
                continue
            fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
