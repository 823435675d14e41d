"""Client spools made or damaged by hand, in format v1: cut, flipped, emptied.

    clone_stream    a copy of a stream under another identity, so that one spool can hold many damages of it
    build_stream    a stream of a dead writer with as many segments as a test wants

Must not know: the client, the daemon. On failure: AssertionError.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_shipper_spool.files import RealFiles
from verl_shipper_spool.frame import Found, Kind, encode, scan
from verl_shipper_spool.header import (
    HEADER_NAME,
    SCALARS,
    StreamHeader,
    decode_header,
    encode_header,
    new_id,
    this_process,
)
from verl_shipper_spool.record import Record, RecordKind, encode_record
from verl_shipper_spool.segment import list_segments, segment_name


def read_header(folder: Path) -> StreamHeader:
    return decode_header((folder / HEADER_NAME).read_bytes())


def segments(folder: Path) -> list[Path]:
    """Segment files of a stream, in order."""
    return [Path(segment.path) for segment in list_segments(RealFiles(), str(folder))]


def frames(path: Path) -> list[Found]:
    """Record frames of one segment file."""
    found, _ = scan(path.read_bytes(), final=True)
    return [frame for frame in found if frame.kind is Kind.RECORD]


def clone_stream(folder: Path, spool: Path, run_id: str) -> Path:
    """Copy a stream as one of another writer and run; returns the new folder."""
    header = replace(read_header(folder), stream_id=new_id(), writer_id=new_id(), run_id=run_id)
    target = spool / header.stream_id
    shutil.copytree(folder, target)
    (target / HEADER_NAME).write_bytes(encode_header(header))
    return target


def build_stream(
    spool: Path,
    run_id: str,
    *,
    project: str = "field",
    experiment: str = "exp",
    segment_count: int = 1,
    records_per_segment: int = 1000,
    extra: dict[str, Any] | None = None,
) -> Path:
    """A scalars stream of a writer that is dead: run_start, then `{"n": i}` at step i, then run_finish."""
    header = StreamHeader(
        stream_id=new_id(),
        writer_id=new_id(),
        stream_class=SCALARS,
        run_id=run_id,
        project=project,
        experiment=experiment,
        rank=0,
        world=1,
        created_ns=time.time_ns(),
        forked=False,
        process=replace(this_process(), pid=dead_pid(), start_ticks=1),
    )
    folder = spool / header.stream_id
    folder.mkdir(parents=True, mode=0o700)
    (folder / HEADER_NAME).write_bytes(encode_header(header))
    records = _records(project, experiment, segment_count * records_per_segment, extra or {})
    offset = 0
    for index in range(segment_count):
        first = index * records_per_segment
        content = b"".join(
            encode(encode_record(record), first + place)
            for place, record in enumerate(records[first : first + records_per_segment])
        )
        (folder / segment_name(offset, first)).write_bytes(content)
        offset += len(content)
    return folder


def _records(project: str, experiment: str, count: int, extra: dict[str, Any]) -> list[Record]:
    """`count` records in all: a start, `count - 2` metrics with n = 0, 1, ..., an end."""
    start = {"project": project, "experiment": experiment, "config": {}, "node": "n", "rank": 0, "world": 1}
    now_ns = time.time_ns()
    records = [Record(RecordKind.RUN_START, 0, None, now_ns, start)]
    for value in range(count - 2):
        body = {"n": float(value), **extra}
        records.append(Record(RecordKind.METRICS, value + 1, value, now_ns + value * 1000, body))
    end = {"exit_code": 0, "reason": "finish"}
    records.append(Record(RecordKind.RUN_FINISH, count - 1, None, now_ns + count * 1000, end))
    return records


def dead_pid() -> int:
    """A pid that was alive a moment ago and is not any more."""
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return int(process.stdout)


def flip_byte(path: Path, offset: int) -> None:
    """Invert the bits of one byte in place."""
    fd = os.open(path, os.O_RDWR)
    try:
        before = os.pread(fd, 1, offset)
        assert before, f"{path} has no byte {offset}"
        os.pwrite(fd, bytes([before[0] ^ 0xFF]), offset)
    finally:
        os.close(fd)
