"""Backend `file`: every record is one line of strict JSON. The reference for whoever writes a backend.

    <dir>/<project>/<experiment>-<run_id>.jsonl
    <dir>/<project>/<experiment>-<run_id>.files/…        shipped files, see file_shelf.py

    {"kind": "metrics", "run_id": "…", "rank": 0, "seq": 7, "step": 3, "time_ns": …, "data": {"loss": 0.5}, "id": "…:7"}

A part of a file is a line, too, with its place instead of its bytes; the last one has the file's size, sha256 and path
beside the lines, and is written when the file stands there.

Exactly once, whatever is killed when: a batch is appended and fsynced, then the offset behind it is remembered together
with the lane's cursor. Lines behind that offset come from an upload that died between the two, or from another daemon
that writes the same run: a torn line is cut off, and items whose lines are there already are not written again.

Settings: `dir`. Must not know: cursors, retries. On failure: Retry in the system's own words, and no half line stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import Any, ClassVar

from verl_shipper.backends import file_shelf
from verl_shipper.backends.base import Backend, Batch, Delivered, Item, Memory, Outcome, Retry, RunInfo
from verl_shipper.backends.file_assembly import Staging
from verl_shipper.backends.file_shelf import make_folder
from verl_shipper.backends.paths import component
from verl_shipper.backends.sdk.parts import rejected
from verl_shipper.checks import Finding
from verl_shipper.errors import ConfigError
from verl_shipper.folders import disk_findings, folder_findings
from verl_shipper.schema import Key, Kind
from verl_shipper.values import flatten_metrics, to_json, visible
from verl_shipper_spool.files import RealFiles
from verl_shipper_spool.record import KIND_NAME, Record, RecordKind
from verl_shipper_spool.redact import redact

LOG = logging.getLogger(__name__)
FILE_MODE = 0o644
INCOMING = ".incoming"  # in `dir`: what has come of files; beside what it is for, so that a link will do


class FileBackend(Backend):
    """Appends the records of one run to its file."""

    name: ClassVar[str] = "file"
    settings_known: ClassVar[tuple[str | Key, ...] | None] = (
        Key(
            "dir",
            Kind.PATH,
            "records go to `<dir>/<project>/<experiment>-<run_id>.jsonl`, one strict JSON object a line",
            "a daemon has no folder of its own that you would look into",
            "/data/records",
            otherwise="required",
        ),
    )

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        folder = settings.get("dir")
        if not isinstance(folder, str) or not folder:
            raise ConfigError(
                "the file backend has no folder to write to",
                where="backends.file.dir",
                hint="set it, for example with --set backends.file.dir=./records",
            )

    @classmethod
    def diagnose(cls, settings: Mapping[str, Any]) -> Iterator[Finding]:
        folder = os.path.abspath(os.path.expanduser(settings["dir"]))
        yield from folder_findings(folder, private=False)
        yield from disk_findings(folder, "records")

    def __init__(self, run: RunInfo, settings: Mapping[str, Any], memory: Memory) -> None:
        super().__init__(run, settings, memory)
        root = os.path.join(os.path.abspath(os.path.expanduser(settings["dir"])), INCOMING)
        self._staging = Staging(root, run.project, run.experiment, run.run_id)

    @property
    def path(self) -> str:
        folder = os.path.abspath(os.path.expanduser(self.settings["dir"]))
        stem = component(f"{self.run.experiment}-{self.run.run_id}")
        return os.path.join(folder, component(self.run.project), f"{stem}.jsonl")

    @property
    def files_folder(self) -> str:
        return self.path.removesuffix(".jsonl") + ".files"

    def open(self) -> Outcome | None:
        try:
            make_folder(os.path.dirname(self.path))
            self._staging.open()
        except OSError as error:
            return Retry(f"cannot make the folder of {self.path}: {error.strerror}")
        return None

    def upload(self, batch: Batch) -> Outcome:
        ignored: Counter[str] = Counter()
        try:
            taken = self._staging.take(batch.items)
            if taken.refused:
                return rejected(taken.refused)
            paths = {index: str(note.get("path", "")) for index, note in taken.there.items()}
            for whole in taken.wholes:
                name = file_shelf.put(whole, self.files_folder)
                paths[whole.index] = os.path.join(os.path.basename(self.files_folder), name)
                self._staging.finish(whole, path=paths[whole.index])
        except OSError as error:
            return Retry(f"cannot keep a file beside {self.path}: {error.strerror or error}")
        lines = {
            f"{item.stream_id}:{item.ordinal}": line_of(item, batch.run, ignored, paths.get(index))
            for index, item in enumerate(batch.items)
        }
        try:
            offset = self._append(lines)
        except BlockingIOError:
            return Retry(f"another daemon is writing {self.path}", after_s=0.5)
        except OSError as error:
            return Retry(f"cannot write {self.path}: {error.strerror}")
        return Delivered(remember={"offset": offset}, ignored=ignored)

    def watermark(self) -> Mapping[str, int]:
        ordinal_next: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for line_id, _end in whole_lines(self.path, 0):
                stream_id, _, ordinal = line_id.rpartition(":")
                if ordinal.isdecimal():
                    ordinal_next[stream_id] = max(int(ordinal) + 1, ordinal_next.get(stream_id, 0))
        return ordinal_next

    def close(self) -> None:
        """Nothing is held between uploads."""

    def _append(self, lines: Mapping[str, bytes]) -> int:
        """Append the lines that are not there yet; return the offset behind them once all is durable."""
        make_folder(os.path.dirname(self.path))
        with locked(self.path) as fd:
            start = self._committed(os.fstat(fd).st_size)
            end, present = settle(self.path, start, lines)
            os.ftruncate(fd, end)
            content = b"".join(line for line_id, line in lines.items() if line_id not in present)
            try:
                write_all(fd, content)
            except OSError:
                os.ftruncate(fd, end)  # a full disk leaves no half line to the file's readers
                raise
            os.fsync(fd)
        if start == 0:
            RealFiles().sync_folder(os.path.dirname(self.path))
        return end + len(content)

    def _committed(self, size: int) -> int:
        """Where the lines begin that nobody has vouched for."""
        offset = self.memory.get("offset")
        if isinstance(offset, int) and offset > size:
            LOG.warning("%s has %d bytes, %d were delivered; going on from its end", self.path, size, offset)
            return 0
        return offset if isinstance(offset, int) else 0


def line_of(item: Item, run: RunInfo, ignored: Counter[str], path: str | None = None) -> bytes:
    """The line of one record. Values that the line cannot show are added to `ignored`. `path`: of a whole file."""
    record = item.record
    data = file_data(record, path) if record.kind is RecordKind.FILE else data_of(record, ignored)
    line = {
        "kind": KIND_NAME[record.kind],
        "run_id": visible(run.run_id),
        "rank": item.rank,
        "seq": record.seq,
        "step": record.step,
        "time_ns": record.time_ns,
        "data": data,
        "id": f"{item.stream_id}:{item.ordinal}",
    }
    return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def data_of(record: Record, ignored: Counter[str]) -> Any:
    """Metrics become numbers by flat name; everything else stays as it is, as far as JSON can carry it."""
    if record.kind is RecordKind.METRICS:
        flat = flatten_metrics(record.body)
        ignored.update(flat.ignored)
        return to_json(flat.numbers)
    return to_json(redact(record.body) if record.kind is RecordKind.RUN_START else record.body)


def file_data(record: Record, path: str | None) -> Any:
    """A part of a file: where it belongs, not what it holds."""
    body = {**record.body, "bytes": len(record.body["data"])}
    del body["data"]
    return to_json(body if path is None else body | {"path": path})


def settle(path: str, start: int, wanted: Container[str]) -> tuple[int, set[str]]:
    """Where the last whole line behind `start` ends, and which of the `wanted` ids stand there already."""
    end, present = start, set()
    for line_id, line_end in whole_lines(path, start):
        end = line_end
        if line_id in wanted:
            present.add(line_id)
    return end, present


def whole_lines(path: str, start: int) -> Iterator[tuple[str, int]]:
    """Id and end of every line of ours from `start` on. Torn and foreign lines are passed over."""
    with open(path, "rb") as file:
        end = file.seek(start)
        for line in file:
            end += len(line)
            with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
                if line.endswith(b"\n"):
                    yield str(json.loads(line)["id"]), end


@contextlib.contextmanager
def locked(path: str) -> Iterator[int]:
    """The file open for appending, and nobody else's meanwhile; BlockingIOError when somebody has it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:  # a file system without locks: one daemon per file is then up to the operator
            LOG.debug("no lock on %s: %s", path, error)
        yield fd
    finally:
        os.close(fd)


def write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
