"""Exactly one MLflow run per run, whenever the lane dies and whoever else is at work."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest

from support.batches import batch, metrics
from support.memory import FakeMemory
from support.mlflow_trackers import TestTracker, delivered, empty_database, origin, own_environment, tracker
from verl_shipper.backends.base import Park, Retry
from verl_shipper.backends.mlflow_http import prepare_environment
from verl_shipper.backends.road import Road

__all__ = ["empty_database", "origin", "own_environment", "tracker"]  # fixtures
pytestmark = pytest.mark.filterwarnings("ignore")


class Killed(BaseException):
    """The process is gone: no code of the backend may run any more."""


class DyingMemory(FakeMemory):
    """Kills the lane when a note is about to be committed, or right after it."""

    def __init__(self, key: str, *, is_kept: bool) -> None:
        super().__init__()
        self._key = key
        self._is_kept = is_kept

    def put(self, key: str, value: Any) -> None:
        if key != self._key or self._is_kept:
            super().put(key, value)
        if key == self._key:
            self._key = ""
            raise Killed


def tagged(tracker: TestTracker, run_id: str = "run1") -> Any:
    return tracker.client.create_run(tracker.experiment_id, tags={"verl_shipper.run_id": run_id})


def test_killed_between_create_and_remember_there_is_one_run(tracker: TestTracker) -> None:
    memory = DyingMemory("run", is_kept=False)
    with pytest.raises(Killed):
        tracker.backend(memory).open()

    delivered(tracker.opened(memory), batch(metrics(0)))

    assert tracker.points("n") == [(0, 0.0)]


def test_killed_right_after_the_intent_a_server_is_given_time_and_a_database_is_not(tracker: TestTracker) -> None:
    memory = DyingMemory("intent", is_kept=True)
    with pytest.raises(Killed):
        tracker.backend(memory).open()

    outcome = tracker.backend(memory, timeout_s=15).open()

    if tracker.is_http:
        assert isinstance(outcome, Retry)
        assert outcome.after_s is not None
        assert 0 < outcome.after_s <= 15
        memory.put("intent", memory.get("intent") | {"time_ns": time.time_ns() - 16 * 10**9})
    else:
        assert outcome is None
    tracker.opened(memory)
    assert len(tracker.runs()) == 1


def test_a_request_that_arrives_after_its_sender_died_makes_the_one_run(tracker: TestTracker) -> None:
    memory = DyingMemory("intent", is_kept=True)
    with pytest.raises(Killed):
        tracker.backend(memory).open()
    late = tagged(tracker)

    tracker.opened(memory)

    assert [run.info.run_id for run in tracker.runs()] == [late.info.run_id]


def test_a_lost_answer_to_create_leaves_one_run(tracker: TestTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    real = MlflowClient.create_run

    def lost(client: Any, *args: Any, **kwargs: Any) -> None:
        real(client, *args, **kwargs)
        raise ConnectionError("Remote end closed connection without response")

    memory = FakeMemory()
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "create_run", lost)
        outcome = tracker.backend(memory).open()

    assert isinstance(outcome, Retry)
    tracker.opened(memory)
    assert len(tracker.runs()) == 1


def test_lost_lane_state_finds_the_same_run(tracker: TestTracker) -> None:
    delivered(tracker.opened(FakeMemory()), batch(metrics(0)))

    delivered(tracker.opened(FakeMemory()), batch(metrics(1)))

    assert tracker.points("n") == [(0, 0.0), (1, 1.0)]


def test_every_run_of_a_project_has_its_own(tracker: TestTracker) -> None:
    for run_id in ("run1", "run2", "run'3", 'run"4', "run1\n"):
        tracker.opened(own_id=run_id)
        tracker.opened(own_id=run_id)

    assert len(tracker.runs()) == 5


def test_of_several_runs_the_one_with_data_stays_and_empty_ghosts_go(tracker: TestTracker) -> None:
    tracker.opened(own_id="other")
    ghosts = [tagged(tracker), tagged(tracker)]
    full = tagged(tracker)
    tracker.client.log_metric(full.info.run_id, "n", 1.0, step=5)

    delivered(tracker.opened(), batch(metrics(6)))

    kept = {run.info.run_id for run in tracker.runs()}
    assert full.info.run_id in kept
    assert kept.isdisjoint(ghost.info.run_id for ghost in ghosts)
    assert len(kept) == 2
    assert tracker.client.get_run(full.info.run_id).data.metrics == {"n": 6.0}


def test_a_run_that_somebody_put_aside_as_a_ghost_is_looked_for_again(tracker: TestTracker) -> None:
    memory = FakeMemory()
    backend = tracker.opened(memory)
    tracker.client.delete_run(tracker.run().info.run_id)
    other = tagged(tracker)

    assert isinstance(backend.upload(batch(metrics(0))), Park)
    delivered(backend, batch(metrics(0)))

    assert tracker.run().info.run_id == other.info.run_id
    assert tracker.points("n") == [(0, 0.0)]


def test_a_deleted_run_parks_until_it_is_restored(tracker: TestTracker) -> None:
    memory = FakeMemory()
    backend = tracker.opened(memory)
    run_id = tracker.run().info.run_id
    tracker.client.delete_run(run_id)

    outcomes = [backend.upload(batch(metrics(0))), backend.upload(batch(metrics(0))), tracker.backend(memory).open()]

    assert all(isinstance(outcome, Park) for outcome in outcomes), outcomes
    tracker.client.restore_run(run_id)
    delivered(backend, batch(metrics(0)))
    assert tracker.points("n") == [(0, 0.0)]


def test_a_deleted_experiment_parks(tracker: TestTracker) -> None:
    tracker.opened()
    tracker.client.delete_experiment(tracker.experiment_id)

    outcome = tracker.backend(FakeMemory()).open()

    assert isinstance(outcome, Park)
    assert tracker.project in outcome.reason


@pytest.mark.parametrize("is_setting", [True, False])
def test_the_operator_may_name_the_run(tracker: TestTracker, is_setting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker.opened(own_id="other")
    given = tracker.client.create_run(tracker.experiment_id).info.run_id
    settings = {"run_id": given} if is_setting else {}
    if not is_setting:
        monkeypatch.setenv("MLFLOW_RUN_ID", given)

    delivered(tracker.opened(**settings), batch(metrics(0)))

    assert len(tracker.runs()) == 2
    assert tracker.client.get_run(given).data.metrics == {"n": 0.0}


def test_a_named_run_that_does_not_exist_parks(tracker: TestTracker) -> None:
    outcome = tracker.backend(run_id="0" * 32).open()

    assert isinstance(outcome, Park)
    assert "give another run_id" in outcome.reason


def test_another_tracker_is_not_confused_with_the_remembered_one(tracker: TestTracker) -> None:
    memory = FakeMemory()
    memory.put("run", {"key": "of another tracking URI", "run_id": "0" * 32})

    delivered(tracker.opened(memory), batch(metrics(0)))

    assert tracker.points("n") == [(0, 0.0)]


def test_a_lane_that_is_looking_for_the_same_run_is_waited_for(tracker: TestTracker, tmp_path: Path) -> None:
    locks = tmp_path / "locks"
    tracker.opened(lock_dir=str(locks))
    (path,) = locks.iterdir()

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        outcome = tracker.backend(FakeMemory(), lock_dir=str(locks)).open()

    assert isinstance(outcome, Retry)
    assert tracker.backend(FakeMemory(), lock_dir=str(locks)).open() is None
    assert len(tracker.runs()) == 1


@pytest.mark.parametrize("name", ["", "a/b 'c'", "x" * 600, "nul\0", "cut \ud83d", "奖励"])
def test_any_project_and_experiment_name_is_taken(tracker: TestTracker, name: str) -> None:
    from verl_shipper.backends.mlflow import MlflowBackend

    run = tracker.run_info()
    hostile = type(run)(f"{tracker.project}-{name}", f"{tracker.project}{name}", name, run.created_ns)

    for _restart in range(2):
        backend = MlflowBackend(hostile, {"tracking_uri": tracker.uri}, FakeMemory())
        assert backend.open() is None
        delivered(backend, batch(metrics(0), run=hostile))


def test_an_authority_given_for_all_counts_for_mlflow_too(
    own_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/some/ca.pem")
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    prepare_environment(5, None, Road("backends.mlflow").environment("https://tracker"))
    assert os.environ["REQUESTS_CA_BUNDLE"] == "/some/ca.pem"
