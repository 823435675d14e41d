"""A lane that samples, through crashes, lost state, reclaim and seal: what arrives is what an oracle keeps.

The oracle is one sampler for each stream that sees it whole, and one reducer over all that waits for everybody. The law
of accounting holds at every turn, all that is not kept is sampled out, and each stream arrives in order.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from support.samples import metrics, part, record, span
from support.streams import loss_frame
from unit.shipper.scripted import Bench, Tracker, with_limits
from verl_shipper.lane_intake import Order
from verl_shipper.lane_store import LaneStore
from verl_shipper.policy.reduce import ENDED, Reducer
from verl_shipper.policy.sampling import REDUCTIONS, Sampling
from verl_shipper.policy.stream_sampler import Decision, StreamSampler, Writer
from verl_shipper.policy.tables import picked
from verl_shipper_spool.frame import encode
from verl_shipper_spool.header import BULK, SCALARS
from verl_shipper_spool.record import Loss, Record, RecordKind, decode_record, encode_record

FAST = "/dev/shm" if os.path.isdir("/dev/shm") else None
FOREVER_S = 1e9
ORDERS: tuple[dict[str, Any], ...] = (
    {"log_frequency": {"*": 3, "b": 5}, "rank": "all", "log_val_generations": 2},
    {"log_frequency": 4, "log_mode": "mean", "exclude": ["c"], "traces": {"max_samples_per_step_per_worker": 1}},
    {"log_frequency": 3, "log_mode": "max", "rank": "mean", "rank_timeout_s": FOREVER_S, "log_val_generations": 1},
    {"log_frequency": 2, "rank": "sum", "rank_timeout_s": FOREVER_S},
    {"rank": "max", "rank_timeout_s": FOREVER_S},
)
WORLD = 2
Key = tuple[str, int]


class SampledLane(RuleBasedStateMachine):
    """Two ranks with two streams each, and the lane that reads them."""

    @initialize(given=st.sampled_from(ORDERS))
    def begin(self, given: dict[str, Any]) -> None:
        self.given = given
        self.folder = tempfile.TemporaryDirectory(dir=FAST)
        backend = with_limits(runs_at_once_max=1)
        self.bench = Bench(Path(self.folder.name) / "state", Tracker(), backend, Order("scripted", given))
        self.content: dict[str, list[tuple[int, Record | None]]] = {}
        self.writer: dict[str, Writer] = {}
        self.sealed: set[str] = set()
        self.steps: dict[str, int] = {}
        self.scalars: list[str] = []
        self.bulk: list[str] = []
        self.reclaimed = False
        self.lossy: set[str] = set()
        for rank in range(WORLD):
            for stream_class, streams in ((SCALARS, self.scalars), (BULK, self.bulk)):
                name = f"{len(self.content):032x}"
                self.bench.stream(stream_class=stream_class, stream_id=name, rank=rank, world=WORLD)
                self.content[name], self.writer[name], self.steps[name] = [], Writer(rank, WORLD), 0
                streams.append(name)

    def _put(self, stream: str, each: Record) -> None:
        ordinal = self.bench._next[stream]
        self.bench.log_payload(stream, encode_record(each))
        self.content[stream].append((ordinal, decode_record(encode_record(each))))

    def _open(self, streams: list[str]) -> list[str]:
        return sorted(set(streams) - self.sealed)

    @precondition(lambda self: self._open(self.scalars))
    @rule(data=st.data(), jumps=st.lists(st.sampled_from([0, 1, 1, 1, 2, 6]), max_size=12), name=st.sampled_from("abc"))
    def log(self, data: st.DataObject, jumps: list[int], name: str) -> None:
        stream = data.draw(st.sampled_from(self._open(self.scalars)))
        for jump in jumps:
            self.steps[stream] += jump
            number = len(self.content[stream])
            self._put(stream, metrics(self.steps[stream], {name: number, "val/x": -number}))

    @precondition(lambda self: self._open(self.scalars) and self.given.get("rank") not in REDUCTIONS)
    @rule(data=st.data(), step=st.none() | st.integers(-3, 30))
    def log_out_of_order(self, data: st.DataObject, step: int | None) -> None:
        stream = data.draw(st.sampled_from(self._open(self.scalars)))
        self._put(stream, metrics(step, {"a": 1.5}))

    @precondition(lambda self: self._open(self.bulk))
    @rule(data=st.data(), inputs=st.lists(st.sampled_from("pqrst"), max_size=5), number=st.integers(0, 2))
    def log_part(self, data: st.DataObject, inputs: list[str], number: int) -> None:
        stream = data.draw(st.sampled_from(self._open(self.bulk)))
        self._put(stream, part(1, inputs, number, 3))

    @precondition(lambda self: self._open(self.bulk))
    @rule(data=st.data(), step=st.integers(0, 2), trace=st.integers(0, 3))
    def log_span(self, data: st.DataObject, step: int, trace: int) -> None:
        self._put(data.draw(st.sampled_from(self._open(self.bulk))), span(step, trace))

    @precondition(lambda self: self._open(self.scalars + self.bulk))
    @rule(data=st.data(), count=st.integers(1, 3), how=st.sampled_from(["loss", "gap", "damage", "payload", "twice"]))
    def lose(self, data: st.DataObject, count: int, how: str) -> None:
        bench = self.bench
        stream = data.draw(st.sampled_from(self._open(self.scalars + self.bulk)))
        first = bench._next[stream]
        text = record(RecordKind.FILE, {"path": "p"})
        last = encode(encode_record(text), first + count)
        if how == "payload":
            bench.log_payload(stream, b"\xc1 no record")
            self.content[stream].append((first, None))
            return
        if how == "twice":
            whole = [each for at, each in self.content[stream] if at == first - 1 and each is not None]
            if whole and stream not in self.lossy:  # a ledger cannot tell a double from one that was missing
                bench.put(stream, encode(encode_record(whole[0]), first - 1))
            return
        self.lossy.add(stream)
        bench._next[stream] += count
        if how == "loss":
            bench.put(stream, loss_frame(first + count, Loss(first, first + count, "metrics", "quota")))
            return
        bench.put(stream, last if how == "gap" else b"\xf5vs\x01 broken" + last, gap_bytes=100 if how == "gap" else 0)
        bench._next[stream] += 1
        self.content[stream].append((first + count, text))

    @precondition(lambda self: self._open(self.scalars + self.bulk))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self._seal(data.draw(st.sampled_from(self._open(self.scalars + self.bulk))))

    def _seal(self, stream: str) -> None:
        before = self.bench.ingest.streams[stream].walker.ordinal_next
        self.bench.ingest.seal(stream, [])
        self.sealed.add(stream)
        if self.bench.ingest.streams[stream].walker.ordinal_next > before:
            self.content[stream].append((before, record(RecordKind.RUN_FINISH, {})))

    @rule(times=st.integers(1, 4), by_s=st.sampled_from([0.1, 0.6, 40.0]))
    def time_passes(self, times: int, by_s: float) -> None:
        self.bench.tick(times, by_s)

    @rule()
    def the_lane_dies(self) -> None:
        self.bench.crash()
        self.bench.assert_law()

    @precondition(lambda self: not self.reclaimed)
    @rule()
    def the_lanes_state_is_lost(self) -> None:
        """The tracker's watermark is all there is. (With a beginning that is reclaimed as well, nobody could tell.)"""
        bench = self.bench
        bench.rest()
        bench.lane._pool.shutdown(wait=False)
        bench.lane._store.close()
        for suffix in ("", "-wal", "-shm"):
            Path(bench.store_path + suffix).unlink(missing_ok=True)
        holds: dict[str, int] = {}
        for stream, ordinal in bench.tracker.kept:
            holds[stream] = max(holds.get(stream, 0), ordinal + 1)
        bench.tracker.holds = holds
        bench.lane = bench._new_lane()
        bench.assert_law()

    @rule()
    def what_is_delivered_is_reclaimed(self) -> None:
        store = LaneStore(self.bench.store_path)
        safe = {stream: cursor.safe_offset for stream, cursor in store.cursors().items()}
        store.close()
        self.reclaimed = bool(self.bench.ingest.reclaim(safe)) or self.reclaimed
        self.bench.assert_law()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for stream in self._open(self.scalars + self.bulk):
            self._seal(stream)
        self.bench.tick(40, by_s=1.0)  # everything is read by now
        # A rank that ended and is reclaimed is waited for once more by a lane that was born after it.
        self.bench.tick(2, by_s=2 * FOREVER_S)
        self.bench.until_quiet(by_s=1.0)

        expected = dict(self._oracle())
        arrived = {key: decode_record(payload) for key, payload in self.bench.tracker.kept.items()}
        assert arrived.keys() == expected.keys()
        for key, each in expected.items():
            if each.kind is not RecordKind.RUN_FINISH:
                assert arrived[key] == each
        for stream in self.content:
            numbers = self.bench.tracker.numbers(stream)
            assert numbers == sorted(numbers)
        account = self.bench.account()
        logged = sum(each is not None for content in self.content.values() for _, each in content)
        assert account.sampled_out == logged - len(expected)
        assert account.delivered == len(expected)
        self.bench.close()
        self.folder.cleanup()

    def _oracle(self) -> Iterator[tuple[Key, Record]]:
        sampling = Sampling.of(self.given)
        reducer: Reducer[Key] = Reducer("sum" if sampling.rank not in REDUCTIONS else sampling.rank, FOREVER_S)
        for stream, content in self.content.items():
            decisions = list(self._judged(sampling, stream, content))
            if stream in self.bulk or sampling.rank not in REDUCTIONS:
                yield from self._delivered(decisions)
                continue
            reducer.add(stream, self.writer[stream].rank, 0, WORLD)
            for decision in decisions:
                reducer.offer(stream, decision)
        yield from self._delivered(
            [decision for _, decision in reducer.decided(dict.fromkeys(self.content, ENDED), 0, 1)]
        )

    def _judged(
        self, sampling: Sampling, stream: str, content: list[tuple[int, Record | None]]
    ) -> Iterator[Decision[Key]]:
        made: StreamSampler[Key] = StreamSampler(sampling, self.writer[stream])
        for ordinal, each in content:
            made.offer((stream, ordinal), each)
            yield from made.decided()
        made.end()
        yield from made.decided()

    def _delivered(self, decisions: list[Decision[Key]]) -> Iterator[tuple[Key, Record]]:
        for decision in decisions:
            stream, ordinal = decision.tag
            if decision.rows:
                each = dict(self.content[stream])[ordinal]
                assert each is not None
                body = picked(each.body, decision.rows, decision.part, decision.parts)
                yield decision.tag, Record(each.kind, each.seq, each.step, each.time_ns, body)
            elif decision.record is not None:
                yield decision.tag, decision.record


TestSampledLane = SampledLane.TestCase
TestSampledLane.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
