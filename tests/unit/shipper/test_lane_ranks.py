"""A lane that samples over several ranks and writers: whose records are shown, and that nobody starves another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.samples import metrics, record, span
from unit.shipper.sampled import MakeBench, benches, delivered, log, log_steps, order_of, shown_steps
from unit.shipper.scripted import Bench
from verl_shipper_spool.header import BULK
from verl_shipper_spool.record import RecordKind

FINISH = record(RecordKind.RUN_FINISH, {"exit_code": 0})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeBench]:
    with benches(tmp_path) as new:
        yield new


def _ranks(bench: Bench, count: int = 2, created_ns: int = 1) -> list[str]:
    return [bench.stream(rank=rank, world=count, created_ns=created_ns) for rank in range(count)]


def test_ranks_are_told_apart_by_a_suffix(make: MakeBench) -> None:
    bench = make(order_of(rank="all"))
    streams = _ranks(bench)
    for stream in streams:
        log_steps(bench, stream, 1)

    bench.until_quiet()

    assert [delivered(bench, stream)[0].body for stream in streams] == [
        {f"train/loss/rank{rank}": 1} for rank in range(2)
    ]


def test_metrics_of_other_ranks_only_are_told_until_rank_0_comes(make: MakeBench) -> None:
    bench = make()
    stream = bench.stream(rank=7, world=8)
    log_steps(bench, stream, 1, 2)
    bench.until_quiet()

    assert bench.account().sampled == {"rank": 2}
    assert "ranks 7 only" in bench.account().last_error
    assert "sampling.rank" in bench.account().last_error

    bench.stream(rank=0, world=8)
    bench.tick(5)
    assert bench.account().last_error == ""


def test_ranks_become_one_value(make: MakeBench) -> None:
    bench = make(order_of(rank="mean"))
    streams = _ranks(bench)
    bulk = bench.stream(stream_class=BULK, rank=1, world=2)
    for rank, stream in enumerate(streams):
        log(bench, stream, *(metrics(step, a=step + 10 * rank) for step in (1, 2, 3)), FINISH)
    log(bench, bulk, span(1, 1))

    bench.until_quiet()

    assert [each.body for each in delivered(bench, streams[0])][:3] == [{"a": 6}, {"a": 7}, {"a": 8}]
    assert bench.account().sampled == {"rank": 3}
    assert bench.account().delivered == 3 + 2 + 1


def test_a_rank_that_does_not_come_is_left_out_after_a_time(make: MakeBench) -> None:
    bench = make(order_of(rank="mean", rank_timeout_s=30.0))
    streams = _ranks(bench)
    log(bench, streams[0], metrics(1, a=1), metrics(2, a=2))
    bench.tick(20, by_s=1.0)
    assert delivered(bench, streams[0]) == []

    bench.tick(20, by_s=1.0)
    assert shown_steps(bench, streams[0]) == [1]

    bench.crash()
    log(bench, streams[1], metrics(1, a=100), metrics(3, a=3))
    bench.tick(10)
    assert bench.account().sampled == {"rank": 1}


def test_many_ranks_with_a_long_past_are_reduced_over_all_of_them(make: MakeBench) -> None:
    bench = make(order_of(rank="sum"), items_max=1000, bytes_max=4 * 1024 * 1024)
    streams = _ranks(bench, 24)
    for stream in streams:
        log(bench, stream, *(metrics(step, a=1) for step in range(1100)), FINISH)

    bench.until_quiet()

    shown = [each.body for each in delivered(bench, streams[0]) if each.kind is RecordKind.METRICS]
    assert shown == [{"a": 24}] * 1100


# Fairness


def test_a_writer_with_much_to_say_does_not_starve_the_others(make: MakeBench) -> None:
    bench = make()
    first, second = _ranks(bench, 1)[0], bench.stream()
    bench.log(first, 500)
    bench.log(second, 1)

    bench.tick(8)

    assert bench.tracker.numbers(second) == [0]
    assert len(bench.tracker.numbers(first)) < 500


def test_one_turn_looks_at_so_many_bytes_only(make: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_shipper.lane_intake.SCAN_BYTES_MAX", 1000)
    bench = make(order_of(exclude=["*"]))
    bench.log(bench.stream(), 100)
    bench.tick(3)

    assert 0 < bench.account().sampled_out < 100
    bench.until_quiet()
    assert bench.account().sampled_out == 100
