"""The contract, for the facts of nodes: there once, at their own time, beside the training and never in it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from contract import facts_reader
from contract.bench import DELIVER_S, Bench, Direct, LaneProcess, finished, lane_process, numbers, started
from contract.kits import Kit
from support.batches import TIME_NS
from support.processes import wait_for
from verl_shipper.backends.base import Backend, Delivered, RunInfo
from verl_shipper_spool.record import Record, RecordKind

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_environment")]

B, C = "6" * 32, "7" * 32  # streams of two nodes
SECOND = 10**9


def fact(node: Any, at_s: float, **values: Any) -> Record:
    """Facts `at_s` seconds after the run began; `__` in a name is a slash."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return Record(RecordKind.SYSTEM, 0, None, TIME_NS + int(at_s * SECOND), {"node": node, "values": named})


def samples(node: str, first: int, count: int) -> list[Record]:
    """One every 15 s, whose values tell which they are."""
    return [fact(node, 15.5 * n, cpu__load_1m=n, gpu__0__power_w=n + 0.25) for n in range(first, first + count)]


def expected(node: str, count: int) -> list[tuple[str, float, int]]:
    pairs = [(name, n + more, n) for n in range(count) for name, more in (("cpu/load_1m", 0), ("gpu/0/power_w", 0.25))]
    return [(f"system/{node}/{name}", value, int((TIME_NS / SECOND + 15.5 * n) * 1000)) for name, value, n in pairs]


def shown(kit: Kit, run: RunInfo) -> Counter[tuple[str, float, int]]:
    """What is there, with times in whole milliseconds."""
    return Counter((name, value, int(at_s * 1000 + 0.01)) for name, value, at_s in facts_reader.facts(kit, run))


def assert_shown(kit: Kit, run: RunInfo, *nodes: tuple[str, int]) -> None:
    wanted = sorted(each for node, count in nodes for each in expected(node, count))
    if kit.backend in facts_reader.SILENT:
        wanted = []
    found = sorted(shown(kit, run).elements())
    assert [each[:2] for each in found] == [each[:2] for each in wanted]
    assert all(abs(one[2] - other[2]) <= 1 for one, other in zip(found, wanted, strict=True))


def test_facts_of_two_nodes_are_there_once_beside_the_training(kit: Kit, direct: Direct) -> None:
    sent = direct.batch(started(lr=0.1), *numbers(0, 5))
    first = direct.batch(*samples("node-a", 0, 4), stream=B)
    second = direct.batch(*samples("node-b", 0, 3), stream=C, rank=8)
    for batch in (sent, first, second):
        assert isinstance(direct.fresh().upload(batch), Delivered)  # the commit is lost
        direct.deliver(direct.fresh(), batch)
    direct.deliver(direct.fresh(), direct.batch(*numbers(5, 5), first=6))
    direct.deliver(direct.fresh(), direct.batch(*samples("node-a", 4, 2), stream=B, first=4))

    assert_shown(kit, direct.run, ("node-a", 6), ("node-b", 3))
    assert kit.values(direct.run, "n") == [(n, float(n)) for n in range(10)]


def test_a_batch_of_both_kinds_repeated_shows_both_once(kit: Kit, direct: Direct) -> None:
    mixed = [each for pair in zip(numbers(0, 6), samples("node-a", 0, 6), strict=True) for each in pair]
    sent = direct.batch(*mixed)
    for _ in range(2):
        assert isinstance(direct.fresh().upload(sent), Delivered)
    direct.deliver(direct.fresh(), sent)
    assert_shown(kit, direct.run, ("node-a", 6))
    assert kit.values(direct.run, "n") == [(n, float(n)) for n in range(6)]


def test_what_is_no_finite_number_is_left_out_and_counted(kit: Kit, direct: Direct) -> None:
    odd = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "text": "x", "none": None, "ok": 1.5}
    empty = [fact("n", 20), Record(RecordKind.SYSTEM, 0, None, TIME_NS, {}), fact("n", 21, nan=math.nan)]
    records = [fact("n", 10, **odd), *empty, fact("n", 30, ok=2.5), *numbers(0, 2)]
    ignored, refused = direct.deliver(direct.fresh(), direct.batch(*records))

    assert not refused
    assert kit.values(direct.run, "n") == [(0, 0.0), (1, 1.0)]
    if kit.backend in ("file", "console"):  # a file keeps the record as it is, a console shows none
        return
    assert (ignored["not_finite"], ignored["text"], ignored["none"]) == (4, 1, 1)
    if kit.backend == "otlp":
        assert ignored["system"] == 2
        return
    assert sorted((name, value) for name, value, _ in shown(kit, direct.run)) == [
        ("system/n/ok", 1.5),
        ("system/n/ok", 2.5),
    ]


NODES = ["a.b.cluster.local", "a/b", "a_b", "", " ", "ü 节点", "n" * 300, "n" * 299 + "m", "x*y", "..", "cut \ud83d", 3]


def test_nodes_with_odd_names_never_meet(kit: Kit, direct: Direct) -> None:
    records = [fact(node, place + 1, v=place) for place, node in enumerate(NODES)]
    ignored, refused = direct.deliver(direct.fresh(), direct.batch(*records, *numbers(0, 2), finished()))
    assert not refused
    assert not +ignored or kit.backend == "otlp"
    assert kit.values(direct.run, "n") == [(0, 0.0), (1, 1.0)]
    if kit.backend not in facts_reader.SILENT:
        found = shown(kit, direct.run)
        assert {value for _, value, _ in found} == set(range(len(NODES)))
        # Nameless nodes are one; a file has the names as they are.
        assert len({name for name, _, _ in found}) >= len(NODES) - 1


def test_facts_from_before_the_run_and_twice_in_a_second_stop_nothing(kit: Kit, direct: Direct) -> None:
    early = [fact("n", -100, v=1), fact("n", 0.1, v=2), fact("n", 0.2, v=3), fact("n", 5, v=4)]
    ignored, refused = direct.deliver(direct.fresh(), direct.batch(*early, *numbers(0, 2)))
    assert not refused
    assert kit.values(direct.run, "n") == [(0, 0.0), (1, 1.0)]
    if kit.backend not in facts_reader.SILENT:
        missing = {1, 2, 3, 4} - {value for _, value, _ in shown(kit, direct.run)}
        assert len(missing) == ignored["same_step"]
        assert not missing or kit.backend == "swanlab"  # whole seconds are its steps


def test_a_lane_killed_between_accept_and_commit_doubles_no_fact(kit: Kit, bench: Bench) -> None:
    run = kit.run()
    stream, node = bench.stream(run), bench.stream(run)
    bench.log(stream, started(), *numbers(0, 10))
    bench.log(node, *samples("node-a", 0, 10))
    killed = LaneProcess(bench, kill_accepted=True)
    assert killed.wait() == -9
    killed._process.communicate()
    bench.log(node, *samples("node-a", 10, 5))
    bench.log(stream, *numbers(10, 5), finished())
    with lane_process(bench):
        wait_for(lambda: bench.account().pending == 0, DELIVER_S, "the second lane delivers all")
    assert kit.values(run, "n") == [(n, float(n)) for n in range(15)]
    names = Counter((name, value) for name, value, _ in shown(kit, run).elements())
    wanted = Counter((name, value) for name, value, _ in expected("node-a", 15))
    assert names == (Counter() if kit.backend in facts_reader.SILENT else wanted)
    assert bench.account().balanced


def test_facts_need_no_training(kit: Kit, bench: Bench, backend: type[Backend]) -> None:
    """A run of which only the node's own records are there."""
    run = kit.run()
    bench.open_lane(backend)
    bench.log(bench.stream(run), *samples("node-a", 0, 3))
    bench.deliver_all()
    account = bench.account()
    assert (account.delivered, account.dead_lettered, account.pending) == (3, 0, 0)
    if kit.backend not in facts_reader.SILENT:
        assert len(shown(kit, run)) == 6
