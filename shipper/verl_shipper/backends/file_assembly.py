"""Files put together from their parts, for every backend whose tracker takes files.

    <root>/<run>/<key>.part     what has come of a file: each part at its own offset, fsynced
    <root>/<run>/<key>.done     the tracker has the file; a note of its name there

The rule: a part counts as delivered when it lies durable here, the last one when the tracker has the whole file. So
`take` writes the parts of a batch, in whatever order and however often they come, and answers the files that they
complete, checked by size and sha256; `finish` is called when the tracker has one. A repeat after that is known by the
`.done`, so that nothing is sent twice for a lost commit.

A file whose parts were lost on the way, or whose sum is wrong, is refused with its last part. What a tracker refused
stays here, so that a retry of that one part sends all of it. All files together take at most `bytes_max`: a part that
finds no room is refused, after files that nobody has touched for IDLE_S have gone; folders of runs that were not
opened for KEEP_S go in a sweep.

Must not know: trackers, lanes. On failure: OSError, and the batch comes again; refusals are reasons by item.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.backends.base import Item
from verl_shipper.backends.paths import component
from verl_shipper.values import visible
from verl_shipper_spool.file_parts import FILE_BYTES_MAX, clean_name, is_last
from verl_shipper_spool.files import FILE_MODE, FOLDER_MODE, RealFiles
from verl_shipper_spool.record import RecordKind

log = logging.getLogger(__name__)

STAGED_BYTES_MAX = 8 * 1024**3  # four of the largest files, of all runs of one backend
IDLE_S = 3600.0  # a file that gets no part for so long may give its room to others
KEEP_S = 7 * 24 * 3600.0  # a folder of a run that nobody has opened for so long is nobody's
SWEEP_S = 3600.0  # between sweeps, and before the first one: by then every run with an outbox was opened
READ_BYTES = 1024 * 1024
PART, DONE = ".part", ".done"

_next_sweep_s: dict[str, float] = {}  # by root, monotonic


@dataclass(frozen=True, slots=True)
class Part:
    """A part, looked at. `size` and `sha256` of the whole file come with its last part only."""

    key: str
    file_id: str
    name: str
    purpose: str
    offset: int
    data: bytes
    size: int = -1
    sha256: bytes = b""

    @property
    def is_last(self) -> bool:
        return self.size >= 0


@dataclass(frozen=True, slots=True)
class Whole:
    """A complete file: `path` holds its bytes. `index`: of its last part in the batch."""

    index: int
    key: str
    path: str
    file_id: str
    name: str
    purpose: str
    size: int
    sha256: str
    step: int | None
    rank: int

    @property
    def label(self) -> str:
        """For people."""
        return visible(self.name)[-80:]


@dataclass(slots=True)
class Taken:
    """What a batch brought. By index of the item: `refused` with the reason, `there` with the note of a file that the
    tracker has since an earlier attempt."""

    wholes: list[Whole] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    there: dict[int, dict[str, Any]] = field(default_factory=dict)


class Staging:
    """The files of one run at one place of a tracker; `place` names both. Used by one thread at a time."""

    def __init__(self, root: str, *place: str, bytes_max: int = STAGED_BYTES_MAX) -> None:
        digest = hashlib.sha256("\0".join(place).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self.root = root
        self.folder = os.path.join(root, f"{component(place[-1], bytes_max=80)}-{digest}")
        self._bytes_max = bytes_max
        self._checked: dict[str, tuple[int, ...]] = {}  # by key: the file as it was when it was found right
        self._touched_s = 0.0

    def open(self) -> None:
        """Look after what was left: of files that the tracker has, and of runs that are long over."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                if name.endswith(DONE):
                    _remove(os.path.join(self.folder, name.removesuffix(DONE) + PART))
        self._touched_s = 0.0
        self._touch()
        now_s = time.monotonic()
        if now_s >= _next_sweep_s.setdefault(self.root, now_s + SWEEP_S):
            _next_sweep_s[self.root] = now_s + SWEEP_S
            sweep(self.root, time.time())

    def take(self, items: Sequence[Item]) -> Taken:
        """Make the parts among `items` durable. Raises OSError."""
        taken = Taken()
        parts: dict[int, Part] = {}
        for index, item in enumerate(items):
            if item.record.kind is RecordKind.FILE:
                part = part_of(item)
                if isinstance(part, str):
                    taken.refused[index] = part
                else:
                    parts[index] = part
        self._touch()
        if not parts:
            return taken
        done = {part.key: self._note(part.key) for part in parts.values()}
        fresh = {index: part for index, part in parts.items() if done[part.key] is None}
        taken.refused |= self._write(fresh)
        for index, part in parts.items():
            note = done[part.key]
            if not part.is_last or index in taken.refused:
                continue
            if note is not None:
                taken.there[index] = note
                continue
            wrong = self._wrong(part)
            if wrong:
                taken.refused[index] = wrong
            else:
                taken.wholes.append(self._whole(index, part, items[index]))
        return taken

    def finish(self, whole: Whole, **note: Any) -> None:
        """The tracker has this file. Durable when it returns."""
        content = json.dumps({"name": whole.name, "size": whole.size, "sha256": whole.sha256, **note})
        RealFiles().replace(self._path(whole.key, DONE), content.encode())
        _remove(whole.path)
        self._checked.pop(whole.key, None)

    def _path(self, key: str, suffix: str) -> str:
        return os.path.join(self.folder, key + suffix)

    def _whole(self, index: int, part: Part, item: Item) -> Whole:
        return Whole(
            index=index,
            key=part.key,
            path=self._path(part.key, PART),
            file_id=part.file_id,
            name=part.name,
            purpose=part.purpose,
            size=part.size,
            sha256=part.sha256.hex(),
            step=item.record.step,
            rank=item.rank,
        )

    def _note(self, key: str) -> dict[str, Any] | None:
        """What is known of a file that the tracker has."""
        try:
            with open(self._path(key, DONE), "rb") as file:
                note = json.loads(file.read())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}  # it is there, whatever became of the note
        return note if isinstance(note, dict) else {}

    def _write(self, parts: Mapping[int, Part]) -> dict[int, str]:
        """Parts to their places, and everything onto the disk; answers those that find no room."""
        refused: dict[int, str] = {}
        fds: dict[str, int] = {}
        left = -1
        try:
            for index, part in parts.items():
                if part.key not in fds:
                    if part.is_last and self._is_checked(part.key):
                        continue  # an upload is tried again: its file is there, and right
                    fds[part.key] = self._open(part.key)
                fd = fds[part.key]
                growth = part.offset + len(part.data) - os.fstat(fd).st_size
                if growth > 0:
                    left = self._room(part.key) if left < 0 else left
                    if min(growth, len(part.data)) > left:
                        refused[index] = self._no_room(part)
                        continue
                    left -= min(growth, len(part.data))
                _write_at(fd, part.data, part.offset)
            for fd in fds.values():
                os.fsync(fd)
        finally:
            for fd in fds.values():
                os.close(fd)
        return refused

    def _open(self, key: str) -> int:
        path = self._path(key, PART)
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        os.makedirs(self.folder, FOLDER_MODE, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            for folder in (self.folder, self.root, os.path.dirname(self.root)):
                RealFiles().sync_folder(folder)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _room(self, key: str) -> int:
        """Bytes that may still come, after idle files have made way where there are none."""
        found = sorted(_staged(self.root))
        used = sum(size for _, size, _ in found)
        before_s = time.time() - IDLE_S
        for modified_s, size, path in found:
            if used < self._bytes_max * 3 // 4 or modified_s > before_s:
                break
            if path != self._path(key, PART):
                log.warning("%s: nothing came of it for %g s, it makes way for other files", path, IDLE_S)
                _remove(path)
                used -= size
        return max(self._bytes_max - used, 0)

    def _no_room(self, part: Part) -> str:
        held = f"{self._bytes_max / 1024**3:.3g} GiB of unfinished files are in {self.root}"
        return f"{visible(part.name)[-80:]}: no room, {held}; retry it later"

    def _wrong(self, part: Part) -> str:
        """Why a file is not what its last part says; empty when it is."""
        if self._is_checked(part.key):
            return ""
        name, path = visible(part.name)[-80:], self._path(part.key, PART)
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
            size = file.tell()
            if (size, digest.digest()) == (part.size, part.sha256):
                self._checked[part.key] = _signature(path)
                return ""
            missing, first = _missing(file.fileno(), part.size)
        if missing:
            lost = f"{missing} of its {part.size} bytes never came, from byte {first} on"
            return f"{name}: {lost}; their records were lost or removed on the way"
        if size != part.size:
            return f"{name}: {size} bytes came, it should have {part.size}"
        return f"{name}: its sha256 is {digest.hexdigest()[:16]}…, it should be {part.sha256.hex()[:16]}…"

    def _is_checked(self, key: str) -> bool:
        known = self._checked.get(key)
        try:
            return known is not None and known == _signature(self._path(key, PART))
        except OSError:
            return False

    def _touch(self) -> None:
        """A run that is being delivered, or tried to be, keeps what is staged of it."""
        now_s = time.monotonic()
        if now_s >= self._touched_s:
            self._touched_s = now_s + SWEEP_S / 2
            with contextlib.suppress(OSError):
                os.utime(self.folder)


def staging_root(settings: Mapping[str, Any], backend: str) -> str:
    """Where a backend with a work folder stages files."""
    work_dir = settings.get("work_dir") or os.path.join(os.path.expanduser("~"), ".cache", "verl-shipper", backend)
    return os.path.join(os.path.abspath(str(work_dir)), "files")


def part_of(item: Item) -> Part | str:
    """The part that a record holds, or what is wrong with it."""
    body = item.record.body
    file_id, data, offset = body.get("file_id"), body.get("data"), body.get("offset")
    if not isinstance(file_id, bytes) or not file_id or not isinstance(data, bytes) or not isinstance(offset, int):
        return "not a part of a file: no id, no place or no bytes"
    if not 0 <= offset <= FILE_BYTES_MAX - len(data):
        return f"a part at byte {offset}; a file has at most {FILE_BYTES_MAX}"
    size, sha256 = body.get("size", -1), body.get("sha256", b"")
    if is_last(body) and not (isinstance(size, int) and 0 <= size <= FILE_BYTES_MAX and isinstance(sha256, bytes)):
        return "not the last part of a file: no size or no sha256"
    return Part(
        key=f"{item.stream_id}-{file_id[:16].hex()}",
        file_id=file_id[:16].hex(),
        name=clean_name(str(body.get("name") or "")),
        purpose=str(body.get("purpose") or ""),
        offset=offset,
        data=data,
        size=size if is_last(body) else -1,
        sha256=sha256,
    )


def sweep(root: str, now_s: float) -> None:
    """Remove the folders of runs that nobody has opened, and nothing has come for, in KEEP_S."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(root)):
            with contextlib.suppress(OSError):
                newest_s = max([entry.stat().st_mtime, *(each.stat().st_mtime for each in os.scandir(entry.path))])
                if now_s - newest_s > KEEP_S:
                    log.warning("%s: its run was not seen for %g days, its files go", entry.path, KEEP_S / 86400)
                    shutil.rmtree(entry.path, ignore_errors=True)


def _staged(root: str) -> Iterator[tuple[float, int, str]]:
    """Time, size on disk and path of every unfinished file of all runs."""
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(PART):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    found = os.stat(path)
                    yield found.st_mtime, min(found.st_size, found.st_blocks * 512), path


def _missing(fd: int, size: int) -> tuple[int, int]:
    """How many of the first `size` bytes were never written, as far as the file system tells, and the first of them."""
    end = os.fstat(fd).st_size
    missing, first, place = max(size - end, 0), min(size, end), 0
    with contextlib.suppress(OSError):  # no holes are known there: the sum will tell
        while place < min(size, end):
            hole = os.lseek(fd, place, os.SEEK_HOLE)
            if hole >= min(size, end):
                break
            first = min(first, hole)
            try:
                place = os.lseek(fd, hole, os.SEEK_DATA)
            except OSError:  # nothing behind it
                place = end
            missing += min(place, size) - hole
    return missing, first


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _signature(path: str) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
