"""One value of all ranks: records of the same step in several streams of a run become one.

Behind the streams' own samplers, so that only kept steps come here. A step is settled when every rank has gone beyond
it or has ended, or when it has waited for `timeout_s`: who is late then is not waited for until it has caught up. Ranks
of the run that never showed up may be on other nodes: they are waited for once, at the beginning.

    offer(stream, decision)     in each stream's order
    decided(...)                what is settled, in each stream's order; all records of a step together

The record of the lowest rank carries the result, the others are sampled out. Numbers that only others have are added
to it; what is no number is the lowest rank's. What a rank brings for a step that was settled without it is sampled out.
A stream that goes back to steps it had before waits for nobody: these are settled again, each with what is there.

Must not know: the spool. Time is passed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic

from verl_shipper.policy.stream_sampler import BY_RANK, Decision, Tag, with_numbers
from verl_shipper.policy.window import Number, reduced
from verl_shipper.values import flatten_metrics
from verl_shipper_spool.record import RecordKind

AHEAD_MAX = 1000  # decisions of one stream that may wait for other ranks
SETTLED_MAX = 256  # settled steps that are remembered, for ranks that come late
ENDED = math.inf  # progress of a stream that brings nothing more


@dataclass(slots=True)
class _Rank(Generic[Tag]):
    """One rank's stream."""

    rank: int
    created_ns: int
    queue: deque[Decision[Tag]] = field(default_factory=deque)
    is_late: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return self.rank, self.created_ns


class Reducer(Generic[Tag]):
    """The ranks of one run on this node."""

    def __init__(self, mode: str, timeout_s: float) -> None:
        self._mode = mode
        self._timeout_s = timeout_s
        self._ranks: dict[str, _Rank[Tag]] = {}
        self._settled: dict[int, tuple[set[str], int]] = {}  # step → streams that were in it, wall time
        self._waits_for: int | None = None
        self._since_s = 0.0
        self._seen: set[int] = set()
        self._world = 1
        self._begun_s: float | None = None
        self.settled = 0  # steps so far

    def add(self, stream: str, rank: int, created_ns: int, world: int = 1) -> None:
        self._ranks.setdefault(stream, _Rank(rank, created_ns))
        self._seen.add(rank)
        self._world = max(self._world, world)

    def forget(self, stream: str) -> None:
        self._ranks.pop(stream, None)

    def is_ahead(self, stream: str) -> bool:
        """Whether a stream should not be read on for now."""
        return stream in self._ranks and len(self._ranks[stream].queue) >= AHEAD_MAX

    def first(self, stream: str) -> Decision[Tag] | None:
        """The first of a stream that waits."""
        queue = self._ranks[stream].queue if stream in self._ranks else None
        return queue[0] if queue else None

    @property
    def waits(self) -> bool:
        return any(rank.queue for rank in self._ranks.values())

    def offer(self, stream: str, decision: Decision[Tag]) -> None:
        rank = self._ranks[stream]
        rank.queue.append(decision)
        if decision.record is not None and decision.record.kind is RecordKind.SYSTEM:
            rank.is_late = True  # a node's own facts: whoever writes them has no steps that a rank would wait for

    def decided(
        self, progress: Mapping[str, float | None], now_s: float, now_ns: int
    ) -> Iterator[tuple[str, Decision[Tag]]]:
        """What is settled. `progress`: the newest step of each stream, None before its first, ENDED behind its last."""
        while True:
            for stream, rank in self._ranks.items():
                while rank.queue and self._is_free(stream, rank):
                    yield stream, _left_out(rank.queue.popleft())
            heads = [step for rank in self._ranks.values() if rank.queue and (step := _step(rank.queue[0])) is not None]
            if not heads or not self._is_ready(min(heads), progress, now_s):
                return
            yield from self._settle(min(heads), now_ns)

    def state(self) -> list[Any]:
        """What a later process needs to go on."""
        names = sorted({stream for streams, _ in self._settled.values() for stream in streams})
        index = {name: number for number, name in enumerate(names)}
        settled = [
            [step, sorted(index[name] for name in streams), time_ns]
            for step, (streams, time_ns) in self._settled.items()
        ]
        return [names, settled]

    def restore(self, state: list[Any]) -> None:
        names, settled = state or ([], [])
        self._settled = {step: ({names[index] for index in streams}, time_ns) for step, streams, time_ns in settled}

    def _is_free(self, stream: str, rank: _Rank[Tag]) -> bool:
        """Whether the first in a queue need not wait: it is no metrics of a step, or too late."""
        step = _step(rank.queue[0])
        return step is None or self._came_late(step, stream, rank)

    def _came_late(self, step: int, stream: str, rank: _Rank[Tag]) -> bool:
        streams, time_ns = self._settled.get(step, (None, 0))
        # A stream that began only afterwards is another attempt at the same steps, not a rank that is late.
        return streams is not None and stream not in streams and rank.created_ns < time_ns

    def _is_ready(self, step: int, progress: Mapping[str, float | None], now_s: float) -> bool:
        if self._waits_for != step:
            self._waits_for, self._since_s = step, now_s
        if self._begun_s is None:
            self._begun_s = now_s
        is_over = now_s - self._since_s >= self._timeout_s
        missing = len(self._seen) < self._world and now_s - self._begun_s < self._timeout_s
        for stream, rank in self._ranks.items():
            newest = progress.get(stream, ENDED)
            if newest is not None and newest > step:
                rank.is_late = False
            elif is_over:
                rank.is_late = True
            elif not rank.is_late and not self.is_ahead(stream):
                missing = True
        return not missing

    def _settle(self, step: int, now_ns: int) -> Iterator[tuple[str, Decision[Tag]]]:
        taken: list[tuple[str, _Rank[Tag], list[Decision[Tag]]]] = []
        for stream, rank in self._ranks.items():
            if not rank.queue or _step(rank.queue[0]) != step:
                continue
            decisions = []
            while rank.queue and _step(rank.queue[0]) in (step, None):
                decisions.append(rank.queue.popleft())
            taken.append((stream, rank, decisions))
        carrier = min(taken, key=lambda each: each[1].order)[0]
        values = [(stream, _numbers(decisions)) for stream, _, decisions in taken]
        result = self._reduce([numbers for _, numbers in values])
        self.settled += 1
        before, _ = self._settled.pop(step, (set(), 0))
        self._settled[step] = (before | {stream for stream, _, _ in taken}, now_ns)
        if len(self._settled) > SETTLED_MAX:
            del self._settled[next(iter(self._settled))]
        for stream, _, decisions in taken:
            for decision in _carrying(decisions, result) if stream == carrier else map(_left_out, decisions):
                yield stream, decision

    def _reduce(self, ranks: list[dict[str, Number]]) -> dict[str, Number]:
        names = dict.fromkeys(name for numbers in ranks for name in numbers)
        return {name: reduced(self._mode, [numbers[name] for numbers in ranks if name in numbers]) for name in names}


def _step(decision: Decision[Tag]) -> int | None:
    """Step of metrics; None for anything else, and for metrics that are sampled out or have none."""
    record = decision.record
    return record.step if record is not None and record.kind is RecordKind.METRICS else None


def _numbers(decisions: list[Decision[Tag]]) -> dict[str, Number]:
    """A rank's numbers of one step; of a name that comes twice the later one."""
    numbers: dict[str, Number] = {}
    for decision in decisions:
        if decision.record is not None and decision.record.kind is RecordKind.METRICS:
            numbers |= flatten_metrics(decision.record.body).numbers
    return numbers


def _carrying(decisions: list[Decision[Tag]], result: Mapping[str, Number]) -> Iterator[Decision[Tag]]:
    """The carrier's decisions with the result in them; what has no place of its own goes to the last one."""
    left = dict(result)
    last = max(index for index, decision in enumerate(decisions) if _step(decision) is not None)
    for index, decision in enumerate(decisions):
        record = decision.record
        if record is None or _step(decision) is None:
            yield decision
            continue
        mine = {name: result[name] for name in flatten_metrics(record.body).numbers}
        for name in mine:
            left.pop(name, None)
        if index == last:
            mine |= left
        yield replace(decision, record=replace(record, body=with_numbers(record.body, mine)))


def _left_out(decision: Decision[Tag]) -> Decision[Tag]:
    return decision if _step(decision) is None else Decision(decision.tag, why=BY_RANK)
