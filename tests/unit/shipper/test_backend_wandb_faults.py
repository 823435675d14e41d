"""What a sick wandb server, a killed child and a second daemon make of a run: nothing missing, nothing twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers.faults import Fault, Rule
from servers.process import ServerProcess
from support import wandb_reader
from support.batches import batch, metrics
from support.seeds import seeded
from support.wandb_tracker import KEY, PROJECT, WandbTracker, finish, generations, kill_child, start
from verl_shipper.backends.base import Batch, Delivered, Item, Outcome, Park, Retry
from verl_shipper.backends.wandb import WandbBackend

STREAM = "file_stream"
ROWS = 40


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("wandb_server", tmp_path / "server") as made:
        yield made


@pytest.fixture
def wandb(server: ServerProcess, tmp_path: Path) -> Iterator[WandbTracker]:
    made = WandbTracker(server, tmp_path)
    yield made
    made.close()


def rows(first: int, count: int = ROWS) -> list[Item]:
    return [metrics(n) for n in range(first, first + count)]


def upload(backend: WandbBackend, sent: Batch, outcomes: list[Outcome]) -> None:
    outcomes.append(backend.upload(sent))


@pytest.mark.parametrize(
    "rule",
    [
        Rule(Fault.RESET, STREAM, times=3),
        Rule(Fault.REFUSED, STREAM, times=1),
        Rule(Fault.BAD, STREAM, times=1),
        Rule(Fault.RATE_LIMIT, "graphql", times=3, retry_after_s=1),
        Rule(Fault.FORBIDDEN, "PUT", times=1),
    ],
    ids=lambda rule: f"{rule.fault.value}-{rule.path}",
)
def test_what_the_sdk_takes_for_final_costs_and_doubles_nothing(wandb: WandbTracker, rule: Rule) -> None:
    backend = wandb.backend()
    wandb.deliver(backend, batch(start(), *rows(0, 5), run=wandb.run))
    wandb.server.rules(rule)
    table = generations(900, [["q", "a", 1]], step=3)
    wandb.deliver(backend, batch(*rows(5), table, run=wandb.run), timeout_s=120)
    wandb.server.rules()
    wandb.deliver(backend, batch(finish(901), run=wandb.run))
    assert wandb.values("n") == [(n, n) for n in range(5 + ROWS)]
    assert [rows for _, rows in wandb_reader.tables(wandb.server, PROJECT, wandb.run.run_id, "val/generations")] == [
        [["q", "a", 1]]
    ]
    assert wandb.at_server()["state"] == "finished"
    wandb.assert_clean()


def test_a_count_that_lags_overwrites_nothing(wandb: WandbTracker) -> None:
    wandb.server.options(lag_s=1.0)
    sent = [batch(start(), *rows(0), run=wandb.run), batch(*rows(ROWS), run=wandb.run)]
    for each in sent:
        backend = wandb.backend(settle_s=2.0)
        done = threading.Thread(target=backend.upload, args=(each,))
        done.start()
        time.sleep(4)
        kill_child(backend)
        done.join()
        backend.close()
        wandb.deliver(wandb.backend(settle_s=2.0), each)
        wandb.close()
    assert wandb.values("n") == [(n, n) for n in range(2 * ROWS)]
    wandb.assert_clean()


def test_children_killed_at_random_lose_and_double_nothing(wandb: WandbTracker) -> None:
    draw = seeded("wandb children")
    wandb.server.options(lag_s=0.3)
    for number in range(3):
        sent = batch(
            *rows(number * ROWS), generations(900 + number, [["q", f"{number}", 1]], step=number), run=wandb.run
        )
        for _ in range(draw.randint(0, 2)):
            backend = wandb.backend(settle_s=0.8)
            outcomes: list[Outcome] = []
            uploading = threading.Thread(target=upload, args=(backend, sent, outcomes))
            uploading.start()
            time.sleep(draw.uniform(0.3, 5.0))
            kill_child(backend)
            uploading.join()
            backend.close()
            assert isinstance(outcomes[0], Delivered | Retry | Park)
        wandb.deliver(wandb.backend(settle_s=0.8), sent)
        wandb.close()
    assert wandb.values("n") == [(n, n) for n in range(3 * ROWS)]
    tables = wandb_reader.tables(wandb.server, PROJECT, wandb.run.run_id, "val/generations")
    assert [rows for _, rows in tables] == [[["q", f"{number}", 1]] for number in range(3)]
    wandb.assert_clean()


def test_a_refused_key_parks_until_the_file_holds_another(wandb: WandbTracker) -> None:
    backend = wandb.backend()
    wandb.deliver(backend, batch(start(), *rows(0, 5), run=wandb.run))
    wandb.server.options(api_key="n" * 40)
    sent = batch(*rows(5), run=wandb.run)
    outcome = backend.upload(sent)
    assert isinstance(outcome, Park)
    assert str(wandb.key) in outcome.reason
    assert KEY not in outcome.reason
    wandb.write_key("n" * 40)
    wandb.deliver(backend, sent)
    assert wandb.values("n") == [(n, n) for n in range(5 + ROWS)]
    wandb.assert_clean()


def test_a_server_that_answers_only_what_the_sdk_asks_will_do(wandb: WandbTracker) -> None:
    wandb.server.options(offers_questions=False)
    first = wandb.backend()
    wandb.deliver(first, batch(start(lr=1), *rows(0, 5), run=wandb.run))
    sent = batch(*rows(5), generations(900, [["q", "a", 1]], step=3), run=wandb.run)
    assert isinstance(first.upload(sent), Delivered)  # its commit is lost
    first.close()
    second = wandb.backend()
    wandb.deliver(second, sent)
    wandb.deliver(second, batch(finish(901), run=wandb.run))
    assert wandb.values("n") == [(n, n) for n in range(5 + ROWS)]
    assert len(wandb.rows()) == 6 + ROWS
    assert wandb.at_server()["state"] == "finished"
    wandb.assert_clean()


def test_two_daemons_write_one_run_in_turns(server: ServerProcess, tmp_path: Path) -> None:
    sides = [WandbTracker(server, tmp_path / name, run_id="shared") for name in ("a", "b")]
    for side in sides:
        side.folder.mkdir(exist_ok=True)

    def write(side: WandbTracker, stream_id: str) -> None:
        backend = side.backend()
        for number in range(3):
            items = [metrics(number * 10 + n, stream_id=stream_id) for n in range(10)]
            side.deliver(backend, batch(*items, run=side.run), timeout_s=120)

    threads = [threading.Thread(target=write, args=(side, digit * 32)) for side, digit in zip(sides, "56", strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for side in sides:
        side.close()
    assert sorted(sides[0].values("n")) == sorted([(n, n) for n in range(30)] * 2)
    assert sides[0].at_server()["created"] == 1
    sides[0].assert_clean()
