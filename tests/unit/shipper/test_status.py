"""The account: three independent counts that must agree, read from whatever state files there are."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.streams import frame, make_header
from unit.shipper.scripted import BACKEND, Bench, Tracker
from verl_shipper.backends.base import Batch, Delivered, Outcome, Park, Reject
from verl_shipper.status import UNNAMED_NOTE, Account, report


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "state")
    yield made
    made.close()


def _answer(batch: Batch) -> Outcome:
    if batch.run.run_id == "parked":
        return Park("401 key refused")
    return Reject("odd", [0]) if batch.items[0].ordinal == 0 else Delivered(ignored={"text": len(batch.items)})


def test_a_state_folder_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    found = report(str(tmp_path / "absent"))

    assert found.to_json() == {"daemon": {}, "runs": {}, "backends": {}, "watch": []}
    assert found.pending == 0


def test_everything_is_pending_for_a_lane_that_has_not_begun(bench: Bench) -> None:
    bench.log(bench.stream(run_id="a"), 5)
    bench.log(bench.stream(run_id="b"), 7)

    found = report(str(bench.root), ["new"])

    assert {run_id: account.pending for run_id, account in found.backends["new"].items()} == {"a": 5, "b": 7}
    assert found.total("new").logged == found.pending == 12
    assert found.total("new").balanced


def test_what_was_freed_before_a_lane_read_it_is_no_longer_waited_for(bench: Bench) -> None:
    bench.log(bench.stream(run_id="a"), 5)
    bench.until_quiet()
    gone = bench.stream(run_id="b")
    bench.log(gone, 7)
    bench.ingest.seal(gone, [])
    bench.ingest.reclaim({gone: bench.ingest.end(gone)})

    runs = report(str(bench.root), [BACKEND]).backends[BACKEND]

    assert (runs["a"].delivered, runs["a"].dropped) == (5, Counter())
    assert (runs["b"].pending, runs["b"].dropped) == (0, Counter(reclaimed=7 + 1)), "sealing adds the end"
    assert runs["b"].balanced


@pytest.mark.parametrize(
    ("note", "shown"),
    [
        (None, ("default", "default")),
        ({"project": "rlhf", "experiment": None}, ("rlhf", "default")),
        ({"project": "rlhf", "experiment": "first"}, ("rlhf", "first")),
    ],
)
def test_a_run_without_names_has_those_of_the_configuration(
    note: dict[str, str | None] | None, shown: tuple[str, str], tmp_path: Path
) -> None:
    bench = Bench(tmp_path)
    stream = bench.stream(project="", experiment="")
    bench.log(stream)
    if note is not None:
        bench.ingest.write_notes({UNNAMED_NOTE: json.dumps(note)})
    bench.until_quiet()
    bench.close()

    (run,) = report(str(tmp_path)).runs.values()
    assert (run.project, run.experiment) == shown
    assert bench.tracker.requests[0].run.project == "default"


def test_metrics_that_are_shown_under_another_name_are_told(tmp_path: Path) -> None:
    """Any backend that notes its names under `metric_names` has them in the report."""
    bench = Bench(tmp_path / "state", Tracker(lambda _: Delivered({"metric_names": {"a@b": "a_at_b", "ok": "ok"}})))
    bench.log(bench.stream(run_id="a"), 5)
    bench.until_quiet()
    bench.log(bench.stream(run_id="b"), 5)

    shown = report(str(bench.root)).to_json()["backends"][BACKEND]["runs"]

    assert {run_id: told["renamed"] for run_id, told in shown.items()} == {"a": {"a@b": "a_at_b"}, "b": {}}
    bench.close()


def test_runs_and_totals_add_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "state", Tracker(_answer))
    bench.log(bench.stream(run_id="well"), 5)
    bench.log(bench.stream(run_id="parked"), 3)
    bench.tick(12)
    account, parked, total = bench.account("well"), bench.account("parked"), bench.account()

    assert (account.logged, account.delivered, account.dead_lettered, account.pending) == (5, 4, 1, 0)
    assert account.ignored == Counter({"text": 4})
    assert (parked.pending, parked.parked, parked.last_error) == (3, 1, "401 key refused")
    assert (total.logged, total.delivered, total.dead_lettered, total.pending, total.parked) == (8, 4, 1, 3, 1)
    assert total.balanced
    bench.close()


def test_a_report_is_json_with_the_documented_fields(bench: Bench) -> None:
    bench.log(bench.stream(run_id="a"), 5)
    bench.until_quiet()

    shown = json.loads(json.dumps(report(str(bench.root)).to_json()))

    fields = {"logged", "delivered", "sampled_out", "dead_lettered", "dropped", "pending", "parked", "last_error"}
    assert fields <= set(shown["backends"][BACKEND])
    assert fields <= set(shown["backends"][BACKEND]["runs"]["a"])
    assert shown["runs"] == {"a": {"project": "project", "experiment": "experiment"}}
    assert shown["backends"][BACKEND]["balanced"] is True


@pytest.mark.parametrize(
    ("changes", "balanced"),
    [
        ({}, True),
        ({"delivered": 5}, True),
        ({"delivered": 6}, False),
        ({"pending": 5}, True),
        ({"delivered": 1, "sampled_out": 1, "dead_lettered": 1, "dropped": Counter(a=1), "pending": 1}, True),
        ({"dropped": Counter(a=2, b=3)}, True),
        ({"delivered": 4}, False),
    ],
)
def test_the_law_says_when_something_is_wrong_with_us(changes: dict[str, object], balanced: bool) -> None:
    account = Account(logged=5 if changes else 0)
    for name, value in changes.items():
        setattr(account, name, value)

    assert account.balanced is balanced


def test_a_lane_ahead_of_the_table_hides_no_other_stream(bench: Bench) -> None:
    """The table of ingest is written after the bytes: for a moment a lane may know more of one stream."""
    ahead, behind = bench.stream(run_id="a"), bench.stream(run_id="a")
    bench.log(ahead, 5)
    bench.until_quiet()
    bench.log(behind, 3)
    db = sqlite3.connect(bench.root / "daemon.sqlite3", isolation_level=None)
    db.execute("UPDATE streams SET ordinal_next = 2 WHERE stream_id = ?", (ahead,))
    db.close()

    account = bench.account("a")

    assert (account.logged, account.delivered, account.pending) == (8, 5, 3)


def test_what_is_waiting_has_a_lag_and_what_is_through_has_none(bench: Bench) -> None:
    stream = bench.stream(created_ns=time.time_ns() - 90 * 10**9)
    bench.log(stream, 3)
    assert bench.account().lag_s == pytest.approx(90.0, abs=10.0)

    bench.until_quiet()
    assert bench.account().lag_s == 0.0


@pytest.mark.parametrize("damage", [b"", b"\0" * 8192, b"text" * 500, None], ids=["empty", "NULs", "text", "absent"])
def test_a_lost_lane_state_counts_as_nothing_delivered(bench: Bench, damage: bytes | None) -> None:
    bench.log(bench.stream(), 5)
    bench.until_quiet()
    bench.lane.close(0.0)
    Path(bench.store_path).unlink()
    if damage is not None:
        Path(bench.store_path).write_bytes(damage)

    account = bench.account()

    assert (account.logged, account.delivered, account.pending) == (5, 0, 5)
    Path(bench.store_path).unlink(missing_ok=True)
    bench.lane = bench._new_lane()


def test_a_lost_daemon_state_is_made_up_for_by_the_lanes(bench: Bench) -> None:
    bench.log(bench.stream(), 5)
    bench.until_quiet()
    bench.ingest.close()
    os.unlink(bench.root / "daemon.sqlite3")

    account = bench.account()

    assert (account.logged, account.delivered, account.pending, account.balanced) == (5, 5, 0, True)
    bench.ingest.open()


@pytest.mark.parametrize(
    ("database", "harm"),
    [
        ("daemon.sqlite3", "UPDATE streams SET header = x'00'"),
        ("daemon.sqlite3", "INSERT INTO notes VALUES ('state', 'no json')"),
        ("daemon.sqlite3", "DROP TABLE notes"),
        (f"lanes/{BACKEND}.sqlite3", "UPDATE cursors SET dropped = x'c1'"),
        (f"lanes/{BACKEND}.sqlite3", "UPDATE tallies SET ignored = x''"),
        (f"lanes/{BACKEND}.sqlite3", "DROP TABLE tallies"),
    ],
)
def test_damage_inside_a_state_file_is_told_and_raises_nothing(bench: Bench, database: str, harm: str) -> None:
    bench.log(bench.stream(), 5)
    bench.until_quiet()
    db = sqlite3.connect(bench.root / database, isolation_level=None)
    db.execute(harm)
    db.close()

    shown = report(str(bench.root), [BACKEND]).to_json()

    told = shown["daemon"].get("state_error", "") + shown["backends"][BACKEND]["last_error"]
    assert told
    assert shown["backends"][BACKEND]["logged"] >= 0
    Path(bench.store_path).unlink()
    bench.lane._store._db.close()
    bench.lane = bench._new_lane()


def test_backends_that_once_had_a_lane_are_shown(bench: Bench) -> None:
    bench.log(bench.stream(), 2)
    bench.until_quiet()
    bench.ingest.write_notes({"backends": '["file", "console"]'})

    assert list(report(str(bench.root)).backends) == ["console", "file", BACKEND]


def test_looking_while_the_daemon_writes_is_always_balanced(bench: Bench) -> None:
    header = make_header()
    bench.ingest.greet(header)
    for number in range(40):
        bench.ingest.take(header.stream_id, bench.ingest.end(header.stream_id), frame(number))
        if number % 3 == 0:
            bench.ingest.settle()
        bench.tick(by_s=0.1)

    bench.ingest.settle()
    bench.until_quiet()
    assert bench.account().delivered == 40
