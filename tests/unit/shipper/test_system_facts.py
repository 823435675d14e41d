"""Names, numbers and steps of the facts of nodes, whatever a record holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from support.samples import ODD_BODIES, ODD_KEYS, ODD_VALUES
from verl_shipper.backends.system_facts import elapsed_s, facts_of, node_name, step_of
from verl_shipper_spool.record import Record, RecordKind


def facts(body: dict[Any, Any], time_ns: int = 0) -> Record:
    return Record(RecordKind.SYSTEM, 0, None, time_ns, body)


def test_numbers_stand_below_their_node() -> None:
    record = facts({"node": "n1.cluster", "values": {"gpu/0/power_w": 650.5, "cpu/count": 8, "throttled": True}})
    found = facts_of(record, Counter())
    assert found == {
        "system/n1.cluster/gpu/0/power_w": 650.5,
        "system/n1.cluster/cpu/count": 8.0,
        "system/n1.cluster/throttled": 1.0,
    }
    assert all(type(value) is float for value in found.values())


def test_a_node_is_one_part_of_the_path_and_no_two_are_the_same() -> None:
    nodes = ["a/b", "a_b", "a//b", "n" * 500, "n" * 499 + "m", "x", 3, "ü"]
    names = [node_name(node) for node in nodes]
    assert len(set(names)) == len(nodes)
    assert not [name for name in names if "/" in name or len(name) > 120]
    assert node_name(None) == node_name("") == node_name("  ") == "unnamed"


def test_nothing_raises_and_everything_is_shown_or_counted() -> None:
    for node in (*ODD_KEYS, *ODD_VALUES):
        for body in ODD_BODIES:
            facts_of(facts({"node": node, "values": body}), Counter())
    for values in ODD_VALUES:
        facts_of(facts({"values": values}), Counter())
    ignored: Counter[str] = Counter()
    assert facts_of(facts({"node": "n", "values": {"a": 10**400, "b": -(10**400), "c": float("nan")}}), ignored) == {}
    assert ignored == {"not_finite": 3}


@pytest.mark.parametrize(
    ("time_ns", "step", "seconds"), [(10**9, 0, 0.0), (3 * 10**9 + 5, 2, 2.000000005), (0, 0, 0.0)]
)
def test_the_step_is_whole_seconds_since_the_run_began(time_ns: int, step: int, seconds: float) -> None:
    record = facts({}, time_ns)
    assert step_of(record, 10**9) == step
    assert elapsed_s(record, 10**9) == pytest.approx(seconds)
