"""A lane's state: lost, damaged, full disks, operators who change it; the law at every tick."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from support.streams import frame, loss_frame
from unit.shipper.lanes import MakeBench, make, refuse
from unit.shipper.scripted import BACKEND, Tracker
from verl_shipper import status
from verl_shipper.backends.base import Delivered
from verl_shipper.letters import letters, want
from verl_shipper_spool.record import Loss

__all__ = ["make"]  # a fixture


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
    bench = make(Tracker(refuse({1, 2})))
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
    bench = make(Tracker(refuse({1})))
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
    bench = make(Tracker(refuse({1, 2})))
    bench.log(bench.stream(), 4)
    bench.until_quiet()
    first, second = letters(str(bench.root))

    assert want(str(bench.root), "discard", BACKEND, [first.letter_id], None) == 1
    bench.tick(3)

    assert [letter.letter_id for letter in letters(str(bench.root))] == [second.letter_id]
    assert dict(bench.account().dropped) == {status.DISCARDED: 1}


def test_letters_of_a_run_whose_stream_is_reclaimed_can_still_be_sent(make: MakeBench) -> None:
    bench = make(Tracker(refuse({1})))
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
