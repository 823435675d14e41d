"""Streams of the collector's own: two for each run it has something of, as a helper of that run writes them.

A collector that is started again begins new ones. A stream that nobody will add to gets a file `ended` in its folder
while its process lives on: the daemon then takes the rest and seals it, and what sampling held back is let go.

Must not know: what records are about. On failure: `append` returns False, as a StreamWriter does; OSError of a sync.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from verl_shipper_spool.files import RealFiles
from verl_shipper_spool.frame import Kind
from verl_shipper_spool.header import BULK, ENDED_NAME, fresh_header, sibling, start_body, this_process
from verl_shipper_spool.reader import Frame, StreamReader
from verl_shipper_spool.record import KIND_NAME, Record, RecordKind, encode_record
from verl_shipper_spool.segment import list_segments
from verl_shipper_spool.writer import StreamWriter

PAIRS_MAX = 32  # open at a time, with segments of 8 MiB; the one that was idle for longest ends
BYTES_MAX = 1024**3  # on disk that the daemon has not taken; beyond, files wait where they are
RESERVE_BYTES = 64 * 1024**2  # of the disk, left free: a record that finds no room would count as dropped
_BULK_KINDS = (RecordKind.GENERATIONS, RecordKind.SPAN, RecordKind.FILE)


@dataclass(frozen=True, slots=True)
class Run:
    """To which run a record belongs."""

    run_id: str
    project: str
    experiment: str
    rank: int = 0

    def values(self) -> list[Any]:
        return [self.run_id, self.project, self.experiment, self.rank]


@dataclass(slots=True)
class _Pair:
    scalars: StreamWriter
    bulk: StreamWriter
    used_s: float
    seq: Iterator[int] = field(default_factory=itertools.count)

    @property
    def writers(self) -> tuple[StreamWriter, StreamWriter]:
        return self.scalars, self.bulk


class Streams:
    """All of them. `folder`: where the daemon looks for them."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._pairs: dict[Run, _Pair] = {}
        self._process = this_process()

    def room(self, wanted_bytes: int) -> str:
        """Why there is no room for so many bytes; empty when there is."""
        if self.size_bytes() + wanted_bytes > BYTES_MAX:
            return f"{BYTES_MAX} bytes wait for the daemon already"
        try:
            os.makedirs(self.folder, 0o700, exist_ok=True)
            disk = os.statvfs(self.folder)
        except OSError as error:
            return f"{self.folder}: {error.strerror or error}"
        return "" if disk.f_bavail * disk.f_frsize >= wanted_bytes + RESERVE_BYTES else f"{self.folder}: disk full"

    def size_bytes(self) -> int:
        size = 0
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                with contextlib.suppress(OSError):
                    size += sum(entry.stat().st_size for entry in os.scandir(os.path.join(self.folder, name)))
        return size

    def next(self, run: Run, kind: RecordKind, now_s: float) -> tuple[str, int]:
        """Stream and ordinal that the next record of a kind gets."""
        writer = self._writer(run, kind, now_s)
        return writer.header.stream_id, writer.records

    def encode(self, run: Run, kind: RecordKind, step: int | None, time_ns: int, body: dict[str, Any]) -> bytes:
        """A record as it will stand in the stream."""
        pair = self._pairs.get(run) or self._begin(run, time.monotonic())
        return encode_record(Record(kind, next(pair.seq), step, time_ns, body))

    def size_of(self, body: dict[str, Any]) -> int:
        """Of a record with this body."""
        return len(encode_record(Record(RecordKind.GENERATIONS, 0, 0, time.time_ns(), body)))

    def append(self, run: Run, kind: RecordKind, payload: bytes) -> bool:
        return self._of(self._pairs[run], kind).append(payload, KIND_NAME[kind])

    def sync(self, run: Run, kind: RecordKind) -> None:
        self._of(self._pairs[run], kind).sync()

    def trim(self, durable: Callable[[str], int]) -> None:
        """Remove complete segments that the daemon has."""
        for pair in self._pairs.values():
            for writer in pair.writers:
                whole = [segment for segment in writer.segments if segment.end_offset is not None]
                end = durable(writer.header.stream_id) if whole else 0
                for segment in whole:
                    if segment.end_offset is not None and segment.end_offset <= end:
                        writer.forget(segment)

    def end_idle(self, idle_s: Callable[[Run], float], now_s: float) -> None:
        """End the streams of runs that had nothing for so long."""
        for run, pair in list(self._pairs.items()):
            if now_s - pair.used_s >= idle_s(run):
                self.end(run)

    def end(self, run: Run) -> None:
        pair = self._pairs.pop(run)
        for writer in pair.writers:
            writer.declare_losses()
            writer.close()
            with contextlib.suppress(OSError):  # else it ends with our process
                if os.path.isdir(writer.folder):
                    RealFiles().replace(os.path.join(writer.folder, ENDED_NAME), b"", durable=False)

    def end_all(self) -> None:
        for run in list(self._pairs):
            self.end(run)

    @property
    def count(self) -> int:
        return len(self._pairs)

    def _writer(self, run: Run, kind: RecordKind, now_s: float) -> StreamWriter:
        pair = self._pairs.get(run) or self._begin(run, now_s)
        pair.used_s = now_s
        return self._of(pair, kind)

    def _of(self, pair: _Pair, kind: RecordKind) -> StreamWriter:
        return pair.bulk if kind in _BULK_KINDS else pair.scalars

    def _begin(self, run: Run, now_s: float) -> _Pair:
        if len(self._pairs) >= PAIRS_MAX:
            self.end(min(self._pairs, key=lambda each: self._pairs[each].used_s))
        process = self._process
        header = fresh_header(run.run_id, run.project, run.experiment, run.rank, 1, forked=True, process=process)
        pair = _Pair(StreamWriter(self.folder, header), StreamWriter(self.folder, sibling(header, BULK)), now_s)
        self._pairs[run] = pair
        body = start_body(header, {})
        self.append(run, RecordKind.RUN_START, self.encode(run, RecordKind.RUN_START, None, header.created_ns, body))
        return pair


def ordinals_in(folder: str) -> int:
    """How many ordinals a stream's folder knows of; 0 when there is none."""
    try:
        segments = list_segments(RealFiles(), folder)
        if not segments:
            return 0
        count, offset = segments[-1].first_ordinal, segments[-1].first_offset
        reader = StreamReader(folder)
        while True:
            found, end = reader.read(offset, final=True)
            frames = (each for each in found if isinstance(each, Frame) and each.kind is Kind.RECORD)
            count = max([count, *(frame.ordinal + 1 for frame in frames)])
            if end == offset:
                return count
            offset = end
    except OSError:
        return 0
