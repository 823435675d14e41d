"""The law of accounting under random outcomes and random crashes, and what it stands for: everything arrives once.

logged = delivered + sampled out + dead-lettered + dropped + pending        after every step
every record that was logged whole is at the tracker, a dead letter, or thrown away by the operator: once, in the end
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from support.streams import frame, loss_frame
from unit.shipper.scripted import BACKEND, Bench, Tracker, with_limits
from verl_shipper import status
from verl_shipper.backends.base import Batch, Delivered, Outcome, Park, Reject, Retry
from verl_shipper.lane_store import LaneStore
from verl_shipper.letters import want
from verl_shipper_spool.header import BULK, SCALARS
from verl_shipper_spool.record import Loss

# A state machine runs thousands of small transactions; none of them has to survive the machine.
FAST = "/dev/shm" if os.path.isdir("/dev/shm") else None


class Accounting(RuleBasedStateMachine):
    """A node spool, a lane, a tracker that answers as it likes, an operator, and a process that dies."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=FAST)
        self.answers: list[Outcome] = []
        self.poison: set[tuple[str, int]] = set()
        self.lose_answer = False
        # One upload at a time and streams with numbers for names: the same steps are the same story again.
        self.bench = Bench(Path(self.folder.name) / "state", Tracker(self._answer), with_limits(runs_at_once_max=1))
        self.logged: dict[str, set[int]] = {}
        self.sealed: set[str] = set()

    def _answer(self, batch: Batch) -> Outcome:
        if self.lose_answer:
            self.lose_answer = False
            self.bench.tracker.keep(batch)
            return Retry("the answer was lost")
        if self.answers:
            return self.answers.pop(0)
        if any((item.stream_id, item.ordinal) in self.poison for item in batch.items):
            return Reject("odd")
        return Delivered()

    def _open(self) -> list[str]:
        return sorted(self.logged.keys() - self.sealed)

    # What trainers do

    @rule(run=st.sampled_from(["a", "b", "c"]), stream_class=st.sampled_from([SCALARS, BULK]))
    def new_stream(self, run: str, stream_class: str) -> None:
        if len(self.logged) < 6:
            name = f"{len(self.logged):032x}"
            self.logged[self.bench.stream(stream_class=stream_class, run_id=run, stream_id=name)] = set()

    @precondition(lambda self: self._open())
    @rule(data=st.data(), count=st.integers(1, 25))
    def log(self, data: st.DataObject, count: int) -> None:
        stream = data.draw(st.sampled_from(self._open()))
        first = self.bench._next[stream]
        self.bench.log(stream, count)
        self.logged[stream].update(range(first, first + count))

    @precondition(lambda self: self._open())
    @rule(data=st.data(), count=st.integers(1, 5), how=st.sampled_from(["loss", "gap", "damage", "payload"]))
    def lose(self, data: st.DataObject, count: int, how: str) -> None:
        bench = self.bench
        stream = data.draw(st.sampled_from(self._open()))
        first = bench._next[stream]
        if how == "payload":
            bench.log_payload(stream, b"\xc1 no record")
            return
        bench._next[stream] += count
        if how == "loss":
            bench.put(stream, loss_frame(first + count, Loss(first, first + count, "metrics", "quota")))
        elif how == "gap":
            bench.put(stream, frame(first + count), gap_bytes=100)
        else:
            bench.put(stream, b"\xf5vs\x01 broken" + frame(first + count))
        if how != "loss":
            bench._next[stream] += 1
            self.logged[stream].add(first + count)

    @precondition(lambda self: self._open())
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self._open()))
        before = self.bench.ingest.streams[stream].walker.ordinal_next
        self.bench.ingest.seal(stream, [])
        self.sealed.add(stream)
        self.logged[stream].update(range(before, self.bench.ingest.streams[stream].walker.ordinal_next))

    # What the tracker does

    @rule(
        outcome=st.sampled_from(
            [
                Retry("503"),
                Retry("429", after_s=3.0),
                Park("401"),
                Reject("odd"),
                Reject("odd", [0, 3]),
                Reject("?", [-1]),
            ]
        )
    )
    def will_answer(self, outcome: Outcome) -> None:
        self.answers.append(outcome)

    @rule()
    def will_lose_an_answer(self) -> None:
        self.lose_answer = True

    @precondition(lambda self: any(self.logged.values()))
    @rule(data=st.data())
    def will_refuse(self, data: st.DataObject) -> None:
        self.poison.add(
            data.draw(st.sampled_from(sorted((s, n) for s, numbers in self.logged.items() for n in numbers)))
        )

    # What happens

    @rule(times=st.integers(1, 6), by_s=st.sampled_from([0.1, 0.6, 40.0]))
    def time_passes(self, times: int, by_s: float) -> None:
        self.bench.tick(times, by_s)

    @rule()
    def the_lane_dies(self) -> None:
        self.bench.crash()
        self.bench.assert_law()

    @rule()
    def the_daemon_dies(self) -> None:
        self.bench.ingest.close()
        self.bench.ingest.streams.clear()
        self.bench.ingest.size_bytes = 0
        self.bench.ingest.open()
        self.bench.assert_law()

    @rule()
    def what_is_delivered_is_reclaimed(self) -> None:
        store = LaneStore(self.bench.store_path)
        safe = {stream: cursor.safe_offset for stream, cursor in store.cursors().items()}
        store.close()
        self.bench.ingest.reclaim(safe)
        self.bench.assert_law()

    # What an operator does

    @rule(what=st.sampled_from(["retry", "discard"]), run=st.sampled_from(["a", "b", "c", None]))
    def an_operator_decides(self, what: str, run: str | None) -> None:
        if what == "retry":
            self.poison.clear()
        want(str(self.bench.root), what, BACKEND, (), run)

    def teardown(self) -> None:
        """A tracker that is well again gets everything that is left."""
        self.answers.clear()
        self.bench.tick(3, by_s=1.0)
        self.bench.until_quiet(by_s=31.0)
        total = self.bench.account()
        arrived: dict[str, set[int]] = {}
        for stream, ordinal in self.bench.tracker.kept:
            arrived.setdefault(stream, set()).add(ordinal)
        lost = sum(len(numbers - arrived.get(stream, set())) for stream, numbers in self.logged.items())
        assert arrived.keys() <= self.logged.keys()
        assert all(numbers <= self.logged[stream] for stream, numbers in arrived.items())
        assert lost <= total.dead_lettered + total.dropped[status.DISCARDED]
        assert total.delivered <= sum(map(len, arrived.values()))
        for stream in self.logged:
            numbers = self.bench.tracker.numbers(stream)
            if not self.poison and not total.dead_lettered and not total.dropped[status.DISCARDED]:
                assert set(numbers) == self.logged[stream]
        self.bench.close()
        self.folder.cleanup()


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
