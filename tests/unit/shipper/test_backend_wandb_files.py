"""Shipped files at W&B: delivered when committed, and a file that fails costs the run neither a row nor its end."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.faults import Fault, Rule
from servers.process import ServerProcess
from support.batches import batch, item, metrics
from support.wandb_reader import ENTITY
from support.wandb_tracker import KEY, PROJECT, WandbTracker, finish, kill_child, start
from verl_shipper.backends import wandb_files
from verl_shipper.backends.base import Batch, Delivered, Item, Outcome, Park, Reject, Retry
from verl_shipper.backends.wandb import WandbBackend
from verl_shipper.backends.wandb_files import TRIES, artifact_name
from verl_shipper_spool.file_parts import PART_BYTES, PROFILE, parts_of
from verl_shipper_spool.record import RecordKind

CONTENT = os.urandom(PART_BYTES + 100)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("wandb_server", tmp_path_factory.mktemp("wandb") / "server") as made:
        yield made


@pytest.fixture
def wandb(server: ServerProcess, tmp_path: Path) -> Iterator[WandbTracker]:
    made = WandbTracker(server, tmp_path)
    yield made
    server.rules()
    made.close()


def parts(content: bytes = CONTENT, name: str = "t_step4.json.gz", first: int = 10, step: int = 4) -> list[Item]:
    made = parts_of(io.BytesIO(content), name, PROFILE)
    return [item(RecordKind.FILE, body, ordinal=first + place, step=step) for place, body in enumerate(made)]


def artifacts(wandb: WandbTracker) -> list[dict[str, Any]]:
    """Those that count: what a try that failed leaves behind stays pending, and W&B shows none of it."""
    run = f"{ENTITY}/{PROJECT}/{wandb.run.run_id}"
    return [each for each in wandb.server.state()["artifacts"] if each["run"] == run and each["state"] == "COMMITTED"]


def until_decided(backend: WandbBackend, sent: Batch, timeout_s: float = 120.0) -> Outcome:
    deadline_s = time.monotonic() + timeout_s
    while isinstance(outcome := backend.upload(sent), Retry):
        assert time.monotonic() < deadline_s, outcome
        time.sleep(0.2)
    return outcome


def test_an_artifact_tells_type_step_and_where_from(wandb: WandbTracker) -> None:
    begin = item(RecordKind.RUN_START, {"config": {}, "node": "gpu-7"}, step=None)
    backend = wandb.backend()
    wandb.deliver(backend, batch(begin, metrics(1), run=wandb.run))
    wandb.deliver(backend, batch(*parts(), run=wandb.run))
    (told,) = artifacts(wandb)
    assert (told["type"], told["state"]) == ("profile", "COMMITTED")
    assert told["name"] == f"{wandb.run.run_id}-t_step4.json.gz"
    assert told["aliases"] == ["latest", "step-4"]
    assert told["files"] == ["t_step4.pt.trace.json.gz"]
    assert {key: told["metadata"][key] for key in ("step", "rank", "node", "name")} == {
        "step": 4,
        "rank": 0,
        "node": "gpu-7",
        "name": "t_step4.json.gz",
    }
    assert [row["n"] for row in wandb.rows()] == [1]


def test_a_name_again_is_the_next_version_and_the_same_content_the_same(wandb: WandbTracker) -> None:
    backend = wandb.backend()
    wandb.deliver(backend, batch(start(), run=wandb.run))
    for first, content, step in ((10, b"one", 1), (20, b"two", 2), (30, b"two", 3)):
        wandb.deliver(backend, batch(*parts(content, first=first, step=step), run=wandb.run))
    assert [each["aliases"] for each in artifacts(wandb)] == [["step-1"], ["latest", "step-2", "step-3"]]


def test_names_fit_whatever_they_are() -> None:
    for name in ("x" * 300 + ".json.gz", "奖励/t.json", "a/b", "a-b", ""):
        found = artifact_name("r" * 64, name or "file")
        assert len(found) <= 128
        assert set(found) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
    assert artifact_name("r", "a/b") != artifact_name("r", "a_b")


@pytest.mark.parametrize(
    "rule",
    [
        Rule(Fault.LOST, "PUT /storage/artifacts", times=1),
        Rule(Fault.SWALLOW, contains="CommitArtifact", times=1),
        Rule(Fault.LOST, contains="CreateArtifact", times=2),
        Rule(Fault.ERROR, "PUT /storage/artifacts", times=2),
        Rule(Fault.BUSY, contains="CreateArtifactManifest", times=1),
    ],
    ids=lambda rule: f"{rule.fault.value}-{rule.path or rule.contains}".replace("/", "_"),
)
def test_faults_on_the_way_send_a_file_once(wandb: WandbTracker, rule: Rule) -> None:
    backend = wandb.backend()
    wandb.deliver(backend, batch(start(), metrics(1), run=wandb.run))
    wandb.server.rules(rule)
    wandb.deliver(backend, batch(*parts(), metrics(2), run=wandb.run), timeout_s=120)
    assert len(artifacts(wandb)) == 1
    assert [row["n"] for row in wandb.rows()] == [1, 2]


@pytest.mark.parametrize("fault", [Fault.FORBIDDEN, Fault.HANG])
def test_a_file_that_fails_for_good_is_refused_and_rows_and_end_go_on(
    wandb: WandbTracker, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_files, "TRY_S", 3.0)
    backend = wandb.backend()
    wandb.deliver(backend, batch(start(), metrics(1), run=wandb.run))
    wandb.server.rules(Rule(fault, "PUT /storage/artifacts"))
    sent = batch(metrics(2), *parts(), metrics(20), run=wandb.run)
    began_s = time.monotonic()
    outcome = until_decided(backend, sent)
    assert isinstance(outcome, Reject)
    assert outcome.items == [2]
    assert f"in {TRIES} tries" in outcome.reason
    assert time.monotonic() - began_s < 60
    assert [row["n"] for row in wandb.rows()] == [1, 2, 20]  # they did not wait for it

    rest = Batch(f"{sent.batch_id}.r", sent.run, tuple(each for each in sent.items if each is not sent.items[2]))
    wandb.deliver(backend, rest)
    wandb.deliver(backend, batch(metrics(30), finish(31), run=wandb.run))
    assert [row["n"] for row in wandb.rows()] == [1, 2, 20, 30]
    assert wandb.at_server()["state"] == "finished"
    wandb.assert_clean()

    wandb.server.rules()  # an operator has the letter sent again
    wandb.deliver(backend, Batch("letter-1", sent.run, (sent.items[2],)))
    assert len(artifacts(wandb)) == 1
    assert wandb.at_server()["state"] == "finished"


def test_an_outage_of_the_whole_server_is_no_try(wandb: WandbTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_files, "TRY_S", 1.0)
    backend = wandb.backend()
    wandb.deliver(backend, batch(start(), run=wandb.run))
    wandb.server.rules(Rule(Fault.RESET))
    sent = batch(*parts(), run=wandb.run)
    for _ in range(TRIES + 2):
        assert isinstance(backend.upload(sent), Retry | Park)
    wandb.server.rules()
    wandb.deliver(backend, sent)
    assert len(artifacts(wandb)) == 1


def test_a_child_killed_while_a_file_goes_up_is_no_try(wandb: WandbTracker) -> None:
    backend = wandb.backend()
    wandb.deliver(backend, batch(start(), run=wandb.run))
    sent = batch(metrics(1), *parts(), run=wandb.run)
    real = wandb_files.Files._put
    kills = [TRIES + 1]

    def killed(*arguments: Any) -> str:
        if kills[0]:
            kills[0] -= 1
            kill_child(backend)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wandb_files.Files, "_put", killed)
        assert isinstance(until_decided(backend, sent), Delivered)
    assert len(artifacts(wandb)) == 1
    assert [row["n"] for row in wandb.rows()] == [1]


def test_an_offline_folder_is_synced_with_its_files_whatever_died(wandb: WandbTracker) -> None:
    out = wandb.folder / "off"

    def fresh() -> WandbBackend:
        return wandb.backend(mode="offline", dir=str(out))

    first, last = parts()
    sent = [
        batch(start(), metrics(1), run=wandb.run),
        batch(first, run=wandb.run),
        batch(last, metrics(20), run=wandb.run),
    ]
    backend = fresh()
    for each in sent:
        for again in (backend, fresh()):  # the commit of every batch is lost
            outcome = again.upload(each)
            assert isinstance(outcome, Delivered), outcome
        assert isinstance(outcome, Delivered)
        wandb.memory.remember(outcome.remember)
        backend.close()
        backend = fresh()
    wandb.deliver(backend, batch(finish(30), run=wandb.run))
    (folder,) = (out / "wandb").glob("offline-run-*")
    environment = os.environ | {"WANDB_BASE_URL": wandb.server.url, "WANDB_API_KEY": KEY, "WANDB_ERROR_REPORTING": "0"}
    command = [sys.executable, "-m", "wandb", "sync", str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=wandb.folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (told,) = artifacts(wandb)
    assert (told["state"], told["aliases"], told["type"]) == ("COMMITTED", ["latest", "step-4"], "profile")
    body = wandb.server.folder / "storage" / "artifacts" / told["artifact_id"] / told["files"][0]
    assert body.read_bytes() == CONTENT
    assert [row["n"] for row in wandb.rows() if "n" in row] == [1, 20]
    assert json.dumps(told["metadata"])
