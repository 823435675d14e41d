"""A lane that samples: what it holds back and when it lets go, what runs may ask for, and what is counted."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.samples import metrics, part, record, span
from unit.shipper.sampled import MakeBench, benches, delivered, log, log_steps, order_of, shown_steps, start
from unit.shipper.scripted import BACKEND, Bench, ScriptedBackend, Tracker
from verl_shipper.backends.base import Outcome, Park
from verl_shipper.lane_store import LaneStore
from verl_shipper.policy.wishes import LOGGER
from verl_shipper_spool.header import BULK
from verl_shipper_spool.record import RecordKind
from verl_shipper_spool.redact import REDACTED
from verl_shipper_spool.segment import list_segments

FINISH = record(RecordKind.RUN_FINISH, {"exit_code": 0})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeBench]:
    with benches(tmp_path) as new:
        yield new


# What is held back


def test_the_last_step_is_delivered_when_the_run_finishes(make: MakeBench) -> None:
    bench = make(order_of(log_frequency=10))
    stream = bench.stream()
    log_steps(bench, stream, *range(1, 96))
    bench.tick(30)
    assert shown_steps(bench, stream) == [1, *range(10, 100, 10)]
    assert bench.account().pending == 1

    log(bench, stream, FINISH)
    bench.until_quiet()

    assert shown_steps(bench, stream) == [1, *range(10, 100, 10), 95]
    assert bench.account().sampled_out == 95 - 11
    assert bench.account().sampled == {"log_frequency": 84}


def test_the_last_step_is_delivered_when_the_writer_has_died(make: MakeBench) -> None:
    bench = make(order_of(log_frequency=10))
    stream = bench.stream()
    log_steps(bench, stream, 1, 2, 3)
    bench.tick(5)

    bench.ingest.seal(stream, [])
    bench.until_quiet()

    assert shown_steps(bench, stream) == [1, 3]


def test_the_last_step_of_a_silent_run_is_let_go_after_a_time(make: MakeBench) -> None:
    bench = make(order_of(log_frequency=10, release_idle_s=60.0))
    stream = bench.stream()
    log_steps(bench, stream, 1, 2, 3)
    bench.tick(20, by_s=2.0)
    assert shown_steps(bench, stream) == [1]

    bench.tick(20, by_s=2.0)
    assert shown_steps(bench, stream) == [1, 3]

    log_steps(bench, stream, 3, 4, 5)
    bench.tick(10, by_s=2.0)
    assert shown_steps(bench, stream) == [1, 3, 3]


def test_a_held_step_costs_no_turns(make: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(order_of(log_frequency=10))
    stream = bench.stream()
    log_steps(bench, stream, 1, 2)
    bench.tick(10)
    seals: list[str] = []
    monkeypatch.setattr(bench.lane._store, "seal", lambda run_id, *_: seals.append(run_id))

    bench.tick(20)

    assert seals == []


def test_segments_that_hold_what_waits_are_not_reclaimed(make: MakeBench) -> None:
    bench = make(order_of(log_frequency=100))
    stream = bench.stream()
    log_steps(bench, stream, 1, 2)
    bench.tick(10)
    store = LaneStore(bench.store_path)
    cursor = store.cursors()[stream]
    store.close()

    bench.ingest.reclaim({stream: cursor.safe_offset})

    assert cursor.safe_offset < bench.ingest.end(stream)
    bench.crash()
    bench.ingest.seal(stream, [])
    bench.until_quiet()
    assert shown_steps(bench, stream) == [1, 2]


def test_a_batch_in_the_outbox_stays_as_it_was_when_the_order_changes(make: MakeBench) -> None:
    bench = make(order_of(log_frequency=2, log_mode="mean"), Tracker(answer=lambda _batch: Park("away")))
    stream = bench.stream()
    log_steps(bench, stream, 1, 2, 3, 4, 5)
    bench.tick(5)
    waiting = bench.tracker.requests[0].items

    bench.order = order_of(exclude=["*"])
    bench.tracker.answer = Tracker().answer
    bench.crash()
    bench.tick(10)

    again = bench.tracker.requests[-1].items
    assert [item.payload for item in again] == [item.payload for item in waiting]
    assert bench.tracker.requests[-1].batch_id == bench.tracker.requests[0].batch_id
    assert [each.body for each in delivered(bench, stream)] == [
        *({"train/loss": 1}, {"train/loss": 1.5}, {"train/loss": 3.5}),
    ]


def test_values_that_were_taken_out_are_counted(make: MakeBench) -> None:
    bench = make(order_of(exclude=["b*"]))
    stream = bench.stream()
    log(bench, stream, metrics(1, {"a": 1, "b": {"x": 1, "y": 2}}), metrics(2, {"b": {"x": 1}}))

    bench.until_quiet()

    assert bench.account().ignored == {"sampled_out": 2}
    assert bench.account().sampled == {"name": 1}


# Tables


def _big_parts(bench: Bench, stream: str, count: int, size_bytes: int) -> None:
    for number in range(count):
        each = part(1, [f"{number} a", f"{number} b"], number, count)
        each.body["rows"][0][1] = each.body["rows"][1][1] = "x" * (size_bytes // 2)
        log(bench, stream, each)


def test_of_a_large_table_some_rows_are_kept_in_little_memory(make: MakeBench) -> None:
    bench = make(order_of(log_val_generations=3), bytes_max=8 * 1024 * 1024)
    stream = bench.stream(stream_class=BULK)
    _big_parts(bench, stream, 80, 1_000_000)

    tracemalloc.start()
    bench.until_quiet()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    parts = delivered(bench, stream)
    assert sum(len(each.body["rows"]) for each in parts) == 3
    assert [(each.body["part"], each.body["parts"]) for each in parts] == [(n, len(parts)) for n in range(len(parts))]
    assert bench.account().sampled == {"log_val_generations": 80 - len(parts)}
    assert peak_bytes < 60_000_000


def test_a_part_whose_bytes_are_damaged_meanwhile_is_counted(make: MakeBench) -> None:
    bench = make(order_of(log_val_generations=9))
    stream = bench.stream(stream_class=BULK)
    log(bench, stream, part(1, "ab", 0, 2))
    bench.tick(3)
    folder = os.path.join(bench.ingest.spool_dir, stream)
    (segment,) = list_segments(bench.ingest.streams[stream].files, folder)
    with open(segment.path, "r+b") as file:
        file.seek(40)
        file.write(b"????")

    log(bench, stream, part(1, "cd", 1, 2))
    bench.until_quiet()

    assert [row[0] for each in delivered(bench, stream) for row in each.body["rows"]] == ["c", "d"]
    assert bench.account().dropped == {"unreadable": 1}


def test_a_table_that_waits_is_read_again_after_a_crash(make: MakeBench) -> None:
    bench = make(order_of(log_val_generations=2))
    stream = bench.stream(stream_class=BULK)
    log(bench, stream, part(1, "abc", 0, 2))
    bench.tick(3)

    bench.crash()
    log(bench, stream, part(1, "def", 1, 2))
    bench.until_quiet()

    assert sum(len(each.body["rows"]) for each in delivered(bench, stream)) == 2


# Wishes


def test_a_backend_that_a_run_does_not_want_is_never_opened(make: MakeBench) -> None:
    bench = make(order_of((LOGGER,)))
    scalars = bench.stream(writer_id="a" * 32)
    bulk = bench.stream(writer_id="a" * 32, stream_class=BULK)
    log(bench, scalars, start(logger=["console"]), metrics(1, a=1), FINISH)
    log(bench, bulk, part(1, "abc"), span(1, 1))

    bench.until_quiet()

    assert bench.tracker.opened == 0
    assert bench.account().sampled == {LOGGER: 5}


def test_a_backend_that_one_writer_wants_is_opened_first(make: MakeBench) -> None:
    bench = make(order_of((LOGGER,)))
    for index, logger in enumerate((BACKEND, "console")):
        log(bench, bench.stream(writer_id=f"{index:032x}"), start(logger=[logger]), metrics(1, a=1))

    bench.until_quiet()

    assert bench.tracker.opened == 1
    assert bench.account().delivered == 2
    assert bench.account().sampled_out == 2


def test_what_a_run_asks_for_counts_for_its_other_stream_whatever_comes_first(make: MakeBench) -> None:
    bench = make(order_of())
    bulk = bench.stream(writer_id="a" * 32, stream_class=BULK)
    scalars = bench.stream(writer_id="a" * 32)
    log(bench, bulk, part(1, "abcde"))
    bench.tick(5)
    assert delivered(bench, bulk) == []

    log(bench, scalars, start(log_val_generations=2))
    bench.until_quiet()

    assert len(delivered(bench, bulk)[0].body["rows"]) == 2


def test_a_writer_whose_first_record_never_comes_is_not_waited_for_for_ever(make: MakeBench) -> None:
    bench = make(order_of())
    bulk = bench.stream(writer_id="a" * 32, stream_class=BULK)
    bench.stream(writer_id="a" * 32)
    log(bench, bulk, part(1, "abcde"))

    bench.tick(20, by_s=3.0)

    assert len(delivered(bench, bulk)) == 1


def test_a_first_record_that_is_damaged_costs_only_its_wishes(make: MakeBench) -> None:
    bench = make(order_of())
    scalars = bench.stream(writer_id="a" * 32)
    bulk = bench.stream(writer_id="a" * 32, stream_class=BULK)
    bench.put(scalars, b"\xf5vs\x01 broken")
    bench._next[scalars] = 1
    log_steps(bench, scalars, 1, 2)
    log(bench, bulk, part(1, "abcde"))

    bench.until_quiet()

    assert shown_steps(bench, scalars) == [1, 2]
    assert len(delivered(bench, bulk)[0].body["rows"]) == 5


def test_workers_without_a_configuration_follow_their_run(make: MakeBench) -> None:
    bench = make(order_of())
    log(bench, bench.stream(writer_id="a" * 32), start(log_val_generations=2))
    bench.until_quiet()

    worker = bench.stream(writer_id="b" * 32, stream_class=BULK)
    log(bench, worker, part(1, "abcde"))
    bench.crash()
    bench.until_quiet()

    assert len(delivered(bench, worker)[0].body["rows"]) == 2


def test_writers_of_a_run_have_their_own_wishes(make: MakeBench) -> None:
    bench = make(order_of())
    streams = []
    for index, every in enumerate((2, 4)):
        streams.append(bench.stream(writer_id=f"{index:032x}"))
        log(bench, streams[-1], start(log_frequency=every))
        log_steps(bench, streams[-1], *range(9))

    bench.until_quiet()

    assert [shown_steps(bench, stream) for stream in streams] == [[0, 2, 4, 6, 8], [0, 4, 8]]


@pytest.mark.parametrize(
    ("may_choose", "given", "asked", "used"),
    [
        (("wandb_proxy",), {}, "http://proxy:8080", "http://proxy:8080"),
        ((), {}, "http://proxy:8080", None),
        (("wandb_proxy",), {"wandb_proxy": "http://ours:1"}, "http://proxy:8080", "http://ours:1"),
        (("wandb_proxy",), {}, f"http://{REDACTED}@proxy:8080", None),
        (("wandb_proxy",), {}, "not a url", None),
    ],
)
def test_a_proxy_that_a_run_asks_for_is_used_where_it_may_choose_one(
    may_choose: tuple[str, ...], given: dict[str, str], asked: str, used: str | None, tmp_path: Path
) -> None:
    seen: list[str | None] = []

    class Proxied(ScriptedBackend):
        settings_known = ("tracker", "wandb_proxy")

        def open(self) -> Outcome | None:
            seen.append(self.settings.get("wandb_proxy"))
            return super().open()

    bench = Bench(tmp_path, backend=Proxied, order=order_of(may_choose), settings=given)
    log(bench, bench.stream(), start(wandb_proxy=asked))
    bench.until_quiet()
    bench.close()

    assert seen == [used]


def test_what_the_operator_set_stands(make: MakeBench) -> None:
    bench = make(order_of(log_frequency=4))
    stream = bench.stream()
    log(bench, stream, start(log_frequency=2))
    log_steps(bench, stream, *range(9))

    bench.until_quiet()

    assert shown_steps(bench, stream) == [0, 4, 8]
