"""Files from the disk into the spool, as records of a run: `verl-shipper push`. Works with or without a daemon.

    files    what was named, and all below a folder but hidden and temporary ones; once they have stopped changing
    records  a stream of this process's own, as of a helper of the run; the daemon adopts it when the process has ended
    notes    <spool>/pushed/<run>.jsonl, what was pushed: a line a file, durable when its records are

The same content under the same name and step of a run is the same file: its id is made of these, so that it is one
file at a tracker, too, when two machines push one shared folder. On one machine the notes, under a lock, see to it
that every rank's hook may push the folder that all of them share. `push` again takes what is new or has changed.

Must not know: trackers, the command line. On failure: ShipperError for what stops all, a reason by file for the rest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from verl_shipper.errors import ShipperError
from verl_shipper.push_run import RunName
from verl_shipper_spool.file_parts import FILE, FILE_BYTES_MAX, MEMORY, PROFILE, FileTooLargeError, clean_name, parts_of
from verl_shipper_spool.files import FILE_MODE, RealFiles
from verl_shipper_spool.header import BULK, fresh_header, sibling, start_body
from verl_shipper_spool.record import Record, RecordKind, encode_record
from verl_shipper_spool.writer import StreamWriter

NOTES_FOLDER = "pushed"
NOTES_KEEP_S = 90 * 24 * 3600.0
LOCK_S = 120.0  # another rank pushes the same folder
LOOK_S = 0.25
STABLE_S = 2.0  # a file that changed lately is taken when it has not changed for so long,
OLD_S = 10.0  # an older one at once
CHANGING_S = 30.0  # what changes for longer is left, and told
COMPRESS_BYTES_MIN = 1024 * 1024
COMPRESSED = (".json", ".pickle", ".pkl")
TEMPORARY = (".tmp", ".temp", ".swp", ".part", ".partial", ".incoming", ".lock", "~")
STEP = re.compile(r"(?:^|[^A-Za-z])step[_-]?(\d{1,18})(?!\d)")
READ_BYTES = 1024 * 1024
TRACES = re.compile(r"(\.pt\.trace\.json|[_-]rank[_-]?\d.*\.json)(\.gz)?$|\.nsys-rep$")
SNAPSHOTS = re.compile(r"(memory|snapshot)[^/]*\.(pickle|pkl)(\.gz)?$")

Signature = tuple[int, int]  # size and time of the last change, in ns


@dataclass(frozen=True, slots=True)
class Found:
    """A file to push. `is_ours`: its writer is the one who asks, so that it is complete."""

    path: str
    name: str
    is_ours: bool = False


@dataclass(slots=True)
class Report:
    """What became of the files; `changing` and `failed` have a line each."""

    run: RunName
    shipped: list[tuple[str, int, int | None]] = field(default_factory=list)  # name, bytes as read, step
    known: int = 0
    changing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def line(self) -> str:
        size = sum(size for _, size, _ in self.shipped) / 1e6
        more = [f"{self.known} pushed before"] if self.known else []
        more += [f"{len(self.changing)} still written, push again later: {self.changing[0]}"] if self.changing else []
        more += [f"{len(self.failed)} failed: {self.failed[0]}"] if self.failed else []
        return "; ".join([f"pushed {len(self.shipped)} files, {size:.1f} MB, to run {self.run.label}", *more])


def found_files(paths: Sequence[str], name: str | None, own_pid: str = "") -> list[Found]:
    """Files at `paths`, by name. `name`: of the one file, or a folder in front of the names. Raises ShipperError."""
    found: list[Found] = []
    for path in paths:
        if not path:
            raise ShipperError("nothing to push: the path is empty", hint="is VERL_PROFILE_SAVE_PATH set?")
        if os.path.isdir(path):
            below = sorted(_below(path))
            found += [Found(os.path.join(path, each), f"{name}/{each}" if name else each) for each in below]
        elif os.path.isfile(path):
            base = os.path.basename(path)
            alone = name if name and len(paths) == 1 else None
            found.append(Found(path, alone or (f"{name}/{base}" if name else base)))
        else:
            raise ShipperError("no such file or folder", where=path)
    own = re.compile(rf"pid{own_pid}(?!\d)") if own_pid.isdigit() else None
    return [Found(each.path, clean_name(each.name), bool(own and own.search(each.name))) for each in found]


def push(
    spool: str, run: RunName, files: Sequence[Found], *, step: int | None = None, purpose: str | None = None
) -> Report:
    """Write what is new of `files` into the spool. Raises ShipperError, OSError."""
    report = Report(run)
    with _notes(spool, run.run_id) as notes, contextlib.closing(_Streams(spool, run)) as streams:
        fresh = [each for each in files if not notes.has(each)]
        report.known = len(files) - len(fresh)
        for file in _settled(fresh, report):
            try:
                _push_one(file, step if step is not None else step_of(file.name), purpose, notes, streams, report)
            except (OSError, FileTooLargeError) as error:
                reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
                report.failed.append(f"{file.path}: {reason}")
    return report


def step_of(name: str) -> int | None:
    """The step that a file's name tells, the last one in it."""
    found = STEP.findall(name)
    return int(found[-1]) if found else None


def purpose_of(name: str, tool: str) -> str:
    """What a file is for. `tool`: the profiler that wrote it, as verl names it."""
    if tool:
        return MEMORY if tool == "torch_memory" else PROFILE
    if SNAPSHOTS.search(name):
        return MEMORY
    return PROFILE if TRACES.search(name) else FILE


class _Notes:
    """What was pushed of one run."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._files: set[tuple[str, int, int]] = set()
        self.ids: set[str] = set()
        with open(fd, "rb", closefd=False) as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # torn by a power failure
                    note = json.loads(line)
                    self._add(note["id"], note["path"], note["size"], note["changed_ns"])

    def has(self, found: Found) -> bool:
        try:
            return (os.path.realpath(found.path), *_signature(found.path)) in self._files
        except OSError:
            return False

    def put(self, file_id: str, path: str, signature: Signature) -> None:
        real = os.path.realpath(path)
        note = {"id": file_id, "path": real, "size": signature[0], "changed_ns": signature[1]}
        os.write(self._fd, b"\n" + json.dumps(note).encode() + b"\n")  # a torn line before it stays its own
        os.fsync(self._fd)
        self._add(file_id, real, *signature)

    def _add(self, file_id: str, path: str, size: int, changed_ns: int) -> None:
        self.ids.add(file_id)
        self._files.add((path, size, changed_ns))


class _Streams:
    """This process's streams, made with the first file."""

    def __init__(self, spool: str, run: RunName) -> None:
        self._header = fresh_header(run.run_id, run.project, run.experiment, 0, run.world, forked=True)
        self._seq = itertools.count()
        self._scalars = StreamWriter(spool, self._header)
        self._bulk = StreamWriter(spool, sibling(self._header, BULK))
        self._is_begun = False

    def write(self, source: BinaryIO, name: str, purpose: str, step: int | None, file_id: bytes, size: int) -> None:
        """All parts of a file, durable when it returns. Raises OSError, FileTooLargeError."""
        if not self._is_begun:
            self._append(self._scalars, RecordKind.RUN_START, None, start_body(self._header, {}))
            self._is_begun = True
        compress = size >= COMPRESS_BYTES_MIN and name.lower().endswith(COMPRESSED)
        for body in parts_of(source, name, purpose, compress=compress):
            self._append(self._bulk, RecordKind.FILE, step, {**body, "file_id": file_id})
        self._scalars.sync()
        self._bulk.sync()

    def close(self) -> None:
        for writer in (self._scalars, self._bulk):
            writer.declare_losses()
            writer.close()

    def _append(self, writer: StreamWriter, kind: RecordKind, step: int | None, body: dict[str, object]) -> None:
        record = Record(kind, next(self._seq), step, time.time_ns(), body)
        if not writer.append(encode_record(record), "file" if kind is RecordKind.FILE else "metrics"):
            why = writer.last_error or f"no room in {writer.folder}"
            raise OSError(errno.ENOSPC, f"the spool takes no more: {why}; free some space and push again")


def _push_one(
    found: Found, step: int | None, purpose: str | None, notes: _Notes, streams: _Streams, report: Report
) -> None:
    with open(found.path, "rb") as source:
        before = _signature(source.fileno())
        if before[0] > FILE_BYTES_MAX and not found.name.lower().endswith(COMPRESSED):
            raise FileTooLargeError(f"larger than {FILE_BYTES_MAX} bytes")
        digest = hashlib.sha256("\0".join([report.run.run_id, found.name, str(step)]).encode("utf-8", "surrogatepass"))
        while block := source.read(READ_BYTES):
            digest.update(block)
        file_id = digest.digest()[:16]
        if file_id.hex() in notes.ids:
            notes.put(file_id.hex(), found.path, before)
            report.known += 1
            return
        source.seek(0)
        kind = purpose or purpose_of(found.name, os.environ.get("VERL_PROFILE_TOOL", ""))
        streams.write(source, found.name, kind, step, file_id, before[0])
        if _signature(source.fileno()) != before:
            report.changing.append(found.path)
            return
    notes.put(file_id.hex(), found.path, before)
    report.shipped.append((found.name, before[0], step))


def _settled(files: list[Found], report: Report) -> Iterator[Found]:
    """Files as they stop changing, at most CHANGING_S; the others are `report.changing`."""
    deadline_s = time.monotonic() + CHANGING_S
    waiting: list[tuple[Found, Signature, float]] = []
    for each in files:
        try:
            signature = _signature(each.path)
        except OSError as error:
            report.failed.append(f"{each.path}: {error.strerror or error}")
            continue
        if each.is_ours or time.time() - signature[1] / 1e9 > OLD_S:
            yield each
        else:
            waiting.append((each, signature, time.monotonic()))
    while waiting and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
        still: list[tuple[Found, Signature, float]] = []
        for each, signature, since_s in waiting:
            try:
                now = _signature(each.path)
            except OSError:
                continue  # it was temporary
            if now != signature:
                still.append((each, now, time.monotonic()))
            elif time.monotonic() - since_s < STABLE_S:
                still.append((each, signature, since_s))
            else:
                yield each
        waiting = still
    report.changing += [each.path for each, _, _ in waiting]


@contextlib.contextmanager
def _notes(spool: str, run_id: str) -> Iterator[_Notes]:
    """The notes of a run, nobody else's meanwhile. Raises ShipperError when somebody has them for long."""
    folder = os.path.join(spool, NOTES_FOLDER)
    RealFiles().make_folder(folder)
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if time.time() - entry.stat().st_mtime > NOTES_KEEP_S:
                os.unlink(entry.path)
    name = hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    path = os.path.join(folder, f"{name}.jsonl")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
    try:
        deadline_s = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline_s:
                    why = f"another push to this run is under way for {LOCK_S:g} s"
                    raise ShipperError(why, where=path, hint="push again later") from error
                time.sleep(LOOK_S)
            except OSError:  # a file system without locks: the ids still tell the same file
                break
        yield _Notes(fd)
    finally:
        os.close(fd)


def _below(folder: str) -> Iterator[str]:
    """Names of files below a folder that are neither hidden nor temporary, relative to it."""
    for path, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if not each.startswith(".")]
        for name in names:
            full = os.path.join(path, name)
            if not name.startswith(".") and not name.endswith(TEMPORARY) and os.path.isfile(full):
                yield os.path.relpath(full, folder)


def _signature(file: str | int) -> Signature:
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns
