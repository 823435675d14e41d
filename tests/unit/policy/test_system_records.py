"""The facts of nodes go past all sampling: no knob leaves one out, no step or rank waits for who writes them."""

from __future__ import annotations

from typing import Any

import pytest

from support.samples import judged, metrics, record, sampler
from verl_shipper.policy.reduce import Reducer
from verl_shipper.policy.stream_sampler import Decision, Writer
from verl_shipper_spool.record import Record, RecordKind

FACTS = record(RecordKind.SYSTEM, {"node": "n", "values": {"cpu/load_1m": 1.0}})
KNOBS: list[dict[str, Any]] = [
    {},
    {"log_frequency": 100},
    {"log_frequency": 10, "log_mode": "mean"},
    {"include": ["val/*"]},
    {"exclude": ["*"]},
    {"rank": "all"},
    {"rank": "mean"},
    {"log_val_generations": 0, "traces": {"rate": 0.0}},
]


@pytest.mark.parametrize("writer", [Writer(0, 1), Writer(0, 8), Writer(5, 8)], ids=str)
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_no_knob_leaves_out_or_changes_the_facts_of_a_node(knobs: dict[str, Any], writer: Writer) -> None:
    stream: list[Record | None] = [FACTS, metrics(1, a=1), FACTS, metrics(2, a=2), metrics(3, a=3), FACTS]
    decisions = judged(sampler(writer, **knobs), stream)
    facts = [decision for decision in decisions if decision.tag in (0, 2, 5)]
    assert [decision.record for decision in facts] == [FACTS] * 3
    assert not any(decision.why or decision.thinned for decision in facts)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_facts_among_the_steps_change_nothing_about_them(knobs: dict[str, Any]) -> None:
    steps = [metrics(step, {"val/acc": step} if step % 7 == 0 else {"loss": step}) for step in range(40)]
    among: list[Record | None] = [each for step in steps for each in (step, FACTS)]
    bare = [decision.record for decision in judged(sampler(**knobs), list(steps)) if decision.record]
    beside = [decision.record for decision in judged(sampler(**knobs), among) if decision.record]
    assert [each for each in beside if each.kind is not RecordKind.SYSTEM] == bare


def reducer() -> tuple[Reducer[int], dict[str, float | None]]:
    made: Reducer[int] = Reducer("mean", 30.0)
    for rank, name in enumerate("ab"):
        made.add(name, rank, 5, 2)
    made.add("node", 0, 6, 1)
    return made, {"a": 1, "b": 1, "node": None}


def shown(made: Reducer[int], progress: dict[str, float | None], now_s: float = 100.0) -> list[tuple[str, Any]]:
    decided = made.decided(progress, now_s, int(now_s))
    return [(name, decision.record.body) for name, decision in decided if decision.record is not None]


def test_ranks_that_become_one_value_do_not_wait_for_a_stream_of_facts() -> None:
    made, progress = reducer()
    made.offer("node", Decision(0, FACTS))
    for tag, name in enumerate("ab"):
        made.offer(name, Decision(tag + 1, metrics(1, a=tag)))
        made.offer(name, Decision(tag + 3, metrics(2, a=tag)))
    progress |= {"a": 2, "b": 2}
    assert shown(made, progress) == [("node", FACTS.body), ("a", {"a": 0.5})]


def test_facts_do_not_wait_for_ranks() -> None:
    made, progress = reducer()
    made.offer("a", Decision(0, metrics(1, a=1)))
    made.offer("node", Decision(1, FACTS))
    assert shown(made, progress) == [("node", FACTS.body)]
