"""The verdict on every record of one stream, in the stream's order.

    offer(tag, record)        the next one; `tag` is the caller's
    end()                     nothing more comes, or nothing for a while: the newest step is the last
    decided()                 what is settled by now, in order; a record that waits holds back those behind it. To be
                              asked after every offer

    kind                      kept
    run_start, run_finish, file, system   always
    metrics                   by rank, names and steps; names that are not kept are taken out; without a step: always
    text                      by rank and names
    generations               chosen rows; a table with a name is no validation: all of it
    span                      by traces.py

What waits is never more than the newest step, or one table of validation. `state` describes the stream up to the
first record that waits, so that a process which begins there again comes to the same verdicts.

Must not know: spool, time, other streams (ranks that are reduced to one value: reduce.py comes behind this).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from verl_shipper.policy.answers import Answers, Decode
from verl_shipper.policy.patterns import UNWANTED, Names
from verl_shipper.policy.sampling import RANK_0, RANK_ALL, REDUCTIONS, Sampling, TraceSampling
from verl_shipper.policy.steps import Steps, Verdict
from verl_shipper.policy.tables import INPUTS_CHARS_MAX, Table, is_first, is_last, key_of, rows_of
from verl_shipper.policy.traces import Traces, trimmed
from verl_shipper.policy.window import Window
from verl_shipper.values import DEPTH_MAX, flatten_metrics, key_text
from verl_shipper_spool.record import Record, RecordKind

# What waits together at most. A step that is larger is kept, of a longer table what is there counts.
WAITING_MAX = 10_000
WAITING_BYTES_MAX = 8 * 1024 * 1024
Tag = TypeVar("Tag")

BY_RANK, BY_NAME, BY_STEP, BY_ROW, BY_TRACE = "rank", "name", "log_frequency", "log_val_generations", "traces"


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes a stream."""

    rank: int = 0
    world: int = 1

    def is_left_out(self, sampling: Sampling) -> bool:
        """Whether its metrics are those of another rank than is wanted."""
        return sampling.rank == RANK_0 and self.rank != 0

    def is_told_apart(self, sampling: Sampling) -> bool:
        """Whether its names carry its rank."""
        return sampling.rank == RANK_ALL and (self.world > 1 or self.rank > 0)


@dataclass(frozen=True, slots=True)
class Decision(Generic[Tag]):
    """`record`: as it is to be delivered. None: sampled out, by `why`; no record at all when that is empty; a part of a
    table that is to be read again when `rows` says which of its rows. `thinned`: values that were taken out. `before`:
    the sampler's state in front of it, where somebody may still hold it back."""

    tag: Tag
    record: Record | None = None
    why: str = ""
    thinned: int = 0
    rows: tuple[int, ...] = ()
    part: int = 0
    parts: int = 0
    before: Mapping[str, Any] | None = None


@dataclass(slots=True)
class _Waiting(Generic[Tag]):
    tag: Tag
    record: Record | None
    size_bytes: int = 0
    groups: frozenset[int] = frozenset()
    turn: int = 0
    table: Table | None = None
    part: int = 0


class StreamSampler(Generic[Tag]):
    """All knobs at work on one stream."""

    @staticmethod
    def is_trivial(sampling: Sampling, writer: Writer, *, is_scalars: bool) -> bool:
        """Whether everything in such a stream is delivered as it is, so that nobody need ask."""
        if not is_scalars:
            return sampling.log_val_generations is None and replace(sampling.traces, tokenizer=None) == TraceSampling()
        stands_apart = sampling.rank in REDUCTIONS or writer.is_left_out(sampling) or writer.is_told_apart(sampling)
        return not stands_apart and Names(sampling).is_trivial

    def __init__(self, sampling: Sampling, writer: Writer, refuse: str = "", decode: Decode | None = None) -> None:
        """`refuse`: a reason to sample out everything. `decode`: text of token ids, for `token2text`."""
        self._sampling = sampling
        self._refuse = refuse
        self._samples_rows = sampling.log_val_generations is not None
        self._answers = None if decode is None else Answers(decode)
        self._writer = writer
        self._names = Names(sampling)
        mode = sampling.log_mode
        self._window = None if mode == "last" else Window(mode)
        self._keeps_states = sampling.rank in REDUCTIONS and bool(self._names.intervals)
        self._steps = Steps(self._names.intervals, patient=mode != "last", looks_back=self._keeps_states)
        self._traces = Traces(sampling.traces)
        self._table: Table | None = None
        self._ended_table: tuple[Any, ...] | None = None  # the key of the last one; what still comes of it is left out
        self._gathered: int | None = None  # the newest step whose values are in the window
        self._queue: deque[_Waiting[Tag]] = deque()
        self._bytes = 0
        self.newest: int | None = None  # step of metrics offered so far
        self._others = writer.is_left_out(sampling)
        self._suffix = f"/rank{writer.rank}" if writer.is_told_apart(sampling) else ""

    @property
    def waits(self) -> bool:
        return bool(self._queue)

    def offer(self, tag: Tag, record: Record | None, size_bytes: int = 0) -> None:
        """The next finding of the stream; None for what is no record."""
        entry = _Waiting(tag, record, size_bytes)
        if record is not None and not self._refuse:
            if record.kind is RecordKind.METRICS:
                self._offer_metrics(entry, record)
            elif record.kind is RecordKind.GENERATIONS and self._samples_rows and not record.body.get("name"):
                self._offer_part(entry, record)
            elif record.kind is RecordKind.RUN_FINISH:
                self.end()
        self._queue.append(entry)
        self._bytes += entry.size_bytes
        if len(self._queue) >= WAITING_MAX or self._bytes >= WAITING_BYTES_MAX:
            self.end()

    @property
    def looks_back(self) -> bool:
        """Whether what comes may ask for what has gone by: `remember` wants the newest of it after a restart."""
        return self._answers is not None

    def remember(self, record: Record) -> None:
        """A record that was delivered before this process began."""
        if self._answers is not None and record.kind is RecordKind.SPAN:
            self._answers.remember(record.body)

    def end(self) -> None:
        self._steps.close()
        self._close_table()

    def decided(self) -> Iterator[Decision[Tag]]:
        while self._queue:
            decision = self._decide(self._queue[0])
            if decision is None:
                return
            self._bytes -= self._queue.popleft().size_bytes
            yield decision

    def state(self) -> dict[str, Any]:
        window = {} if self._window is None else self._window.state()
        return {
            "steps": self._steps.state(),
            "gathered": self._gathered,
            "window": window,
            "table": self._ended_table,
            "traces": self._traces.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._steps.restore(state.get("steps", {}))
        self._gathered = state.get("gathered")
        self._traces.restore(state.get("traces", []))
        table = state.get("table")
        self._ended_table = None if table is None else tuple(table)
        if self._window is not None:
            self._window.restore(state.get("window", {}))

    def _offer_metrics(self, entry: _Waiting[Tag], record: Record) -> None:
        entry.groups = frozenset() if self._others else self._names.groups(record.body)
        step = record.step
        if step is not None and (self.newest is None or step > self.newest):
            self.newest = step
        if step is None or not self._names.intervals or entry.groups <= {UNWANTED}:
            return
        if self._steps.first is None or not entry.groups.isdisjoint(self._names.intervals):
            self._steps.see(step)
        entry.turn = self._steps.turn

    def _offer_part(self, entry: _Waiting[Tag], record: Record) -> None:
        key, rows = key_of(record.step, record.body), rows_of(record.body)
        table = self._table
        if table is None or table.key != key or is_first(record.body):
            is_over = key == self._ended_table and not is_first(record.body)
            if is_over or (rows and self._sampling.log_val_generations == 0):
                entry.table = Table(key, is_whole=True)
            else:
                self._close_table()
                table = self._table = Table(key)
        if entry.table is None and table is not None:
            entry.part = table.add(record.body)
            is_empty = not rows and is_first(record.body) and is_last(record.body)
            entry.table = None if is_empty else table  # an empty table is kept as it is
            if is_last(record.body) or table.chars > INPUTS_CHARS_MAX:
                self._close_table()
        if entry.table is not None:
            entry.record, entry.size_bytes = None, 0  # outputs are large; the caller reads them again

    def _close_table(self) -> None:
        if self._table is not None:
            self._table.choose(self._sampling.log_val_generations or 0)
            self._ended_table = self._table.key
            self._table = None

    def _decide(self, entry: _Waiting[Tag]) -> Decision[Tag] | None:
        """What becomes of the first in the queue; None while it waits."""
        record = entry.record
        if self._refuse and (record is not None or entry.table is not None):
            return Decision(entry.tag, why=self._refuse)
        if entry.table is not None:
            return self._decide_part(entry, entry.table)
        if record is None:
            return Decision(entry.tag)
        if record.kind is RecordKind.METRICS:
            return self._decide_metrics(entry, record)
        if record.kind is RecordKind.TEXT:
            return self._decide_text(entry, record)
        if record.kind is RecordKind.SPAN:
            if not self._traces.wants(record.step, record.body):
                return Decision(entry.tag, why=BY_TRACE)
            body = trimmed(record.body, self._sampling.traces, self._answers)
            return Decision(entry.tag, record if body is record.body else replace(record, body=body))
        return Decision(entry.tag, record)

    def _decide_part(self, entry: _Waiting[Tag], table: Table) -> Decision[Tag] | None:
        if not table.is_whole:
            return None
        if entry.part not in table.chosen:
            return Decision(entry.tag, why=BY_ROW)
        number = sorted(table.chosen).index(entry.part)
        return Decision(entry.tag, rows=table.chosen[entry.part], part=number, parts=len(table.chosen))

    def _decide_text(self, entry: _Waiting[Tag], record: Record) -> Decision[Tag]:
        if self._writer.rank and self._sampling.rank != RANK_ALL:
            return Decision(entry.tag, why=BY_RANK)
        if self._names.all_wanted and not self._suffix:
            return Decision(entry.tag, record)
        wanted = {key: text for key, text in record.body.items() if self._names.every(key_text(key))}
        if not wanted and record.body:
            return Decision(entry.tag, why=BY_NAME)
        body = {f"{key_text(key)}{self._suffix}": text for key, text in wanted.items()} if self._suffix else wanted
        return Decision(entry.tag, replace(record, body=body), thinned=len(record.body) - len(wanted))

    def _decide_metrics(self, entry: _Waiting[Tag], record: Record) -> Decision[Tag] | None:
        if self._others:
            return Decision(entry.tag, why=BY_RANK)
        drop = {UNWANTED} & entry.groups
        before = None
        if record.step is not None and self._names.intervals:
            for every in entry.groups & self._names.intervals:
                verdict = self._steps.verdict(every, record.step)
                if verdict is Verdict.WAIT:
                    return None
                if verdict is Verdict.DROP:
                    drop |= {every}
            if self._keeps_states and not drop >= entry.groups:
                before = {**self.state(), "steps": self._steps.state_at(entry.turn)}
            if self._window is not None:
                record = self._gather(entry, record, record.step, drop, self._window)
        if not drop:
            return Decision(entry.tag, self._named(record), before=before)
        if drop >= entry.groups:
            return Decision(entry.tag, why=BY_NAME if drop == {UNWANTED} else BY_STEP)
        body, thinned = _without(record.body, lambda name: self._names.every(name) in drop)
        return Decision(entry.tag, self._named(replace(record, body=body)), thinned=thinned, before=before)

    def _gather(self, entry: _Waiting[Tag], record: Record, step: int, drop: set[int], window: Window) -> Record:
        """Numbers are added up; where a window ends with this step they are replaced by what was added up."""
        intervals = self._names.intervals
        if (self._gathered is not None and step < self._gathered) or entry.groups.isdisjoint(intervals):
            return record  # too late for its window, or none of it
        self._gathered = step
        ending = {every for every in (entry.groups & intervals) - drop if self._steps.is_last(every, step)}
        changed: dict[str, int | float] = {}
        every_of, add = self._names.every, window.add  # a hot loop: all numbers of all steps come by
        for name, number in flatten_metrics(record.body).numbers.items():
            every = every_of(name)
            if every in ending:
                changed[name] = window.peek(name, number)
            elif every in intervals:
                add(name, number)
        ended = {every for every in ending if not self._has_company(entry, step, every)}
        if ended:
            changed |= window.take_rest(lambda name: self._names.every(name) in ended)
        return replace(record, body=with_numbers(record.body, changed)) if changed else record

    def _has_company(self, entry: _Waiting[Tag], step: int, every: int) -> bool:
        """Whether a later record of the same step waits, which will take what is left."""
        return any(
            other is not entry and other.record is not None and other.record.step == step and every in other.groups
            for other in self._queue
        )

    def _named(self, record: Record) -> Record:
        """With the rank in every name, if ranks are told apart by that."""
        return replace(record, body=_suffixed(record.body, self._suffix)) if self._suffix else record


def with_numbers(body: Mapping[Any, Any], numbers: Mapping[str, int | float]) -> dict[Any, Any]:
    """A body that gives these numbers under these flat names, and else what `body` gives."""
    rest, _ = _without(body, lambda name: name in numbers)
    return {**rest, **numbers}


def _suffixed(body: Mapping[Any, Any], suffix: str, depth: int = 1) -> dict[Any, Any]:
    return {
        (key if is_map else f"{key_text(key)}{suffix}"): _suffixed(value, suffix, depth + 1) if is_map else value
        for key, value in body.items()
        for is_map in (isinstance(value, dict) and depth < DEPTH_MAX,)
    }


def _without(body: Mapping[Any, Any], gone: Any, prefix: str = "", depth: int = 1) -> tuple[dict[Any, Any], int]:
    """A body without the names that are `gone`, and how many values that were."""
    left: dict[Any, Any] = {}
    count = 0
    for key, value in body.items():
        name = prefix + key_text(key)
        if isinstance(value, dict) and depth < DEPTH_MAX:
            inner, more = _without(value, gone, f"{name}/", depth + 1)
            count += more
            if inner or not value:
                left[key] = inner
        elif gone(name):
            count += 1
        else:
            left[key] = value
    return left, count
