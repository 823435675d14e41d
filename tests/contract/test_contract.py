"""The contract that every backend keeps, whatever its tracker: nothing missing, nothing twice, nothing raised.

Each test runs against every kit of kits.py: through the backend alone (`direct`), or through a real lane over a real
spool (`bench`); see conftest.py. After each test everything that the backend said is looked through.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from contract import kits
from contract.bench import (
    DELIVER_S,
    Bench,
    Direct,
    LaneProcess,
    finished,
    forgetful,
    lane_process,
    metric,
    numbers,
    started,
)
from contract.kits import Kit
from support.batches import TIME_NS
from support.processes import wait_for
from verl_shipper.backends import BUILT_IN
from verl_shipper.backends.base import Backend, Delivered, Outcome, Park, Retry, RunInfo
from verl_shipper_spool.record import KIND_NAME, Record, RecordKind, Unsupported

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_environment")]

OUTAGE_S = 60.0 if os.environ.get("VERL_SHIPPER_TEST_LONG") == "1" else 8.0
CLOSE_S = 15.0  # a lane told to stop grants its uploads 3 s; the rest is a slow machine's
MANY = 10_000
B = "6" * 32  # another stream


def once(steps: Iterable[int]) -> list[tuple[Any, float]]:
    return [(n, float(n)) for n in steps]


def assert_all_shown_or_counted(
    kit: Kit, run: RunInfo, key: str, logged: list[tuple[Any, float]], ignored: Mapping[str, int]
) -> None:
    """Every value at its own step; where a tracker takes no late step, counted as one."""
    shown = Counter(kit.values(run, key))
    assert not shown - Counter(logged)
    missing = (Counter(logged) - shown).total()
    counted = ignored.get("late_step", 0) + ignored.get("same_step", 0)
    assert missing == (0 if kit.takes_late else counted)


def leaves(body: Mapping[Any, Any]) -> int:
    return sum(leaves(value) if isinstance(value, Mapping) else 1 for value in body.values())


def test_every_backend_has_a_kit() -> None:
    assert {kit.backend for kit in kits.KITS.values()} >= BUILT_IN.keys()


# The backend alone


def test_the_same_batch_three_times_is_there_once(kit: Kit, direct: Direct) -> None:
    sent = direct.batch(started(lr=0.1), *numbers(0, 30))
    for _ in range(2):  # the commit is lost
        assert isinstance(direct.fresh().upload(sent), Delivered)
    backend = direct.fresh()
    direct.deliver(backend, sent)
    direct.deliver(backend, direct.batch(*numbers(30, 5), first=31))
    assert kit.values(direct.run, "n") == once(range(35))


def test_every_value_stands_at_its_own_step_in_whatever_order_they_come(kit: Kit, direct: Direct) -> None:
    backend = direct.fresh()
    shuffled = [7, 3, 9, 1, 4]
    ignored, _ = direct.deliver(backend, direct.batch(*[metric({"n": n + 0.5}, n) for n in shuffled]))
    late = [metric({"n": float(n), "val/late": float(n)}, n) for n in (2, 5, 9, 12)]
    more, _ = direct.deliver(backend, direct.batch(*late, stream=B, rank=1))
    logged = [(n, n + 0.5) for n in shuffled] + [(n, float(n)) for n in (2, 5, 9, 12)]
    assert_all_shown_or_counted(kit, direct.run, "n", logged, ignored + more)
    assert kit.values(direct.run, "val/late") == once([2, 5, 9, 12])


def test_a_run_goes_on_from_a_checkpoint_below_its_last_step_with_another_config(kit: Kit, direct: Direct) -> None:
    first, _ = direct.deliver(direct.fresh(), direct.batch(started(lr=1), *numbers(0, 10)))
    again = [metric({"n": n + 100.0, "ok": float(n)}, n) for n in range(6, 16)]
    resumed = direct.batch(started(lr=2, text="x" * 7000), *again, finished(), stream=B)
    second, refused = direct.deliver(direct.fresh(), resumed)
    assert not refused
    logged = once(range(10)) + [(n, n + 100.0) for n in range(6, 16)]
    assert_all_shown_or_counted(kit, direct.run, "n", logged, first + second)
    assert kit.values(direct.run, "ok") == once(range(6, 16))


NAMES = ["timing(s)/gen", "val/pass@8", "train/lr(1e-3)", "/lead", "../up", "a//b", "k" * 300, "奖励/均值", "val/😀"]
ODD_KEYS: dict[Any, Any] = dict.fromkeys([*NAMES, "", " lead", "cut \ud83d here", "A", "a", 3, ("x", 1)], 1.0)
ODD_NUMBERS = [math.nan, math.inf, -math.inf, 2**64 - 1, -(2**63), True, [3.0], 5e-324, 1.7e308]
NO_NUMBERS: list[Any] = ["a string", None, Unsupported("object"), b"\xff", [1.0, 2.0], {}]
CLASH = {"a": {"b": 1.0, "c": {"d": 2.0}}, "a/b": 9.0}
ODD_VALUES = {f"odd{place}": value for place, value in enumerate([*ODD_NUMBERS, *NO_NUMBERS])} | CLASH
ODD_STEPS = [2**31, 2**48 + 1, 2**53 + 1, 2**63, -1, None]


def test_hostile_names_values_and_steps_cost_nothing_beside_them(kit: Kit, direct: Direct) -> None:
    bodies = [{**ODD_KEYS, "ok": 1.0}, {**ODD_VALUES, "ok": 2.0}, {}, {"ok": 3.0}]
    odd = [metric(body, step) for step, body in enumerate(bodies)]
    far = [metric({f"far{place}": 1.0}, step) for place, step in enumerate(ODD_STEPS)]
    rows = [["fine", "cut \ud83d here", 1.0], ["\udcff\udcfe", "😀 ok", math.nan], [None, {"a": [1]}, "x"]]
    table = {"columns": ["input", "output", "score"], "rows": rows, "part": 0, "parts": 1, "call": 0}
    others = [
        Record(RecordKind.GENERATIONS, 0, 3, TIME_NS, table),
        Record(RecordKind.TEXT, 0, 3, TIME_NS, {"note \ud83d": "<b>\udcff</b>", "": "x"}),
    ]
    config = {"a/b": math.inf, "": None, "x\ud83d": "\udcff", "api_key": kit.secret, 3: ("t", 2**64 - 1)}
    records = [started(strange=config), *odd, *far, *others, metric({"ok": 9.0}, 9), finished()]
    ignored, refused = direct.deliver(direct.fresh(), direct.batch(*records))

    assert kit.values(direct.run, "ok") == [(0, 1.0), (1, 2.0), (3, 3.0), (9, 9.0)]
    assert all(item.record.step in ODD_STEPS for item in refused)
    assert kit.values(direct.run, "far0") == [(2**31, 1.0)]
    logged = sum(leaves(record.body) for record in records if record.kind is RecordKind.METRICS)
    assert len(kit.points(direct.run)) + sum(ignored.values()) + len(refused) >= logged
    for place in range(3):  # what is no finite number never looks like a common one
        for _, value in kit.values(direct.run, f"odd{place}"):
            assert not math.isfinite(value) or abs(value) > 1e308


def test_a_tracker_that_is_gone_makes_open_and_upload_answer_and_not_raise(kit: Kit, direct: Direct) -> None:
    direct.deliver(direct.fresh(), direct.batch(started(), *numbers(0, 3)))
    sent = direct.batch(*numbers(3, 3), first=4)
    backend = direct.fresh()
    kit.gone()
    answers: list[Outcome | None] = [backend.open(), backend.upload(sent)]
    kit.heal()
    assert all(isinstance(answer, Retry | Park) for answer in answers), answers
    direct.deliver(backend, sent)
    assert kit.values(direct.run, "n") == once(range(6))


# Through a lane


def test_a_refused_record_is_a_dead_letter_and_the_others_arrive(
    kit: Kit, bench: Bench, backend: type[Backend]
) -> None:
    body, step = kit.poison()
    run = kit.run()
    bench.open_lane(backend)
    bench.log(bench.stream(run), started(), *numbers(0, 5), metric(body, step), *numbers(5, 5))
    bench.deliver_all()
    assert kit.values(run, "n") == once(range(10))
    account = bench.account()
    assert (account.delivered, account.dead_lettered) == (11, 1)
    (letter,) = bench.letters()
    assert (letter.step, letter.kind) == (step, KIND_NAME[kit.record(metric(body, step)).kind])
    assert letter.reason


def test_answers_lost_twice_for_every_batch_double_nothing(kit: Kit, bench: Bench, backend: type[Backend]) -> None:
    run = kit.run()
    bench.open_lane(forgetful(kit, backend))
    stream = bench.stream(run)
    for first in (0, 10):
        bench.log(stream, *([] if first else [started()]), *numbers(first, 10))
        bench.deliver_all()
    assert kit.values(run, "n") == once(range(20))
    assert bench.account().retries >= 4


def test_a_lane_killed_between_accept_and_commit_doubles_nothing(kit: Kit, bench: Bench) -> None:
    run = kit.run()
    stream = bench.stream(run)
    bench.log(stream, started(), *numbers(0, 20))
    killed = LaneProcess(bench, kill_accepted=True)
    assert killed.wait() == -9
    bench.log(stream, *numbers(20, 10), finished())
    with lane_process(bench):
        wait_for(lambda: bench.account().pending == 0, DELIVER_S, "the second lane delivers all")
    assert kit.values(run, "n") == once(range(30))
    assert bench.account().balanced


def test_ten_thousand_records_are_there_once(kit: Kit, bench: Bench, backend: type[Backend]) -> None:
    run = kit.run()
    stream = bench.stream(run)
    bench.log(stream, started(), *numbers(0, MANY - 2), finished())
    bench.open_lane(backend)
    begin_s = time.monotonic()
    bench.deliver_all(timeout_s=250.0)
    print(f"{type(kit).__name__}: {MANY / (time.monotonic() - begin_s):.0f} records/s")
    assert kit.values(run, "n") == once(range(MANY - 2))
    assert bench.account().delivered == MANY


def test_two_runs_at_once_are_whole(kit: Kit, bench: Bench, backend: type[Backend]) -> None:
    runs = [kit.run(), kit.run()]
    bench.open_lane(backend)
    streams = [bench.stream(run) for run in runs]
    for first in (0, 10):
        for number, stream in enumerate(streams):
            bench.log(stream, *numbers(first, 10, key=f"n{number}"))
        bench.turn(lambda: bench.account().delivered > 0, "the first batches")
    bench.deliver_all()
    for number, run in enumerate(runs):
        assert kit.values(run, f"n{number}") == once(range(20))


def test_a_run_with_a_broken_place_does_not_delay_the_other(kit: Kit, bench: Bench, backend: type[Backend]) -> None:
    broken, whole = kit.run(), kit.run()
    kit.break_run(broken)
    bench.open_lane(backend)
    bench.log(bench.stream(broken), started(), *numbers(0, 10))
    bench.log(bench.stream(whole), started(), *numbers(0, 10))
    bench.turn(lambda: bench.account(whole).pending == 0, "the other run is delivered")
    bench.turn(lambda: bench.account(broken).last_error, "the broken one is told of")
    assert kit.values(whole, "n") == once(range(10))
    assert bench.account(broken).pending == 11


def test_a_tracker_that_was_gone_for_a_while_gets_everything_once(
    kit: Kit, bench: Bench, backend: type[Backend]
) -> None:
    run = kit.run()
    stream = bench.stream(run)
    bench.open_lane(backend)
    bench.log(stream, started(), *numbers(0, 10))
    bench.deliver_all()

    kit.gone()
    bench.log(stream, *numbers(10, 10))
    until_s = time.monotonic() + OUTAGE_S
    bench.turn(lambda: time.monotonic() > until_s, "the outage ends", OUTAGE_S + 5)
    assert bench.account().last_error
    assert bench.account().pending == 10
    kit.heal()
    bench.skip_pauses()
    bench.deliver_all()
    assert kit.values(run, "n") == once(range(20))


def test_a_hanging_tracker_holds_up_neither_the_others_nor_the_end(kit: Kit, bench: Bench) -> None:
    kit.needs("hang")
    hanging, other = kit.run(), kit.run()
    streams = {run.run_id: bench.stream(run) for run in (hanging, other)}

    def log(*records: Record) -> None:
        for stream in streams.values():
            bench.log(stream, *records)

    def other_is_served() -> bool:
        account = bench.account(other)
        return account.pending == 0 if kit.hangs_alone else account.retries > 0

    log(started(), *numbers(0, 10))
    with lane_process(bench, CLOSE_S):
        wait_for(lambda: bench.account().pending == 0, DELIVER_S, "a good beginning")
        kit.hang(hanging)
        log(*numbers(10, 10))
        wait_for(other_is_served, DELIVER_S, "the other run is served")
        assert bench.account(hanging).pending == 10
    kit.heal()
    log(finished())
    with lane_process(bench):
        wait_for(lambda: bench.account().pending == 0, DELIVER_S, "all is delivered")
    for run in (hanging, other):
        assert kit.values(run, "n") == once(range(20))
    assert bench.account().balanced
