"""A lane and a scripted tracker: order, batches, exact repeats; the law at every tick."""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path

import pytest

from unit.shipper.lanes import MakeBench, make, script
from unit.shipper.scripted import RELEASE_S, Tracker, with_limits
from verl_shipper.backends.base import Batch, Delivered, Outcome, Park, Reject, Retry
from verl_shipper_spool.header import BULK

__all__ = ["make"]  # a fixture


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
    bench = make(Tracker(script(Retry("503"), Retry("503"), Retry("timeout"))))
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
    bench = make(Tracker(script(Retry("503"))))
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
    bench = make(Tracker(script(*[Retry("reset", progressed=True)] * 20)))
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
    bench = make(Tracker(script(answer)))  # type: ignore[arg-type]
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
