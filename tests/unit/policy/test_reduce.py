"""Several ranks become one value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from support.samples import ODD_BODIES, metrics, record, travelled
from verl_shipper.policy.reduce import AHEAD_MAX, ENDED, SETTLED_MAX, Reducer
from verl_shipper.policy.stream_sampler import BY_RANK, BY_STEP, Decision
from verl_shipper_spool.record import Record, RecordKind

Shown = list[tuple[str, Any, Any]]


class Node:
    """Ranks `a`, `b`, … of one run; tags are numbers in the order of offering."""

    def __init__(self, ranks: int = 2, mode: str = "mean", world: int = 0) -> None:
        self.reducer: Reducer[int] = Reducer(mode, 30.0)
        self.progress: dict[str, float | None] = {}
        self.now_s = 100.0
        self.count = 0
        for rank in range(ranks):
            self.join("abcdefgh"[rank], rank, world or ranks)

    def join(self, name: str, rank: int, world: int = 1, created_ns: int = 5) -> None:
        self.reducer.add(name, rank, created_ns, world)
        self.progress[name] = None

    def log(self, name: str, step: int | None, **values: Any) -> None:
        self.put(name, metrics(step, values))
        newest = self.progress[name]
        if step is not None and (newest is None or step > newest):
            self.progress[name] = step

    def put(self, name: str, each: Record | None, why: str = "") -> None:
        self.reducer.offer(name, Decision(self.count, each, why))
        self.count += 1

    def end(self, *names: str) -> None:
        self.progress.update(dict.fromkeys(names, ENDED))

    def decided(self, after_s: float = 0.0) -> list[tuple[str, Decision[int]]]:
        self.now_s += after_s
        return list(self.reducer.decided(self.progress, self.now_s, int(self.now_s)))

    def shown(self, after_s: float = 0.0) -> Shown:
        """What is settled: stream, step and body of what is delivered, or why it is not."""
        return [
            (name, decision.record.step, decision.record.body) if decision.record else (name, None, decision.why)
            for name, decision in self.decided(after_s)
        ]


@pytest.mark.parametrize(("mode", "expected"), [("mean", 2), ("min", 1), ("max", 3), ("sum", 4)])
def test_the_lowest_rank_carries_the_value_of_all(mode: str, expected: float) -> None:
    node = Node(mode=mode)
    node.log("b", 1, x=3)
    node.log("a", 1, x=1)
    node.end("a", "b")

    assert node.shown() == [("a", 1, {"x": expected}), ("b", None, BY_RANK)]


def test_a_step_waits_for_every_rank_to_go_beyond_it() -> None:
    node = Node()
    node.log("a", 1, x=1)
    node.log("a", 2, x=1)
    assert node.shown() == []

    node.log("b", 1, x=3)
    assert node.shown() == []  # its step may bring more

    node.log("b", 2, x=5)
    assert node.shown() == [("a", 1, {"x": 2}), ("b", None, BY_RANK)]


def test_both_calls_of_a_step_carry_their_own_names_and_the_last_one_the_rest() -> None:
    node = Node()
    node.log("a", 1, x=1, t="mine")
    node.log("a", 1, y=1)
    node.log("b", 1, x=3, t="other")
    node.log("b", 1, y=5, z=7)
    node.end("a", "b")

    assert node.shown() == [
        ("a", 1, {"x": 2, "t": "mine"}),
        ("a", 1, {"y": 3, "z": 7}),
        ("b", None, BY_RANK),
        ("b", None, BY_RANK),
    ]


def test_steps_come_in_order_and_those_that_one_rank_lacks_are_the_others() -> None:
    node = Node()
    for name, step in (("a", 1), ("a", 3), ("b", 2), ("b", 3)):
        node.log(name, step, x=step)
    node.end("a", "b")

    assert node.shown() == [("a", 1, {"x": 1}), ("b", 2, {"x": 2}), ("a", 3, {"x": 3}), ("b", None, BY_RANK)]


def test_what_is_no_metrics_of_a_step_waits_only_in_its_place() -> None:
    node = Node()
    finish = record(RecordKind.RUN_FINISH, {})
    node.put("b", record(RecordKind.RUN_START, {}))
    node.log("b", None, x=1)
    node.put("b", None, BY_STEP)
    node.log("b", 1, x=1)
    node.put("b", finish)

    assert node.shown() == [("b", None, {}), ("b", None, {"x": 1}), ("b", None, BY_STEP)]
    node.end("a", "b")
    assert node.shown() == [("b", 1, {"x": 1}), ("b", None, {})]


def test_a_rank_that_is_late_is_left_out_after_a_time_and_then_not_waited_for() -> None:
    node = Node()
    for step in (1, 2, 3):
        node.log("a", step, x=step)
    assert node.shown() == []
    assert node.shown(29.0) == []

    assert node.shown(1.5) == [("a", 1, {"x": 1}), ("a", 2, {"x": 2})]  # step 3 may not be over

    node.log("b", 1, x=9)
    assert node.shown() == [("b", None, BY_RANK)]


def test_a_rank_that_has_caught_up_is_waited_for_again() -> None:
    node = Node()
    node.log("a", 1, x=1)
    node.log("a", 2, x=1)
    node.shown()
    assert len(node.shown(31.0)) == 1
    node.log("a", 3, x=1)

    node.log("b", 3, x=1)
    assert node.shown() == [("a", 2, {"x": 1})]  # it is beyond

    node.log("a", 4, x=1)
    assert node.shown() == []
    node.log("b", 4, x=1)
    assert node.shown() == [("a", 3, {"x": 1}), ("b", None, BY_RANK)]


def test_what_comes_of_a_settled_step_from_a_rank_that_was_in_it_is_kept() -> None:
    node = Node()
    node.log("a", 1, x=1)
    node.shown()
    assert node.shown(31.0) == [("a", 1, {"x": 1})]
    node.log("a", 1, y=1)
    node.log("b", 1, y=5)

    assert node.shown() == [("b", None, BY_RANK), ("a", 1, {"y": 1})]


def test_another_attempt_at_the_same_steps_is_not_late() -> None:
    node = Node()
    for name in "ab":
        node.log(name, 1, x=1)
    node.end("a", "b")
    node.shown()
    node.reducer.forget("a")
    node.reducer.forget("b")

    node.join("c", 0, 2, created_ns=10**9)
    node.join("d", 1, 2, created_ns=10**9)
    node.log("c", 1, x=2)
    node.log("d", 1, x=4)
    node.end("c", "d")

    assert node.shown() == [("c", 1, {"x": 3}), ("d", None, BY_RANK)]


def test_ranks_that_nobody_saw_are_waited_for_once_at_the_beginning() -> None:
    node = Node(ranks=1, world=8)
    for step in (1, 2, 3):
        node.log("a", step, x=1)
    assert node.shown() == []

    assert len(node.shown(31.0)) == 2
    node.log("a", 4, x=1)
    assert len(node.shown()) == 1


def test_a_rank_that_joins_in_the_beginning_is_in_the_first_step() -> None:
    node = Node(ranks=1, world=2)
    node.log("a", 1, x=1)
    node.log("a", 2, x=1)
    assert node.shown() == []

    node.join("b", 1, 2)
    node.log("b", 1, x=3)
    node.log("b", 2, x=3)

    assert node.shown() == [("a", 1, {"x": 2}), ("b", None, BY_RANK)]


def test_of_ranks_that_wait_so_many_decisions_are_held() -> None:
    node = Node()
    for step in range(AHEAD_MAX):
        assert not node.reducer.is_ahead("a")
        node.log("a", step, x=1)

    assert node.reducer.is_ahead("a")
    assert not node.reducer.is_ahead("b")
    assert not node.reducer.is_ahead("a stream without ranks")
    assert node.shown() == []


def test_a_step_with_more_records_than_can_be_held_goes_on() -> None:
    node = Node()
    for _ in range(AHEAD_MAX):
        node.log("a", 1, x=1)
    node.log("b", 2, x=1)

    assert len(node.shown()) == AHEAD_MAX


def test_a_stream_that_is_gone_is_not_waited_for() -> None:
    node = Node()
    node.log("a", 1, x=1)
    node.log("a", 2, x=1)
    node.log("b", 1, x=9)
    assert node.shown() == []

    node.reducer.forget("b")
    node.reducer.forget("a stream nobody knows")

    assert node.shown() == [("a", 1, {"x": 1})]
    assert node.reducer.waits


def test_a_later_process_knows_who_was_in_a_step() -> None:
    node, later = Node(), Node()
    node.log("a", 1, x=1)
    node.shown()
    node.shown(31.0)

    later.reducer.restore(node.reducer.state())
    later.log("b", 1, x=1)
    later.log("a", 1, y=1)
    later.end("a", "b")

    assert later.shown() == [("b", None, BY_RANK), ("a", 1, {"y": 1})]


def test_only_some_settled_steps_are_remembered() -> None:
    node = Node(ranks=1)
    node.end("a")
    for step in range(SETTLED_MAX + 50):
        node.log("a", step, x=1)
        node.end("a")
        node.shown()

    assert len(node.reducer.state()[1]) == SETTLED_MAX


def test_the_first_that_waits_is_told() -> None:
    node = Node()
    assert node.reducer.first("a") is None
    assert node.reducer.first("a stream nobody knows") is None

    node.log("a", 1, x=1)

    first = node.reducer.first("a")
    assert first is not None
    assert first.tag == 0


@pytest.mark.parametrize("mode", ["mean", "min", "max", "sum"])
def test_bodies_may_be_anything_and_the_result_can_be_written(mode: str) -> None:
    node = Node(mode=mode)
    huge: Mapping[Any, Any] = {"n": 2**64 - 1, "m": math.nan, "k": -(2**63)}
    for step, body in enumerate([*ODD_BODIES, huge]):
        for name in "ab":
            node.put(name, travelled(metrics(step, body)))
    node.end("a", "b")

    decisions = [decision for _, decision in node.decided()]

    assert sorted(decision.tag for decision in decisions) == list(range(node.count))
    for decision in decisions:
        if decision.record is not None:
            travelled(decision.record)


@pytest.mark.parametrize("step", [0, -1, -(2**63), 2**64 - 1])
def test_steps_may_be_any_number(step: int) -> None:
    node = Node()
    node.log("a", step, x=1)
    node.log("b", step, x=1)
    node.end("a", "b")

    assert len(node.shown()) == 2
    travelled(record(RecordKind.METRICS, {"state": node.reducer.state()}))


def test_without_a_state_everything_begins() -> None:
    node = Node(ranks=1)

    node.reducer.restore([])

    assert node.reducer.state() == [[], []]
