"""Backend `wandb` with the real SDK against our own server: what arrives, and how it looks there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers.process import ServerProcess
from support import wandb_reader
from support.batches import TIME_NS, batch, item, metrics
from support.wandb_tracker import PROJECT, WandbTracker, finish, generations, start
from verl_shipper.backends.base import Delivered, Reject
from verl_shipper_spool.record import RecordKind


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("wandb_server", tmp_path_factory.mktemp("wandb")) as made:
        yield made


@pytest.fixture
def wandb(server: ServerProcess, tmp_path: Path) -> Iterator[WandbTracker]:
    server.rules()
    made = WandbTracker(server, tmp_path)
    yield made
    made.close()


def test_a_whole_run_arrives_once_with_its_steps_times_tables_and_end(wandb: WandbTracker) -> None:
    backend = wandb.backend(group="g", tags=["a", "b"])
    assert backend.open() is None
    assert backend.watermark() == {}
    wandb.deliver(
        backend,
        batch(
            start(lr=0.1, model={"layers": 3}, api_key="[redacted]"),
            metrics(1, {"loss": 1.5, "a": {"b": 2}, "kl": math.nan, "word": "x"}, step=10),
            generations(2, [["q", "a", 1.0], ["q2", "ä😀", 0]], step=10),
            item(RecordKind.TEXT, {"note": "<hello>"}, ordinal=3, step=11),
            metrics(4, {"late": 1}, step=3),
            run=wandb.run,
        ),
    )
    run = wandb.at_server()
    assert run["state"] == "running"
    assert run["config"]["lr"] == 0.1
    assert run["config"]["model"] == {"layers": 3}
    assert (run["display_name"], run["group"], run["tags"]) == ("experiment", "g", ["a", "b"])

    wandb.deliver(backend, batch(finish(5), run=wandb.run))

    run = wandb.at_server()
    assert (run["state"], run["exit_code"], run["created"]) == ("finished", 0, 1)
    rows = wandb.rows()
    assert [row["_step"] for row in rows] == [0, 1, 2, 3]
    assert [row["trainer/global_step"] for row in rows] == [10, 10, 11, 3]
    assert rows[0]["_timestamp"] == pytest.approx(TIME_NS / 1e9 + 1)
    assert rows[0]["a/b"] == 2
    assert math.isnan(rows[0]["kl"])
    assert "word" not in rows[0]
    tables = wandb_reader.tables(wandb.server, PROJECT, wandb.run.run_id, "val/generations")
    assert tables == [(1, [["q", "a", 1.0], ["q2", "ä😀", 0]])]
    page = wandb_reader.body(wandb.server, PROJECT, wandb.run.run_id, rows[2]["note"]["path"]).decode()
    assert "&lt;hello&gt;" in page
    artifacts = [each for each in wandb.server.state()["artifacts"] if wandb.run.run_id in each["run"]]
    assert [(each["type"], each["state"]) for each in artifacts] == [("run_table", "COMMITTED")]
    wandb.assert_clean()


def test_without_artifacts_a_table_is_a_file_of_the_run(wandb: WandbTracker) -> None:
    backend = wandb.backend(log_artifact=False)
    wandb.deliver(backend, batch(generations(0, [["q", "a", 1.0]], step=4), run=wandb.run))
    assert wandb_reader.tables(wandb.server, PROJECT, wandb.run.run_id, "val/generations") == [(0, [["q", "a", 1.0]])]
    assert not [each for each in wandb.server.state()["artifacts"] if wandb.run.run_id in each["run"]]


def test_the_same_batch_three_times_is_there_once(wandb: WandbTracker) -> None:
    sent = batch(*[metrics(n) for n in range(50)], generations(50, [["q", "a", 1]], step=9), run=wandb.run)
    wandb.memory.put("rows", 0)
    outcome = wandb.backend().upload(sent)  # its commit is lost
    assert isinstance(outcome, Delivered)
    again = wandb.backend()
    wandb.close()
    assert isinstance(again.upload(sent), Delivered)
    again.close()
    wandb.deliver(wandb.backend(), sent)
    assert wandb.values("n") == [(n, n) for n in range(50)]
    assert len(wandb.rows()) == 51
    wandb.assert_clean()


def test_a_run_goes_on_below_its_last_step_with_another_config(wandb: WandbTracker) -> None:
    first = wandb.backend()
    wandb.deliver(first, batch(start(lr=1), *[metrics(n) for n in range(1, 60)], run=wandb.run))
    first.close()
    second = wandb.backend()
    later = [metrics(n, stream_id="6" * 32, step=n + 40) for n in range(20)]
    wandb.deliver(second, batch(start(lr=2, text="x" * 7000), *later, finish(99), run=wandb.run))
    run = wandb.at_server()
    assert (run["state"], run["config"]["lr"], run["created"]) == ("finished", 2, 1)
    steps = [step for step, _ in wandb.values("n")]
    assert steps == [*range(1, 60), *range(40, 60)]
    wandb.assert_clean()


def test_lost_state_is_read_back_from_the_server(wandb: WandbTracker) -> None:
    first = wandb.backend()
    wandb.deliver(first, batch(*[metrics(n) for n in range(30)], run=wandb.run))
    first.close()
    wandb.memory = type(wandb.memory)()
    again = wandb.backend()
    assert again.open() is None
    assert again.watermark() == {metrics(0).stream_id: 30}


def test_rows_behind_the_end_end_the_run_again(wandb: WandbTracker) -> None:
    backend = wandb.backend()
    wandb.deliver(backend, batch(start(), metrics(1), finish(2, exit_code=3), run=wandb.run))
    assert wandb.at_server()["state"] == "failed"
    late = metrics(0, {"late": 1}, stream_id="6" * 32, rank=1)
    wandb.deliver(backend, batch(late, run=wandb.run))
    run = wandb.at_server()
    assert (run["state"], len(run["history"])) == ("failed", 2)


def test_odd_names_and_values_cost_nothing_beside_them(wandb: WandbTracker) -> None:
    names = ["timing(s)/gen", "val/pass@8", "/lead", "../up", "a//b", "奖励/均值", "val/😀", "a.b", " lead", "_step"]
    body = {**dict.fromkeys(names, 1.0), "": 4.0, "k" * 700: 1, "_shipper": 3, "inf": math.inf, "big": 2**63}
    wandb.deliver(wandb.backend(), batch(metrics(0, {**body, "ok": 1.0}, step=-1), metrics(1), run=wandb.run))
    first, second = wandb.rows()
    assert first["ok"] == 1.0
    assert first["unnamed"] == 4.0
    assert first["trainer/global_step"] == -1
    assert math.isinf(first["inf"])
    shown = {key for key in first if not key.startswith("_")}
    assert {"timing(s)/gen", "val/pass@8", "/lead", "../up", "a//b", "奖励/均值", "val/😀", " lead"} <= shown
    assert second["n"] == 1


def test_a_row_that_is_too_long_is_named_and_the_others_arrive(wandb: WandbTracker) -> None:
    long = metrics(1, {f"{n}" * 60: 0.123456789012345 for n in range(60_000)})
    outcome = wandb.backend().upload(batch(metrics(0), long, metrics(2), run=wandb.run))
    assert isinstance(outcome, Reject)
    assert outcome.items == [1]
