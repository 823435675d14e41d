"""A lane and a scripted tracker: order, exact repeats, poison, parks, pauses, hangs, crashes; the law at every tick."""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.streams import frame, loss_frame
from unit.shipper.scripted import BACKEND, RELEASE_S, Bench, ScriptedBackend, Tracker, deliver, with_limits
from verl_shipper import status
from verl_shipper.backends.base import Batch, Delivered, Outcome, Park, Reject, Retry
from verl_shipper.lane import REFUSALS_MAX, HungUploadError
from verl_shipper.letters import letters, want
from verl_shipper.policy.backoff import PARK_S
from verl_shipper_spool.header import BULK
from verl_shipper_spool.record import Loss

MakeBench = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeBench]:
    made: list[Bench] = []

    def new(tracker: Tracker | None = None, backend: type[ScriptedBackend] = ScriptedBackend) -> Bench:
        made.append(Bench(tmp_path / f"state{len(made)}", tracker, backend))
        return made[-1]

    yield new
    for bench in made:
        bench.close()


def _script(*outcomes: Outcome) -> Callable[[Batch], Outcome]:
    """Answers in turn, Delivered for ever after."""
    left = list(outcomes)
    return lambda _batch: left.pop(0) if left else Delivered()


# Order and batches


def test_records_arrive_once_in_the_order_of_their_stream(make: MakeBench) -> None:
    bench = make()
    stream = bench.stream()
    bench.log(stream, 35)

    bench.until_quiet()

    assert bench.tracker.arrivals == [(stream, number) for number in range(35)]
    assert bench.account().delivered == bench.account().logged == 35


def test_a_batch_ends_at_the_trackers_number_of_items(make: MakeBench) -> None:
    bench = make()
    bench.log(bench.stream(), 25)

    bench.until_quiet()

    assert [len(batch.items) for batch in bench.tracker.requests] == [10, 10, 5]


def test_a_batch_ends_at_the_trackers_number_of_bytes(make: MakeBench) -> None:
    bench = make()
    bench.log(bench.stream(), 6, size_bytes=30_000)

    bench.until_quiet()

    assert [len(batch.items) for batch in bench.tracker.requests] == [3, 3]


def test_one_record_larger_than_a_batch_travels_alone(make: MakeBench) -> None:
    bench = make()
    stream = bench.stream()
    bench.log(stream, 1, size_bytes=300_000)
    bench.log(stream, 1)

    bench.until_quiet()

    assert [len(batch.items) for batch in bench.tracker.requests] == [1, 1]


def test_a_lonely_record_waits_for_company_and_no_longer(make: MakeBench) -> None:
    bench = make(backend=with_limits(age_s_max=5.0))
    bench.log(bench.stream())

    bench.tick(8, by_s=0.5)
    assert bench.tracker.requests == []

    bench.tick(6, by_s=0.5)
    assert len(bench.tracker.requests) == 1


def test_scalars_go_before_bulk(make: MakeBench) -> None:
    bench = make()
    bulk, scalars = bench.stream(stream_class=BULK), bench.stream()
    bench.log(bulk, 5)
    bench.log(scalars, 5)

    bench.until_quiet()

    assert [stream for stream, _ in bench.tracker.arrivals] == [scalars] * 5 + [bulk] * 5


def test_runs_of_one_backend_are_batched_apart(make: MakeBench) -> None:
    bench = make()
    for run_id in ("a", "b", "c", "d", "e"):
        bench.log(bench.stream(run_id=run_id), 12)

    bench.until_quiet()

    for batch in bench.tracker.requests:
        assert len({item.stream_id for item in batch.items}) == 1
    assert {batch.run.run_id for batch in bench.tracker.requests} == {"a", "b", "c", "d", "e"}


def test_no_more_runs_are_uploaded_at_once_than_the_tracker_wants(make: MakeBench) -> None:
    running, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2)

    def answer(_batch: Batch) -> Outcome:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait(RELEASE_S)
        with lock:
            running -= 1
        return Delivered()

    bench = make(Tracker(answer), with_limits(runs_at_once_max=2))
    for run_id in ("a", "b", "c", "d"):
        bench.log(bench.stream(run_id=run_id))

    bench.until_quiet()

    assert most == 2


def test_a_run_without_end_does_not_keep_the_others_from_their_turn(make: MakeBench) -> None:
    bench = make(backend=with_limits(runs_at_once_max=1))
    streams = [bench.stream(run_id=f"run{index}") for index in range(4)]
    for stream in streams:
        bench.log(stream, 100)

    bench.tick(30)

    served = [len(bench.tracker.numbers(stream)) for stream in streams]
    assert min(served) > 0
    assert max(served) - min(served) <= 20


def test_new_streams_and_new_records_are_found_while_running(make: MakeBench) -> None:
    bench = make()
    first = bench.stream()
    bench.log(first, 3)
    bench.until_quiet()

    second = bench.stream()
    bench.log(first, 2)
    bench.log(second, 4)
    bench.until_quiet()

    assert bench.tracker.numbers(first) == [0, 1, 2, 3, 4]
    assert bench.tracker.numbers(second) == [0, 1, 2, 3]


def test_a_folder_that_holds_another_stream_is_not_delivered(make: MakeBench) -> None:
    bench = make()
    stream = bench.stream()
    bench.log(stream, 3)
    spool = Path(bench.ingest.spool_dir)
    shutil.copytree(spool / stream, spool / "backup-of-a-stream")

    bench.until_quiet()
    bench.tick(5)

    assert bench.tracker.arrivals == [(stream, 0), (stream, 1), (stream, 2)]


def test_quiet_runs_give_their_connections_back_and_take_them_again(make: MakeBench) -> None:
    bench = make()
    stream = bench.stream()
    bench.log(stream, 2)
    bench.until_quiet()
    bench.tick(by_s=5.0)
    bench.tick(2, by_s=700.0)
    assert (bench.tracker.opened, bench.tracker.closed) == (1, 1)

    bench.log(stream, 2)
    bench.until_quiet()

    assert (bench.tracker.opened, bench.tracker.closed) == (2, 1)
    assert bench.tracker.numbers(stream) == [0, 1, 2, 3]


# Repeats


def test_a_retry_sends_the_same_bytes_under_the_same_batch_id(make: MakeBench) -> None:
    bench = make(Tracker(_script(Retry("503"), Retry("503"), Retry("timeout"))))
    stream = bench.stream()
    bench.log(stream, 4)
    bench.tick(2)
    bench.log(stream, 4)

    bench.until_quiet(by_s=5.0)

    first = bench.tracker.requests[0]
    assert bench.tracker.requests[:4] == [first] * 4
    assert bench.tracker.numbers(stream) == list(range(8))
    assert bench.account().retries == 3


def test_a_batch_survives_a_crash_byte_for_byte(make: MakeBench) -> None:
    bench = make(Tracker(_script(Retry("503"))))
    stream = bench.stream()
    bench.log(stream, 4)
    bench.tick(3)
    bench.log(stream, 4)
    bench.crash()

    bench.until_quiet(by_s=5.0)

    assert bench.tracker.requests[0] == bench.tracker.requests[1]
    assert bench.tracker.numbers(stream) == list(range(8))


def test_a_lost_answer_leads_to_the_same_batch_again(make: MakeBench) -> None:
    tracker = Tracker()

    def take_and_fail(batch: Batch) -> Outcome:
        if len(tracker.requests) == 1:
            tracker.keep(batch)
            return Retry("connection reset")
        return Delivered()

    tracker.answer = take_and_fail
    bench = make(tracker)
    stream = bench.stream()
    bench.log(stream, 4)

    bench.until_quiet(by_s=5.0)

    assert tracker.requests[0] == tracker.requests[1]
    assert tracker.numbers(stream) == [0, 1, 2, 3]


def test_a_batch_that_gets_on_is_not_sent_ever_more_slowly(make: MakeBench) -> None:
    """Twenty lost answers in a row, each behind a part that was taken."""
    bench = make(Tracker(_script(*[Retry("reset", progressed=True)] * 20)))
    bench.log(bench.stream(), 3)

    bench.until_quiet(by_s=0.5, ticks_max=100)


def test_retries_come_ever_more_slowly_up_to_a_cap(make: MakeBench) -> None:
    bench = make(Tracker(lambda _batch: Retry("503")))
    bench.log(bench.stream())
    sent_s: list[float] = []
    for _ in range(3000):
        before = len(bench.tracker.requests)
        bench.now_s += 0.1
        bench.lane.tick(bench.now_s)
        bench.rest()
        if len(bench.tracker.requests) > before:
            sent_s.append(bench.now_s)

    pauses = [round(later - earlier, 1) for earlier, later in itertools.pairwise(sent_s)]
    assert pauses[:6] == pytest.approx([0.35, 0.6, 1.1, 2.1, 4.1, 8.1], abs=0.15)
    assert max(pauses) == pytest.approx(30.1, abs=0.2)


def test_a_backend_that_raises_is_retried_and_told(make: MakeBench) -> None:
    def answer(_batch: Batch) -> Outcome:
        if len(bench.tracker.requests) == 1:
            raise KeyError("nobody expected that")
        return Delivered()

    bench = make(Tracker(answer))
    bench.log(bench.stream(), 3)

    bench.until_quiet(by_s=5.0)

    assert bench.account().delivered == 3
    assert "nobody expected that" in bench.account().last_error


@pytest.mark.parametrize("answer", [None, "ok", 200])
def test_a_backend_that_answers_nonsense_is_retried(make: MakeBench, answer: object) -> None:
    bench = make(Tracker(_script(answer)))  # type: ignore[arg-type]
    bench.log(bench.stream(), 3)

    bench.until_quiet(by_s=5.0)

    assert bench.account().delivered == 3
    assert repr(answer) in bench.account().last_error


def test_opening_is_retried_like_an_upload(make: MakeBench) -> None:
    answers: list[Outcome | None] = [Retry("no route"), Park("401"), Reject("400"), None]
    bench = make(Tracker(open_answer=lambda: answers.pop(0)))
    bench.log(bench.stream(), 3)

    bench.tick(8)
    assert bench.account().last_error == "401"
    assert bench.account().parked == 1
    bench.until_quiet(by_s=31.0)

    assert bench.tracker.opened == 4
    assert bench.account().parked == 0


def test_a_backend_that_opens_with_delivered_is_open(make: MakeBench) -> None:
    bench = make(Tracker(open_answer=Delivered))
    bench.log(bench.stream(), 3)

    bench.until_quiet()

    assert bench.tracker.opened == 1


# Poison


def _refuse(poison: set[int], reason: str = "400 odd value") -> Callable[[Batch], Outcome]:
    return lambda batch: Reject(reason) if poison & {item.ordinal for item in batch.items} else Delivered()


@pytest.mark.parametrize("poison", [{0}, {37}, {99}, {3, 4}, {0, 50, 99}])
def test_poison_is_found_by_halving_and_everything_else_arrives_in_order(make: MakeBench, poison: set[int]) -> None:
    bench = make(Tracker(_refuse(poison)), with_limits(items_max=100))
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
    bench = make(Tracker(_script(Reject("two of them", [2, 7]))))
    stream = bench.stream()
    bench.log(stream, 10)

    bench.until_quiet()

    assert bench.tracker.numbers(stream) == [0, 1, 3, 4, 5, 6, 8, 9]
    assert len(bench.tracker.requests) == 2
    assert bench.tracker.requests[0].batch_id != bench.tracker.requests[1].batch_id


def test_every_letter_carries_its_own_reason(make: MakeBench) -> None:
    bench = make(Tracker(_script(Reject("two of them", [2, 7], {2: "too long"}))))
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
    bench = make(Tracker(_refuse({5})))
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
    bench = make(Tracker(_script(Park("403 key refused"), Park("403 key refused"))))
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
    bench = make(Tracker(_script(Retry("429", after_s=20.0))), with_limits(runs_at_once_max=1))
    for run_id in ("a", "b"):
        bench.log(bench.stream(run_id=run_id), 3)

    bench.tick(60)
    assert len(bench.tracker.requests) == 1
    bench.tick(20)

    assert bench.account().pending == 0


@pytest.mark.parametrize("after_s", [10.0**9, float("inf"), float("nan"), -5.0])
def test_no_pause_is_longer_than_an_hour(make: MakeBench, after_s: float) -> None:
    bench = make(Tracker(_script(Retry("429", after_s=after_s))))
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


# Lost state, damage, losses


def test_what_the_tracker_has_is_not_sent_again_after_the_state_was_lost(make: MakeBench) -> None:
    bench = make()
    stream = bench.stream()
    bench.log(stream, 14)
    bench.until_quiet()
    bench.lane.close(0.0)
    os.unlink(bench.store_path)
    bench.tracker.holds = {stream: 14}
    bench.lane = bench._new_lane()
    bench.log(stream, 3)

    bench.until_quiet()

    assert bench.tracker.arrivals == [(stream, number) for number in range(17)]
    assert bench.account().delivered == 17


def test_damage_gaps_and_losses_are_counted_with_their_reasons(make: MakeBench) -> None:
    bench = make()
    stream = bench.stream()
    bench.log(stream, 2)
    bench.put(stream, frame(2)[:-3] + b"???" + frame(3))
    bench.put(stream, loss_frame(8, Loss(4, 8, "metrics", "disk_full")) + frame(8))
    bench.put(stream, frame(10), gap_bytes=500)

    bench.until_quiet()

    assert bench.tracker.numbers(stream) == [0, 1, 3, 8, 10]
    assert dict(bench.account().dropped) == {"damaged": 1, "disk_full": 4, "missing": 1}
    assert bench.account().logged == 11


def test_bytes_that_come_twice_are_delivered_once(make: MakeBench) -> None:
    bench = make()
    stream = bench.stream()
    bench.log(stream, 3)
    bench.put(stream, frame(1))
    bench.log(stream, 2)

    bench.until_quiet()

    assert bench.tracker.numbers(stream) == [0, 1, 2, 3, 4]
    assert len(bench.tracker.arrivals) == 5


def test_an_unfinished_frame_waits_for_its_rest(make: MakeBench) -> None:
    bench = make()
    stream = bench.stream()
    bench.log(stream, 2)
    content = frame(2)
    bench.put(stream, content[:-5])
    bench.tick(10)
    assert bench.tracker.numbers(stream) == [0, 1]

    bench.put(stream, content[-5:])
    bench.until_quiet()

    assert bench.tracker.numbers(stream) == [0, 1, 2]


# Operators


def test_an_operator_sends_dead_letters_again(make: MakeBench) -> None:
    bench = make(Tracker(_refuse({1, 2})))
    stream = bench.stream()
    bench.log(stream, 4)
    bench.until_quiet()
    assert bench.account().dead_lettered == 2
    bench.tracker.answer = lambda _batch: Delivered()

    assert want(str(bench.root), "retry", BACKEND, (), None) == 2
    bench.tick(2)
    bench.until_quiet()

    assert sorted(bench.tracker.numbers(stream)) == [0, 1, 2, 3]
    assert bench.account().dead_lettered == 0
    assert letters(str(bench.root)) == []


def test_letters_that_are_refused_again_are_letters_again(make: MakeBench) -> None:
    bench = make(Tracker(_refuse({1})))
    bench.log(bench.stream(), 2)
    bench.until_quiet()
    (old,) = letters(str(bench.root))

    want(str(bench.root), "retry", BACKEND, (), None)
    bench.tick(3)
    bench.until_quiet()

    (new,) = letters(str(bench.root))
    assert new.letter_id > old.letter_id
    assert bench.account().dead_lettered == 1


def test_an_operator_throws_dead_letters_away(make: MakeBench) -> None:
    bench = make(Tracker(_refuse({1, 2})))
    bench.log(bench.stream(), 4)
    bench.until_quiet()
    first, second = letters(str(bench.root))

    assert want(str(bench.root), "discard", BACKEND, [first.letter_id], None) == 1
    bench.tick(3)

    assert [letter.letter_id for letter in letters(str(bench.root))] == [second.letter_id]
    assert dict(bench.account().dropped) == {status.DISCARDED: 1}


def test_letters_of_a_run_whose_stream_is_reclaimed_can_still_be_sent(make: MakeBench) -> None:
    bench = make(Tracker(_refuse({1})))
    stream = bench.stream(run_id="over")
    bench.log(stream, 3)
    bench.until_quiet()
    shutil.rmtree(Path(bench.ingest.spool_dir) / stream)
    bench.crash()
    bench.tick(3)
    bench.tracker.answer = lambda _batch: Delivered()

    want(str(bench.root), "retry", None, (), "over")
    bench.tick(6, by_s=0.6)

    assert sorted(bench.tracker.numbers(stream)) == [0, 1, 2]
    assert bench.account().dead_lettered == 0


def test_a_lane_whose_disk_takes_no_transaction_ends_and_goes_on_later(make: MakeBench) -> None:
    bench = make()
    stream = bench.stream()
    bench.log(stream, 3)
    bench.tick(2)
    bench.lane._store._db.execute("PRAGMA query_only = 1")
    with pytest.raises(sqlite3.OperationalError):
        bench.tick(5)
    bench.crash()

    bench.until_quiet()

    assert bench.tracker.numbers(stream) == [0, 1, 2]


def test_when_a_run_began_does_not_depend_on_the_stream_that_is_found_first(make: MakeBench) -> None:
    bench = make()
    bench.log(bench.stream(created_ns=500))
    bench.until_quiet()
    for created_ns in (100, 900, 300):  # one of them may well come first in the next listing
        bench.log(bench.stream(created_ns=created_ns))
    bench.crash()
    bench.until_quiet()
    assert {batch.run.created_ns for batch in bench.tracker.requests} == {500}
