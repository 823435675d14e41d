"""Shipped files at MLflow: streamed, under one path, and kept when they are refused."""

from __future__ import annotations

import io
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from support.batches import batch, item, metrics
from support.fault_http import FaultServer, Mode
from support.memory import FakeMemory
from support.mlflow_trackers import TestTracker, delivered, empty_database, origin, own_environment, tracker
from verl_shipper.backends import mlflow_files
from verl_shipper.backends.base import Batch, Delivered, Item, Reject, Retry
from verl_shipper.backends.mlflow import MlflowBackend
from verl_shipper_spool.file_parts import PART_BYTES, PROFILE, parts_of
from verl_shipper_spool.record import RecordKind

__all__ = ["empty_database", "origin", "own_environment", "tracker"]  # fixtures
pytestmark = pytest.mark.filterwarnings("ignore")
CONTENT = os.urandom(2 * PART_BYTES + 100)
NAME = "actor_step4.json.gz"
PATH = f"profiles/step_4/{NAME}"


def parts(content: bytes = CONTENT, name: str = NAME, first: int = 10) -> list[Item]:
    made = parts_of(io.BytesIO(content), name, PROFILE)
    return [item(RecordKind.FILE, body, ordinal=first + place, step=4) for place, body in enumerate(made)]


def opened(tracker: TestTracker, folder: Path, memory: FakeMemory | None = None, **settings: Any) -> MlflowBackend:
    return tracker.opened(memory, work_dir=str(folder / "work"), **settings)


def content_of(tracker: TestTracker, folder: Path, path: str = PATH) -> bytes:
    run_id = tracker.run().info.run_id
    return Path(tracker.client.download_artifacts(run_id, path, str(folder))).read_bytes()


def test_a_file_is_an_artifact_beside_metrics_and_end(tracker: TestTracker, tmp_path: Path) -> None:
    backend = opened(tracker, tmp_path)
    end = item(RecordKind.RUN_FINISH, {"exit_code": 0}, ordinal=30, step=None)
    delivered(backend, batch(metrics(1), *parts(), metrics(2), end, run=backend.run))
    assert tracker.artifacts("profiles") == [PATH]
    assert content_of(tracker, tmp_path) == CONTENT
    assert tracker.points("n") == [(1, 1.0), (2, 2.0)]
    assert tracker.run().info.status == "FINISHED"
    left = [path.suffix for path in (tmp_path / "work").rglob("*") if not path.is_dir()]
    assert left == [".done"]


def test_the_same_name_by_another_writer_has_a_path_of_its_own_for_ever(tracker: TestTracker, tmp_path: Path) -> None:
    memory = FakeMemory()
    first, second = parts(b"one"), parts(b"two", first=20)
    for sent in (first, second, first, second):
        backend = opened(tracker, tmp_path, memory)
        delivered(backend, Batch(f"b{sent[0].ordinal}", backend.run, tuple(sent)), memory)
    found = tracker.artifacts("profiles")
    assert len(found) == 2
    assert {content_of(tracker, tmp_path, path) for path in found} == {b"one", b"two"}


def test_what_a_server_refuses_is_kept_and_arrives_when_it_is_retried(
    tracker: TestTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tracker, tmp_path)

    def refuse(*_: object) -> None:
        raise ValueError("the store takes no such file")

    sent = batch(metrics(1), *parts(), metrics(2), run=backend.run)
    with monkeypatch.context() as patch:
        patch.setattr(mlflow_files.Files, "_put", refuse)
        outcome = backend.upload(sent)
    assert isinstance(outcome, Reject)
    assert outcome.items == [3]
    rest = tuple(each for each in sent.items if each is not sent.items[3])
    delivered(backend, Batch(f"{sent.batch_id}.r", backend.run, rest))
    delivered(opened(tracker, tmp_path), Batch("letter-1", backend.run, (sent.items[3],)))
    assert content_of(tracker, tmp_path) == CONTENT
    assert tracker.points("n") == [(1, 1.0), (2, 2.0)]


def test_a_large_file_is_never_in_memory_as_a_whole(tracker: TestTracker, tmp_path: Path) -> None:
    backend = opened(tracker, tmp_path)
    delivered(backend, batch(metrics(1), run=backend.run))  # all that is loaded late
    content = os.urandom(40 * PART_BYTES)
    *most, last = parts(content)
    for each in most:
        delivered(backend, batch(each, run=backend.run))
    tracemalloc.start()
    try:
        delivered(backend, batch(last, run=backend.run))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 1024**2
    assert content_of(tracker, tmp_path) == content


@pytest.mark.parametrize("origin", ["http"], indirect=True, scope="session")
def test_an_upload_that_moves_says_so_and_one_that_does_not_comes_back(
    tracker: TestTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_files, "SEND_S_MIN", 1.0)
    monkeypatch.setattr(mlflow_files, "ANSWER_S", 1.0)
    with FaultServer(tracker.uri) as way:
        backend = opened(tracker, tmp_path, tracking_uri=way.url, timeout_s=2)
        delivered(backend, batch(metrics(1), run=backend.run))
        sent = batch(*parts(), run=backend.run)
        way.mode = Mode.HANG
        began_s = time.monotonic()
        outcome = backend.upload(sent)
        assert isinstance(outcome, Retry)
        assert time.monotonic() - began_s < 20
        way.mode = Mode.SWALLOW
        assert isinstance(backend.upload(sent), Retry)
        way.mode = Mode.PASS
        assert isinstance(backend.upload(sent), Delivered)
        assert backend.busy_until_s > began_s
    assert content_of(tracker, tmp_path) == CONTENT


def test_every_block_that_goes_out_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(CONTENT)
    told: list[None] = []
    with mlflow_files.Watched(str(path), lambda: told.append(None)) as source:
        assert b"".join(iter(lambda: source.read(65536), b"")) == CONTENT
        source.seek(0)
        assert source.read() == CONTENT
    assert len(told) > 16
