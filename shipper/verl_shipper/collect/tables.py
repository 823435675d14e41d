"""Dumps of generations, `{step}.jsonl`: a table, cut into records. Read twice: first for its columns and cuts.

The cut is durable before the first record, so that a table that was interrupted is continued, not begun again. One of
the same run, step, name and content is known already, whatever its file is called; another content is another call.

Must not know: when a file is complete. On failure: as work.py says; a table whose file changed in its midst stays
without its rest and is counted as `changed`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.collect.ledger import TAKEN, File, Mark, key_of
from verl_shipper.collect.lines import TOO_LARGE, TOO_LONG, TORN, Line, cut, row_of, step_of
from verl_shipper.collect.walk import Found
from verl_shipper.collect.work import (
    CHANGED,
    FILES,
    READ_BYTES,
    RECORDS,
    NotNowError,
    RefusedError,
    Work,
    blocks,
    must_be,
    opened,
)
from verl_shipper.config_watch import WatchEntry
from verl_shipper.policy.file_names import dump_step, step_in
from verl_shipper.policy.watching import Seen, digest, time_of
from verl_shipper_spool.frame import PAYLOAD_BYTES_MAX
from verl_shipper_spool.record import RecordKind

PART_BYTES = 1_000_000  # as a client cuts its tables
TABLE_BYTES_MAX = 4 * 1024**3  # a step of 100,000 long samples; beyond it is no dump of generations
COLUMNS_MAX = 256
FIRST_COLUMNS = ("input", "output", "gts", "score", "step")  # as verl writes them, whatever a row begins with


def take_table(work: Work, entry: WatchEntry, file: File, found: Found) -> Iterator[int]:
    """Yields bytes that were dealt with; 0 while there is no room."""
    if found.seen.size > TABLE_BYTES_MAX:
        raise RefusedError(TOO_LARGE)
    with opened(found) as fd:
        must_be(fd, found.seen)
        if not file.plan or Seen(*file.plan["seen"]) != found.seen:
            yield from _survey(work, entry, file, found, fd)
            if file.state == TAKEN:
                return
        yield from _parts(work, file, found, fd)


@dataclass(slots=True)
class _Cut:
    """A table's columns and cuts, as they come out of the first reading. `bad`: lines that are no rows, by reason."""

    columns: dict[str, None] = field(default_factory=dict)
    cuts: list[list[Any]] = field(default_factory=list)
    bad: dict[str, int] = field(default_factory=dict)
    step: int | None = None
    content: Any = field(default_factory=hashlib.sha256)
    _texts: list[bytes] = field(default_factory=list)
    _start: int = 0
    _size: int = 0

    def read(self, fd: int, size: int) -> Iterator[int]:
        for line in cut(self._hashed(blocks(fd, 0, size)), 0):
            if line is None:
                yield READ_BYTES
            elif line.content is None:  # its bytes shall stand in no part
                self._count(TOO_LONG)
                self._close(line.start)
                self._start = line.end
            elif line.content.strip():
                self._add(line)
                if self._size >= PART_BYTES:
                    yield self._size
                    self._close(line.end)
        self._close(size)

    def ordered(self) -> list[str]:
        first = [column for column in FIRST_COLUMNS if column in self.columns]
        return [*first, *(column for column in self.columns if column not in first)][:COLUMNS_MAX]

    def _add(self, line: Line) -> None:
        row = row_of(line.content or b"")
        if isinstance(row, str):
            self._count(row if line.is_whole else TORN)
            return
        self.step = step_of(row.get("step")) if self.step is None else self.step
        if len(self.columns) < COLUMNS_MAX:
            self.columns.update(dict.fromkeys(row))
        self._texts.append(line.content or b"")
        self._size += len(line.content or b"")

    def _close(self, end: int) -> None:
        if self._texts:
            self.cuts.append([self._start, end, digest(b"\n".join(self._texts))])
        self._texts, self._start, self._size = [], end, 0

    def _count(self, reason: str) -> None:
        self.bad[reason] = self.bad.get(reason, 0) + 1

    def _hashed(self, source: Iterator[bytes]) -> Iterator[bytes]:
        for block in source:
            self.content.update(block)
            yield block


def _survey(work: Work, entry: WatchEntry, file: File, found: Found, fd: int) -> Iterator[int]:
    """First reading: columns, cuts, and whether the content is known."""
    made = _Cut()
    yield from made.read(fd, found.seen.size)
    must_be(fd, found.seen)
    seen = found.seen.values()
    if file.plan.get("content") == made.content.digest():  # written again in the midst of it: nothing new
        work.ledger.put(file, Mark({"plan": {**file.plan, "seen": seen}}))
        return
    if file.plan:
        work.ledger.put(file, Mark({"plan": {}, "part": 0}, {CHANGED: 1} if file.part else {}))
    file.run = []  # other content may be another run's
    run = work.run_of(entry, file, found)
    steps = (dump_step(found.path.rpartition("/")[2]), step_in(found.inner), made.step)
    step = next((each for each in steps if each is not None), None)
    key = key_of(run.run_id, "table", entry.table_name, step, made.content.digest())
    if not made.cuts or work.ledger.knows(key):
        work.ledger.put(file, Mark({"state": TAKEN, "seen": seen}, {"known": 1} if made.cuts else made.bad))
        return
    table_key = key_of(run.run_id, entry.table_name, step)
    call = work.ledger.next_call(table_key)
    file.plan = {"seen": seen, "columns": made.ordered(), "cuts": made.cuts, "bad": made.bad, "call": call}
    file.plan |= {"step": step, "name": entry.table_name, "digest": key, "content": made.content.digest()}
    file.part = 0
    work.ledger.put_plan(file, table_key, call)


def _parts(work: Work, file: File, found: Found, fd: int) -> Iterator[int]:
    """Second reading: a record per part."""
    plan, run = file.plan, work.run_of(WatchEntry(found.path), file, found)
    cuts, time_ns = plan["cuts"], time_of(found.seen, time.time_ns())
    named = {"name": plan["name"]} if plan["name"] else {}
    while file.part < len(cuts):
        part = file.part
        rows = _rows(fd, cuts[part], plan["columns"])
        body = {"columns": plan["columns"], "rows": rows, "part": part, "parts": len(cuts), "call": plan["call"]}
        body |= named
        counts = {RECORDS: 1}
        if work.streams.size_of(body) > PAYLOAD_BYTES_MAX:
            body["rows"], counts[TOO_LARGE] = [], len(rows)
        mark = Mark({"part": part + 1}, counts)
        is_last = part + 1 == len(cuts)
        if is_last:
            fields = {"state": TAKEN, "seen": plan["seen"], "plan": {}, "part": 0}
            mark = Mark(fields, {**counts, FILES: 1, **plan["bad"]}, plan["digest"])
        yield from work.keep(file, run, RecordKind.GENERATIONS, time_ns, [(plan["step"], body)], [mark])
        if is_last:
            return


def _rows(fd: int, part: list[Any], columns: list[str]) -> list[list[Any]]:
    """Rows of one part, if it is what it was."""
    start, end, known = part
    rows, texts = [], []
    for line in cut(blocks(fd, start, end), start):
        row = row_of(line.content) if line is not None and line.content and line.content.strip() else ""
        if line is not None and line.content is not None and not isinstance(row, str):
            rows.append([row.get(column) for column in columns])
            texts.append(line.content)
    if digest(b"\n".join(texts)) != known:
        raise NotNowError("it changed while it was read")
    return rows
