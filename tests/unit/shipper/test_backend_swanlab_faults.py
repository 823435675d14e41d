"""Backend `swanlab` with the real SDK against a server that fails: nothing is missing, nothing is there twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.faults import Fault, Rule
from servers.process import ServerProcess
from support.batches import batch, item, metrics
from support.seeds import seeded
from support.swanlab_bench import SwanlabBench
from verl_shipper.backends import swanlab_run
from verl_shipper.backends.base import Batch, Delivered, Outcome, Park, Reject, Retry
from verl_shipper.backends.swanlab import SwanlabBackend
from verl_shipper_spool.record import RecordKind

METRICS = "POST /api/house/metrics$"
ROWS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("swanlab_server", tmp_path_factory.mktemp("swanlab")) as made:
        yield made


@pytest.fixture
def swanlab(server: ServerProcess, tmp_path: Path) -> Iterator[SwanlabBench]:
    server.rules()
    server.options(api_key=None, lag_s=0)
    made = SwanlabBench(server, tmp_path)
    yield made
    server.rules()
    made.close()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[SwanlabBench]:
    """With a server of its own, to be killed and started again."""
    with ServerProcess("swanlab_server", tmp_path / "server") as server:
        made = SwanlabBench(server, tmp_path)
        yield made
        made.close()


def rows(swanlab: SwanlabBench, part: int = 0) -> Batch:
    """Numbers and a table and a text; parts follow each other."""
    first = part * ROWS
    table = {"columns": ["a"], "rows": [[str(part)]]}
    return batch(
        *(metrics(step, {"n": step, "half": step / 2}) for step in range(first, first + ROWS)),
        item(RecordKind.GENERATIONS, table, ordinal=10_000 + part, step=first),
        item(RecordKind.TEXT, {"note": f"part {part}"}, ordinal=20_000 + part, step=first),
        run=swanlab.run,
    )


def assert_all_there_once(swanlab: SwanlabBench, parts: int = 1) -> None:
    expected = range(parts * ROWS)
    assert swanlab.points("n") == [(step, step) for step in expected]
    assert swanlab.points("half") == [(step, step / 2) for step in expected]
    assert swanlab.media("note") == [(part * ROWS, [f"part {part}".encode()]) for part in range(parts)]
    assert [step for step, _ in swanlab.media("val/generations")] == [part * ROWS for part in range(parts)]
    assert swanlab.at_server()["doubles"] == 0


@pytest.mark.parametrize(
    "rule",
    [
        Rule(Fault.ERROR, path=METRICS, times=3),
        Rule(Fault.BUSY, path="/api/", times=3),
        Rule(Fault.TIMEOUT, path=METRICS, times=1, retry_after_s=0.5),
        Rule(Fault.LOST, path=METRICS, each=2),
        Rule(Fault.SWALLOW, path=METRICS, each=2),
        Rule(Fault.RESET, path=METRICS, times=2),
        Rule(Fault.LOST, path="POST /api/", each=1),
        Rule(Fault.ERROR, path="PUT /objects", times=2),
        Rule(Fault.FORBIDDEN, path="PUT /objects", times=2),
        Rule(Fault.RESET, path="presigned", times=1),
        Rule(Fault.SLOW, path=METRICS, slow_s=1.0, times=2),
    ],
    ids=lambda rule: f"{rule.fault.value}-{rule.path.replace('/', '_')}",
)
def test_whatever_the_server_answers_everything_arrives_once(swanlab: SwanlabBench, rule: Rule) -> None:
    with swanlab.server.failing(rule):
        swanlab.deliver(swanlab.backend(), rows(swanlab))
        assert any(request["fault"] == rule.fault.value for request in swanlab.server.requests())
    assert_all_there_once(swanlab)


def test_inside_retry_after_no_request_is_sent(swanlab: SwanlabBench) -> None:
    backend = swanlab.backend()
    swanlab.deliver(backend, rows(swanlab))
    seen: list[Outcome] = []
    with swanlab.server.failing(Rule(Fault.RATE_LIMIT, path=METRICS, times=3, retry_after_s=2)):
        before = len(swanlab.server.requests())
        swanlab.deliver(backend, rows(swanlab, 1), seen=seen)
        requests = swanlab.server.requests()[before:]
    limited = [request for request in requests if request["fault"] == "rate_limit"]
    assert len(limited) == 3
    for each in limited:
        later = [request["time_s"] for request in requests if request["time_s"] > each["time_s"]]
        assert min(later) >= each["time_s"] + 1.95
    assert any(isinstance(outcome, Retry) and (outcome.after_s or 0) > 1 for outcome in seen)
    assert_all_there_once(swanlab, 2)


def test_a_refused_key_parks_until_the_key_file_has_a_good_one(swanlab: SwanlabBench) -> None:
    backend = swanlab.backend()
    swanlab.deliver(backend, rows(swanlab))
    swanlab.server.options(api_key="newkeynewkeynewkeyne1")
    outcome = backend.upload(rows(swanlab, 1))
    assert isinstance(outcome, Park)
    assert "key refused" in outcome.reason
    second = backend.upload(rows(swanlab, 1))
    assert isinstance(second, Park)
    assert str(swanlab.key_file) in second.reason

    swanlab.put_key("newkeynewkeynewkeyne1")
    swanlab.deliver(backend, rows(swanlab, 1))
    assert_all_there_once(swanlab, 2)


def test_a_run_deleted_while_it_is_written_parks(mortal: SwanlabBench) -> None:
    backend = mortal.backend()
    mortal.deliver(backend, rows(mortal))
    path = mortal.server.folder / "journal.jsonl"
    kept = path.read_bytes()
    mortal.server.kill()
    path.write_bytes(b"".join(line for line in kept.splitlines(True) if mortal.cuid.encode() not in line))
    mortal.server.start()
    outcome: Any = backend.upload(rows(mortal, 1))
    assert isinstance(outcome, Park), outcome
    assert isinstance(backend.upload(rows(mortal, 1)), Park)

    mortal.server.kill()
    path.write_bytes(kept)
    mortal.server.start()
    mortal.deliver(backend, rows(mortal, 1))
    assert_all_there_once(mortal, 2)


def test_a_server_that_hangs_and_one_that_is_killed_and_started_again(mortal: SwanlabBench) -> None:
    backend = mortal.backend()
    mortal.server.rules(Rule(Fault.HANG, path=METRICS))
    healed = threading.Timer(4, mortal.server.rules)
    healed.start()
    mortal.deliver(backend, rows(mortal))
    healed.join()

    mortal.server.kill()
    back = threading.Timer(5, mortal.server.start)
    back.start()
    mortal.deliver(backend, rows(mortal, 1))
    back.join()
    assert_all_there_once(mortal, 2)


def test_counts_that_lag_behind_delay_delivery_and_double_nothing(swanlab: SwanlabBench) -> None:
    swanlab.server.options(lag_s=1.0)
    backend = swanlab.backend(settle_s=1.5)
    began_s = time.monotonic()
    swanlab.deliver(backend, rows(swanlab))
    assert time.monotonic() - began_s > 1.0
    with swanlab.server.failing(Rule(Fault.LOST, path=METRICS, each=1)):
        swanlab.deliver(backend, rows(swanlab, 1))
    # The child dies with the answer; the rows are there and not shown yet.
    third = rows(swanlab, 2)
    killer = threading.Timer(0.9, os.kill, (swanlab.child_pid(backend), signal.SIGKILL))
    killer.start()
    swanlab.deliver(backend, third)
    killer.join()
    backend.close()
    swanlab.deliver(swanlab.backend(settle_s=1.5), rows(swanlab, 3))
    assert_all_there_once(swanlab, 4)


def kill_child_after(backend: SwanlabBackend, wait_s: float, stop: threading.Event) -> None:
    stop.wait(wait_s)
    run = backend._run
    child = run._child if run is not None else None
    if child is not None:
        os.kill(child.pid, signal.SIGKILL)


def test_children_and_lanes_killed_anywhere_lose_and_double_nothing(swanlab: SwanlabBench) -> None:
    rng = seeded("test_children_and_lanes_killed_anywhere_lose_and_double_nothing")
    backend = swanlab.backend()
    parts = 6
    for part in range(parts):
        sent = rows(swanlab, part)
        if backend._run is not None and backend._run._child is not None:
            os.kill(backend._run._child.pid, signal.SIGKILL)  # between batches
        for _ in range(rng.randrange(2)):
            stop = threading.Event()
            killer = threading.Thread(target=kill_child_after, args=(backend, rng.uniform(0, 2.5), stop))
            killer.start()
            outcome = backend.upload(sent)
            stop.set()
            killer.join()
            print(part, outcome if not isinstance(outcome, Delivered) else "delivered, not remembered")
            if rng.random() < 0.5:
                backend.close()  # the lane dies, too
                backend = swanlab.backend()
        swanlab.deliver(backend, sent)
    assert_all_there_once(swanlab, parts)


def test_a_post_too_large_is_halved(swanlab: SwanlabBench) -> None:
    with swanlab.server.failing(Rule(Fault.TOO_LARGE, path=METRICS, above_bytes=2000)):
        swanlab.deliver(swanlab.backend(), rows(swanlab))
    assert_all_there_once(swanlab)


def test_poison_beside_lost_answers_costs_the_poison_only(swanlab: SwanlabBench) -> None:
    backend = swanlab.backend()
    good = rows(swanlab)
    bad = metrics(99, {"poison": 1}, step=5)
    poisoned = Batch("poisoned", swanlab.run, (*good.items, bad))
    rules = (
        Rule(Fault.BAD, path=METRICS, contains="poison"),
        Rule(Fault.SWALLOW, path=METRICS, times=4),
    )
    with swanlab.server.failing(*rules):
        outcome = backend.upload(poisoned)
        while isinstance(outcome, Retry):
            print(outcome)
            outcome = backend.upload(poisoned)
        assert isinstance(outcome, Reject), outcome
        assert outcome.items == [len(good.items)]
        swanlab.deliver(backend, Batch("poisoned.1", swanlab.run, good.items))
    assert_all_there_once(swanlab)


def test_a_file_that_the_store_refuses_costs_its_own_record(swanlab: SwanlabBench) -> None:
    backend = swanlab.backend()
    sent = rows(swanlab)
    with swanlab.server.failing(Rule(Fault.TOO_LARGE, path="PUT /objects.*/text/")):
        outcome = backend.upload(sent)
        assert isinstance(outcome, Reject), outcome
        assert outcome.items == [ROWS + 1]
        assert "413" in outcome.reason
        swanlab.deliver(backend, Batch(f"{sent.batch_id}.1", swanlab.run, sent.items[:-1]))
    assert [step for step, _ in swanlab.points("n")] == list(range(ROWS))
    assert "note" not in swanlab.at_server()["media"]


def test_the_end_of_a_run_is_sent_again_until_the_server_has_it(swanlab: SwanlabBench) -> None:
    backend = swanlab.backend()
    swanlab.deliver(backend, rows(swanlab))
    end = batch(item(RecordKind.RUN_FINISH, {"exit_code": 0}, ordinal=30_000, step=None), run=swanlab.run)
    rules = (Rule(Fault.ERROR, path="PUT .*/state", times=2), Rule(Fault.LOST, path="PUT .*/state", times=1))
    with swanlab.server.failing(*rules):
        swanlab.deliver(backend, end)
    assert swanlab.at_server()["state"] == "FINISHED"
    assert_all_there_once(swanlab)


def test_what_the_package_never_sends_is_refused_and_not_waited_for_for_ever(
    swanlab: SwanlabBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swanlab_run, "STALL_S", 4.0)
    backend = swanlab.backend()
    from verl_shipper.backends import swanlab_points

    monkeypatch.setattr(swanlab_points, "clean", lambda name: name)
    backend._names = swanlab_points.names_of(None, None)
    sent = batch(metrics(0, {"good": 1}), metrics(1, {"__swanlab__.mine": 1}), run=swanlab.run)
    outcome = backend.upload(sent)
    assert isinstance(outcome, Retry)
    while isinstance(outcome, Retry):
        outcome = backend.upload(sent)
    assert isinstance(outcome, Reject)
    assert outcome.items == [1]
    swanlab.deliver(backend, Batch(f"{sent.batch_id}.1", swanlab.run, sent.items[:1]))
    assert swanlab.points("good") == [(0, 1)]


def test_what_was_refused_stays_refused_when_the_child_dies_before_the_rest_is_through(swanlab: SwanlabBench) -> None:
    backend = swanlab.backend()
    sent = batch(*(metrics(step, {"n": step}) for step in range(10)), item(
        RecordKind.TEXT, {"note": "hello"}, ordinal=50, step=9), run=swanlab.run)  # fmt: skip
    rules = (Rule(Fault.BAD, path=METRICS, contains='"index": 3,'), Rule(Fault.ERROR, path="presigned"))
    with swanlab.server.failing(*rules):
        outcome: Outcome = backend.upload(sent)
        assert isinstance(outcome, Retry), outcome
        assert swanlab.points("n") == [(step, step) for step in range(10) if step != 3]
        os.kill(swanlab.child_pid(backend), signal.SIGKILL)
        while isinstance(outcome, Retry):
            outcome = backend.upload(sent)
    assert isinstance(outcome, Reject), outcome
    assert outcome.items == [3]
    left = [each for each in sent.items if each.ordinal != 3]
    swanlab.deliver(backend, Batch(f"{sent.batch_id}.1", swanlab.run, tuple(left)))
    assert swanlab.points("n") == [(step, step) for step in range(10) if step != 3]
    assert swanlab.media("note") == [(9, [b"hello"])]
