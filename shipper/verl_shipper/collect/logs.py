"""Metrics that a program appends line by line, as verl's `file` logger does: read on from where we were.

    {"step": 3, "data": {"actor/loss": 0.5}}      or flat: {"step": 3, "actor/loss": 0.5}

A file that is shorter than our place, or other in front of it, was begun anew: it is read from its beginning, and its
run is decided anew. What has no line end yet waits until it stands still; then it counts if it is whole JSON.

Must not know: when to look. On failure: as work.py says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.collect.ledger import TAKEN, TORN_END, WAITING, File, Mark
from verl_shipper.collect.lines import LINE_BYTES_MAX, TOO_LONG, TORN, Line, cut, metrics_of
from verl_shipper.collect.walk import Found, seen_of
from verl_shipper.collect.work import FILES, RECORDS, Work, opened
from verl_shipper.config_watch import WatchEntry
from verl_shipper.policy.watching import HEAD_BYTES, MARK_BYTES, Fate, Seen, digest, time_of
from verl_shipper_spool.record import RecordKind

CHUNK_BYTES = 256 * 1024  # of lines that become durable together
RECORDS_MAX = 2000


@dataclass(slots=True)
class _Chunk:
    """Records of some lines. `bad`: lines behind the last record; `end`: behind all of them."""

    end: int
    bodies: list[tuple[int | None, Any]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    bad: dict[str, int] = field(default_factory=dict)
    is_inside: bool = False  # of a line that is too long


def take_log(work: Work, entry: WatchEntry, file: File, found: Found, *, is_still: bool) -> Iterator[int]:
    """Yields bytes that were dealt with; 0 while there is no room."""
    with opened(found) as fd:
        seen = seen_of(fd)
        if file.head_bytes and file.known.fate(seen, *_surroundings(fd, file)) is Fate.ANEW:
            counts = {"restarted": 1, **({TORN: 1} if file.state == TORN_END else {})}
            fresh = {"offset": 0, "head_bytes": 0, "head": b"", "mark": b"", "is_inside": False, "run": []}
            work.ledger.put(file, Mark({**fresh, "state": WAITING}, counts))
        run = work.run_of(entry, file, found)
        while file.offset < seen.size:
            chunk = _read(fd, file, seen, is_still=is_still)
            if chunk is None:
                break
            if chunk.bodies:
                time_ns = time_of(seen, time.time_ns())
                yield from work.keep(file, run, RecordKind.METRICS, time_ns, chunk.bodies, chunk.marks)
            if chunk.end > file.offset:
                work.ledger.put(file, Mark(_at(fd, chunk.end, is_inside=chunk.is_inside), chunk.bad))
                yield CHUNK_BYTES
        _close(work, file, seen, is_still=is_still)


def skip_log(found: Found) -> dict[str, Any]:
    """Fields of a file whose present content is not wanted: we stand behind its last whole line."""
    with opened(found) as fd:
        start = max(found.seen.size - LINE_BYTES_MAX, 0)
        newline = os.pread(fd, found.seen.size - start, start).rfind(b"\n")
        return _at(fd, start + newline + 1 if newline >= 0 else found.seen.size)


def _surroundings(fd: int, file: File) -> tuple[bytes, bytes]:
    start = max(file.offset - MARK_BYTES, 0)
    return os.pread(fd, file.head_bytes, 0), os.pread(fd, file.offset - start, start)


def _at(fd: int, offset: int, *, is_inside: bool = False) -> dict[str, Any]:
    """What is true of a file that was read up to here."""
    head = os.pread(fd, min(HEAD_BYTES, offset), 0)
    start = max(offset - MARK_BYTES, 0)
    before = os.pread(fd, offset - start, start)
    at = {"offset": offset, "head_bytes": len(head), "head": digest(head), "mark": digest(before)}
    return {**at, "is_inside": is_inside}


def _read(fd: int, file: File, seen: Seen, *, is_still: bool) -> _Chunk | None:
    """The next lines; None when there is no whole one, or the next one is not to be believed yet."""
    start = file.offset
    data = os.pread(fd, min(LINE_BYTES_MAX if file.is_inside else CHUNK_BYTES, seen.size - start), start)
    if file.is_inside:
        end = data.find(b"\n") + 1
        return _Chunk(start + (end or len(data)), is_inside=not end) if data else None
    if b"\n" not in data and start + len(data) < seen.size:
        data = os.pread(fd, min(LINE_BYTES_MAX + 1, seen.size - start), start)
        if b"\n" not in data and len(data) > LINE_BYTES_MAX:
            return _Chunk(start + len(data), bad={TOO_LONG: 1}, is_inside=True)
    return _chunk_of(fd, file, data, seen, is_still=is_still)


def _chunk_of(fd: int, file: File, data: bytes, seen: Seen, *, is_still: bool) -> _Chunk | None:
    """The records of whole lines at a file's place."""
    start = file.offset
    chunk = _Chunk(start)
    for line in cut([data], start):
        if line is None:
            continue
        if len(chunk.bodies) >= RECORDS_MAX or not _is_credible(line, seen, is_still=is_still):
            break
        chunk.end = line.end
        if not (line.content or b"").strip():
            continue
        values = metrics_of(line.content or b"")
        if isinstance(values, str):
            chunk.bad[values] = chunk.bad.get(values, 0) + 1
            continue
        counts = {RECORDS: 1, **chunk.bad, **({} if file.part or chunk.bodies else {FILES: 1})}
        chunk.bodies.append(values)
        chunk.marks.append(Mark({**_at_in(fd, data, start, line.end), "part": 1}, counts))
        chunk.bad = {}
    return chunk if chunk.end > start else None


def _is_credible(line: Line, seen: Seen, *, is_still: bool) -> bool:
    """Whether a line is there as it will stay."""
    if not line.is_whole:
        return is_still and line.end == seen.size and _is_whole_json(line)
    # A network file system may show a hole before it shows the bytes.
    return is_still or b"\0" not in (line.content or b"")


def _at_in(fd: int, data: bytes, start: int, end: int) -> dict[str, Any]:
    """`_at`, from bytes that were read already where that can be."""
    if end - start < MARK_BYTES or end < HEAD_BYTES:
        return _at(fd, end)
    return {"offset": end, "mark": digest(data[end - start - MARK_BYTES : end - start]), "is_inside": False} | (
        {} if start >= HEAD_BYTES else {"head_bytes": HEAD_BYTES, "head": digest(os.pread(fd, HEAD_BYTES, 0))}
    )


def _is_whole_json(line: Line) -> bool:
    return line.content is not None and not isinstance(metrics_of(line.content), str)


def _close(work: Work, file: File, seen: Seen, *, is_still: bool) -> None:
    """Whether there is anything left that may become a line."""
    fields: dict[str, Any] = {"seen": seen.values()}
    if file.offset >= seen.size:
        fields["state"] = TAKEN
    elif is_still:
        fields["state"] = TORN_END
    else:
        fields["state"] = WAITING
    if file.state != fields["state"] or file.seen != seen:
        work.ledger.put(file, Mark(fields))
