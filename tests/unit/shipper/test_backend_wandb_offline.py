"""Backend `wandb` without a server: the folder it leaves is what `wandb sync` takes, whole and once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.process import ServerProcess
from support import wandb_reader
from support.batches import batch, metrics
from support.wandb_tracker import KEY, PROJECT, WandbTracker, finish, generations, start
from verl_shipper.backends.base import Delivered
from verl_shipper.backends.wandb import WandbBackend


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("wandb_server", tmp_path / "server") as made:
        yield made


@pytest.fixture
def wandb(server: ServerProcess, tmp_path: Path) -> Iterator[WandbTracker]:
    made = WandbTracker(server, tmp_path)
    yield made
    made.close()


def offline(wandb: WandbTracker) -> WandbBackend:
    return wandb.backend(mode="offline", dir=str(wandb.folder / "out"), api_key_file=None)


def folders(wandb: WandbTracker) -> list[Path]:
    return sorted((wandb.folder / "out" / "wandb").glob("offline-run-*"))


def sync(wandb: WandbTracker, folder: Path) -> None:
    """What a person would type on a machine with internet."""
    environment = {
        **os.environ,
        "WANDB_BASE_URL": wandb.server.url,
        "WANDB_API_KEY": KEY,
        "WANDB_ENTITY": wandb_reader.ENTITY,
        "WANDB_ERROR_REPORTING": "false",
        **{f"WANDB_{name}_DIR": str(wandb.folder / "sync") for name in ("CACHE", "CONFIG", "DATA")},
    }
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", str(folder)],
        env=environment,
        cwd=wandb.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_folder_of_a_run_is_synced_to_the_very_same_run(wandb: WandbTracker) -> None:
    backend = offline(wandb)
    assert backend.open() is None
    wandb.deliver(backend, batch(start(lr=0.5), *[metrics(n) for n in range(20)], run=wandb.run))
    wandb.deliver(backend, batch(generations(20, [["q", "a", 1]], step=20), finish(21), run=wandb.run))
    assert wandb.server.requests() == []

    (folder,) = folders(wandb)
    sync(wandb, folder)

    run = wandb.at_server()
    assert (run["state"], run["config"]["lr"]) == ("finished", 0.5)
    assert wandb.values("n") == [(n, n) for n in range(20)]
    assert [row["_step"] for row in wandb.rows()] == list(range(21))
    assert wandb_reader.tables(wandb.server, PROJECT, wandb.run.run_id, "val/generations")[0][1] == [["q", "a", 1]]


def test_the_last_batch_again_makes_no_second_folder(wandb: WandbTracker) -> None:
    sent = batch(start(), metrics(1), finish(2), run=wandb.run)
    assert isinstance(offline(wandb).upload(sent), Delivered)  # its commit is lost
    wandb.close()
    wandb.deliver(offline(wandb), sent)
    assert len(folders(wandb)) == 1


@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_folder_torn_by_a_kill_is_written_anew(wandb: WandbTracker, is_replayed: bool) -> None:
    first = offline(wandb)
    sent = batch(start(lr=0.5), *[metrics(n) for n in range(500)], run=wandb.run)
    outcome = first.upload(sent)
    assert isinstance(outcome, Delivered)
    if not is_replayed:
        wandb.memory.remember(outcome.remember)
    child: Any = first._offline
    child._child.end()
    first.close()

    second = offline(wandb)
    if is_replayed:
        wandb.deliver(second, sent)
    wandb.deliver(second, batch(metrics(500), finish(501, exit_code=None), run=wandb.run))

    (folder,) = folders(wandb)
    sync(wandb, folder)
    assert wandb.values("n") == [(n, n) for n in range(501)]
    assert wandb.at_server()["state"] == "failed"
    assert not list((wandb.folder / "work").rglob("rows.log"))
