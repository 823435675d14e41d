"""Backend `wandb` with the real SDK against our own server: what arrives, once, whatever happens."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.process import ServerProcess
from support.batches import batch, item, metrics, run_info
from support.memory import FakeMemory
from verl_shipper.backends.base import Batch, Delivered, RunInfo
from verl_shipper.backends.wandb import WandbBackend
from verl_shipper_spool.record import RecordKind

KEY = "k" * 40


class Wandb:
    """A server, a run of its own in it, and the backend's memory over all its lives."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.memory = FakeMemory()
        self.run: RunInfo = run_info(project="proj", run_id=f"r{uuid.uuid4().hex[:8]}")
        self.opened: list[WandbBackend] = []

    def backend(self, **settings: Any) -> WandbBackend:
        key = self.folder / "key"
        key.write_text(KEY)
        key.chmod(0o600)
        made = WandbBackend(
            self.run,
            {
                "base_url": self.server.url,
                "api_key_file": str(key),
                "work_dir": str(self.folder / "work"),
                "settle_s": 0.5,
                **settings,
            },
            self.memory,
        )
        self.opened.append(made)
        return made

    def deliver(self, backend: WandbBackend, sent: Batch) -> Delivered:
        for _ in range(5):
            outcome = backend.upload(sent)
            if isinstance(outcome, Delivered):
                self.memory.remember(outcome.remember)
                return outcome
            print(outcome)
        raise AssertionError(outcome)

    def at_server(self) -> dict[str, Any]:
        runs = self.server.state()["runs"]
        found: dict[str, Any] = runs[f"tester/proj/{self.run.run_id}"]
        return found

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.at_server()["history"]
        return rows


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("wandb_server", tmp_path_factory.mktemp("wandb")) as made:
        yield made


@pytest.fixture
def wandb(server: ServerProcess, tmp_path: Path) -> Iterator[Wandb]:
    server.rules()
    made = Wandb(server, tmp_path)
    yield made
    for backend in made.opened:
        backend.close()


def start(ordinal: int = 0, **config: Any) -> Any:
    return item(RecordKind.RUN_START, {"config": config}, ordinal=ordinal, step=None)


def test_a_whole_run_arrives_once_with_its_steps_times_tables_and_end(wandb: Wandb) -> None:
    backend = wandb.backend(group="g", tags=["a", "b"])
    assert backend.open() is None
    assert backend.watermark() == {}
    table = {
        "columns": ["input", "output", "score"],
        "rows": [["q", "a", 1.0], ["q2", "ä😀", 0]],
        "part": 0,
        "parts": 1,
    }
    wandb.deliver(
        backend,
        batch(
            start(lr=0.1, model={"layers": 3}),
            metrics(1, {"loss": 1.5, "a": {"b": 2}, "kl": math.nan}, step=10),
            item(RecordKind.GENERATIONS, table, ordinal=2, step=10),
            item(RecordKind.TEXT, {"note": "<hello>"}, ordinal=3, step=11),
            metrics(4, {"late": 1}, step=3),
            run=wandb.run,
        ),
    )
    run = wandb.at_server()
    assert run["state"] == "running"
    wandb.deliver(
        backend,
        batch(item(RecordKind.RUN_FINISH, {"exit_code": 0, "reason": ""}, ordinal=5, step=None), run=wandb.run),
    )
    run = wandb.at_server()
    assert run["state"] == "finished"
    assert run["config"]["lr"] == 0.1
    assert [row["_step"] for row in run["history"]] == [0, 1, 2, 3]
    assert [row["trainer/global_step"] for row in run["history"]] == [10, 10, 11, 3]
    assert run["history"][0]["a/b"] == 2
    assert run["conflicts"] == run["rewrites"] == run["gaps"] == 0
