"""A lane in trouble: poison, parks, pauses, hangs. Nobody else pays for it, nothing is lost; the law at every tick."""

from __future__ import annotations

import threading

import pytest

from unit.shipper.lanes import MakeBench, make, refuse, script
from unit.shipper.scripted import RELEASE_S, ScriptedBackend, Tracker, deliver, with_limits
from verl_shipper import status
from verl_shipper.backends.base import Batch, Delivered, Outcome, Park, Reject, Retry
from verl_shipper.lane import REFUSALS_MAX, HungUploadError
from verl_shipper.letters import letters
from verl_shipper.policy.backoff import PARK_S

__all__ = ["make"]  # a fixture


# Poison


@pytest.mark.parametrize("poison", [{0}, {37}, {99}, {3, 4}, {0, 50, 99}])
def test_poison_is_found_by_halving_and_everything_else_arrives_in_order(make: MakeBench, poison: set[int]) -> None:
    bench = make(Tracker(refuse(poison)), with_limits(items_max=100))
    stream = bench.stream()
    bench.log(stream, 100)

    bench.until_quiet()

    assert bench.tracker.numbers(stream) == [number for number in range(100) if number not in poison]
    assert {(letter.step, letter.reason) for letter in letters(str(bench.root))} == {
        (number, "400 odd value") for number in poison
    }
    assert len(bench.tracker.requests) <= 2 * 8 * len(poison)
    assert bench.account().dead_lettered == len(poison)


def test_a_batch_that_is_all_poison_ends(make: MakeBench) -> None:
    bench = make(Tracker(lambda _batch: Reject("no")))
    bench.log(bench.stream(), 10)

    bench.until_quiet()

    assert bench.account().dead_lettered == 10
    assert len(bench.tracker.requests) == 19


def test_a_tracker_that_refuses_everything_is_asked_slowly_and_the_operator_is_told(make: MakeBench) -> None:
    bench = make(Tracker(lambda _batch: Reject("no")), with_limits(items_max=100))
    bench.log(bench.stream(), 40)

    bench.tick(60)
    buried = bench.account().dead_lettered
    assert REFUSALS_MAX < buried < 30
    assert bench.account().parked == 1
    assert "refused in a row" in bench.account().last_error

    for _ in range(2):
        bench.tick(1, by_s=PARK_S)
        bench.tick(12)
    assert buried < bench.account().dead_lettered <= buried + 3

    bench.tracker.answer = deliver
    bench.tick(2, by_s=PARK_S)
    bench.tick(20)
    account = bench.account()
    assert (account.parked, account.delivered) == (0, 40 - account.dead_lettered)


def test_named_poison_is_buried_at_once(make: MakeBench) -> None:
    bench = make(Tracker(script(Reject("two of them", [2, 7]))))
    stream = bench.stream()
    bench.log(stream, 10)

    bench.until_quiet()

    assert bench.tracker.numbers(stream) == [0, 1, 3, 4, 5, 6, 8, 9]
    assert len(bench.tracker.requests) == 2
    assert bench.tracker.requests[0].batch_id != bench.tracker.requests[1].batch_id


def test_every_letter_carries_its_own_reason(make: MakeBench) -> None:
    bench = make(Tracker(script(Reject("two of them", [2, 7], {2: "too long"}))))
    bench.log(bench.stream(), 10)

    bench.until_quiet()

    assert {(letter.step, letter.reason) for letter in letters(str(bench.root))} == {
        (2, "too long"),
        (7, "two of them"),
    }


@pytest.mark.parametrize("indices", [[], [-1], [10], [3, 99, -4]])
def test_poison_that_is_named_wrongly_is_still_found(make: MakeBench, indices: list[int]) -> None:
    def answer(batch: Batch) -> Outcome:
        return Reject("bad", indices) if 3 in {item.ordinal for item in batch.items} else Delivered()

    bench = make(Tracker(answer))
    stream = bench.stream()
    bench.log(stream, 10)

    bench.until_quiet()

    assert bench.tracker.numbers(stream) == [number for number in range(10) if number != 3]
    assert bench.account().dead_lettered == 1


def test_halving_goes_on_after_a_crash(make: MakeBench) -> None:
    bench = make(Tracker(refuse({5})))
    stream = bench.stream()
    bench.log(stream, 10)
    for _ in range(12):
        bench.tick(4)
        bench.crash()

    assert bench.account().pending == 0
    assert bench.tracker.numbers(stream) == [number for number in range(10) if number != 5]


def test_a_payload_that_is_no_record_is_counted_and_costs_nothing_else(make: MakeBench) -> None:
    bench = make()
    stream = bench.stream()
    bench.log(stream, 2)
    bench.log_payload(stream, b"\xc1 not msgpack")
    bench.log(stream, 2)

    bench.until_quiet()

    assert bench.tracker.numbers(stream) == [0, 1, 3, 4]
    assert dict(bench.account().dropped) == {status.UNREADABLE: 1}


# Parks, pauses, hangs


def test_a_parked_run_is_looked_at_slowly_and_comes_back(make: MakeBench) -> None:
    bench = make(Tracker(script(Park("403 key refused"), Park("403 key refused"))))
    stream = bench.stream()
    bench.log(stream, 3)
    bench.tick(10)
    account = bench.account()
    assert (account.parked, account.last_error, account.pending) == (1, "403 key refused", 3)
    assert len(bench.tracker.requests) == 1

    bench.until_quiet(by_s=10.0)

    assert len(bench.tracker.requests) == 3
    assert bench.account().parked == 0
    assert bench.tracker.numbers(stream) == [0, 1, 2]


def test_a_run_in_trouble_delays_no_other_run(make: MakeBench) -> None:
    sick: dict[str, Outcome] = {"parked": Park("403"), "waiting": Retry("503")}
    bench = make(Tracker(lambda batch: sick.get(batch.run.run_id, Delivered())))
    for run_id in sick:
        bench.log(bench.stream(run_id=run_id), 3)
    well = bench.stream(run_id="well")
    bench.log(well, 30)

    bench.tick(12)

    assert bench.tracker.numbers(well) == list(range(30))
    assert bench.account("parked").pending == bench.account("waiting").pending == 3


def test_a_tracker_that_asks_for_a_pause_gets_it_from_all_runs(make: MakeBench) -> None:
    bench = make(Tracker(script(Retry("429", after_s=20.0))), with_limits(runs_at_once_max=1))
    for run_id in ("a", "b"):
        bench.log(bench.stream(run_id=run_id), 3)

    bench.tick(60)
    assert len(bench.tracker.requests) == 1
    bench.tick(20)

    assert bench.account().pending == 0


@pytest.mark.parametrize("after_s", [10.0**9, float("inf"), float("nan"), -5.0])
def test_no_pause_is_longer_than_an_hour(make: MakeBench, after_s: float) -> None:
    bench = make(Tracker(script(Retry("429", after_s=after_s))))
    bench.log(bench.stream(), 3)
    bench.tick(3)

    bench.until_quiet(by_s=400.0, ticks_max=12)


def test_a_hung_run_delays_no_other_run(make: MakeBench) -> None:
    release = threading.Event()

    def answer(batch: Batch) -> Outcome:
        if batch.run.run_id == "hung":
            release.wait(RELEASE_S)
        return Delivered()

    bench = make(Tracker(answer))
    bench.log(bench.stream(run_id="hung"), 3)
    well = bench.stream(run_id="well")
    bench.log(well, 30)
    try:
        for _ in range(20):
            bench.now_s += 0.3
            bench.lane.tick(bench.now_s)
            futures = [run.future for run_id, run in bench.lane.runs.items() if run_id == "well" and run.future]
            for future in futures:
                future.exception(RELEASE_S)
        assert bench.tracker.numbers(well) == list(range(30))
        bench.assert_law()
    finally:
        release.set()


def test_a_hung_upload_ends_the_lane_at_its_limit_and_nothing_is_lost(make: MakeBench) -> None:
    release = threading.Event()

    def answer(_batch: Batch) -> Outcome:
        if len(bench.tracker.requests) == 1:
            release.wait(RELEASE_S)
            return Retry("too late")
        return Delivered()

    bench = make(Tracker(answer), with_limits(upload_s_max=60.0))
    stream = bench.stream()
    bench.log(stream, 3)
    try:
        bench.start_upload()
        bench.lane.tick(bench.now_s + 59.0)
        with pytest.raises(HungUploadError, match="60 s"):
            bench.lane.tick(bench.now_s + 61.0)
        bench.lane.close(0.1)
    finally:
        release.set()
    bench.lane = bench._new_lane()

    bench.until_quiet()

    assert bench.tracker.requests[0] == bench.tracker.requests[1]
    assert bench.tracker.numbers(stream) == [0, 1, 2]


def test_runs_that_hang_do_not_starve_the_others_over_a_restart(make: MakeBench) -> None:
    release = threading.Event()

    def answer(batch: Batch) -> Outcome:
        if batch.run.run_id.startswith("hung"):
            release.wait(RELEASE_S)
            return Retry("too late")
        return Delivered()

    bench = make(Tracker(answer), with_limits(runs_at_once_max=2, upload_s_max=60.0))
    for run_id in ("hung 1", "hung 2"):
        bench.log(bench.stream(run_id=run_id), 3)
    try:
        while len(bench.tracker.requests) < 2:
            bench.now_s += 0.3
            bench.lane.tick(bench.now_s)
            bench.rest(0.01)
        well = bench.stream(run_id="well")
        bench.log(well, 3)
        with pytest.raises(HungUploadError):
            bench.lane.tick(bench.now_s + 61.0)
        bench.lane.close(0.0)
        told = [bench.account(run_id).last_error for run_id in ("hung 1", "hung 2")]
        assert "an upload hangs for 60 s" in told
        bench.now_s += 62.0
        bench.lane = bench._new_lane()
        for _ in range(20):
            bench.now_s += 0.3
            bench.lane.tick(bench.now_s)
            bench.rest(0.02)

        assert bench.tracker.numbers(well) == [0, 1, 2]
    finally:
        release.set()
    bench.tracker.answer = lambda _batch: Delivered()
    bench.until_quiet(by_s=5.0)
    assert len(bench.tracker.kept) == 9
    assert not any(run.hangs for run in bench.lane.runs.values())


def test_an_upload_that_moves_is_not_hung_however_long_it_takes(make: MakeBench) -> None:
    release = threading.Event()
    bench = make(Tracker(lambda _batch: Delivered() if release.wait(RELEASE_S) else Retry("too late")))
    bench.log(bench.stream(), 1)
    bench.start_upload()
    (run,) = bench.lane.runs.values()
    limit_s = ScriptedBackend.limits.upload_s_max
    try:
        for _ in range(3):
            bench.now_s += limit_s + 1
            run.backend.busy_until_s = bench.now_s + 1  # some bytes went out
            bench.lane.tick(bench.now_s)
        with pytest.raises(HungUploadError):
            bench.lane.tick(bench.now_s + 2)
    finally:
        release.set()


def test_a_closing_lane_commits_what_comes_back_in_time(make: MakeBench) -> None:
    bench = make()
    bench.log(bench.stream(), 3)
    bench.start_upload()

    bench.lane.close(20.0)

    assert bench.account().delivered == 3
    assert bench.tracker.closed == 1
    bench.lane = bench._new_lane()


def test_a_backend_that_cannot_close_costs_nothing(make: MakeBench) -> None:
    class Stubborn(ScriptedBackend):
        def close(self) -> None:
            raise RuntimeError("not now")

    bench = make(backend=Stubborn)
    stream = bench.stream()
    bench.log(stream, 3)
    bench.until_quiet()
    bench.tick(by_s=5.0)
    bench.tick(2, by_s=700.0)
    bench.log(stream, 3)
    bench.log(bench.stream(), 3)

    bench.until_quiet()

    assert bench.account().delivered == 9
