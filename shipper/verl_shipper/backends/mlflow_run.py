"""The run at MLflow that belongs to a run of ours: found, or created exactly once.

MLflow gives every created run a fresh id, so a lost answer would leave a ghost. Therefore:

    1  remembered id, or one that the operator gave   → use it
    2  search for the tag `verl_shipper.run_id`       → found: use it
    3  an intent of ours that is younger than a request can live: wait, the run may be about to appear
    4  note the intent, create the run with the tag, search again, remember

Of several runs the one that holds data wins, then the earliest; empty others are deleted, and whoever remembers a
deleted one searches again. A lock around 2 to 4 keeps lanes on one machine apart.

Must not know: batches. On failure: RefusedError; whatever step was reached, beginning again is right.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_shipper.backends.base import Memory, Park, Reject, Retry, RunInfo
from verl_shipper.backends.mlflow_http import Tracker
from verl_shipper.backends.mlflow_outcome import RefusedError
from verl_shipper.backends.paths import component
from verl_shipper.values import visible

RUN_TAG = "verl_shipper.run_id"
NAME_CHARS_MAX = 500
QUOTABLE = re.compile(r"[\w.\-:/@+ ]{1,500}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run's data go."""

    run_id: str
    experiment_id: str


class RunFinder:
    """Finds or creates the place of one run. `attach_id`: a run that the operator wants to be used."""

    def __init__(
        self, tracker: Tracker, run: RunInfo, memory: Memory, *, attach_id: str | None, lock_dir: str | None
    ) -> None:
        self._tracker = tracker
        self._run = run
        self._memory = memory
        self._attach_id = attach_id
        self._lock_dir = lock_dir
        self._tag = tag_value(run.run_id)
        self._key = hashlib.sha256(f"{tracker.uri}\n{run.run_id}".encode("utf-8", "surrogatepass")).hexdigest()

    def find(self) -> Place:
        """The place, remembered from now on."""
        if self._attach_id:
            place = self._active(self._attach_id)
            if place is None:
                raise RefusedError(Park(f"run {self._attach_id} is not at the tracker; give another run_id"))
            return place
        known = self._memory.get("run")
        remembered = known["run_id"] if isinstance(known, dict) and known.get("key") == self._key else None
        place = self._active(remembered) if remembered else None
        if place is not None:
            return place
        experiment_id = self._experiment_id()
        with self._lock():
            runs = self._search(experiment_id)
            if not runs and remembered:
                raise RefusedError(Park(f"run {remembered} was deleted at the tracker; restore it there"))
            if not runs:
                self._await_intent()
                self._create(experiment_id)
                runs = self._search(experiment_id)
            place = Place(self._choose(runs), experiment_id)
            self._memory.put("run", {"key": self._key, "run_id": place.run_id})
        return place

    def _active(self, run_id: str) -> Place | None:
        """The place of a run that is still there."""
        try:
            info = self._tracker.ask(self._tracker.client.get_run, run_id).info
        except RefusedError as refused:
            if refused.code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return Place(run_id, info.experiment_id) if info.lifecycle_stage == "active" else None

    def _experiment_id(self) -> str:
        name = experiment_name(self._run.project)
        client = self._tracker.client
        found = self._tracker.ask(client.get_experiment_by_name, name)
        if found is None:
            location = self._tracker.artifact_location
            folder = f"{location.rstrip('/')}/{component(name)}" if location else None
            try:
                return str(self._tracker.ask(client.create_experiment, name, artifact_location=folder))
            except RefusedError as refused:
                # Somebody else was faster. Which error says so depends on the server's database.
                found = self._tracker.ask(client.get_experiment_by_name, name)
                if found is None or not isinstance(refused.outcome, Reject):
                    raise
        if found.lifecycle_stage != "active":
            raise RefusedError(Park(f"experiment {name!r} is deleted at the tracker; restore it or delete it for good"))
        return str(found.experiment_id)

    def _search(self, experiment_id: str) -> list[Any]:
        return list(
            self._tracker.ask(
                self._tracker.client.search_runs,
                [experiment_id],
                filter_string=f"tags.`{RUN_TAG}` = '{self._tag}'",
                max_results=100,
                order_by=["attributes.start_time ASC"],
            )
        )

    def _await_intent(self) -> None:
        """A request that was under way when we died may still create its run, as long as a request can live."""
        intent = self._memory.get("intent")
        if not self._tracker.is_http or not isinstance(intent, dict) or intent.get("key") != self._key:
            return
        left_s = self._tracker.timeout_s - (time.time_ns() - intent["time_ns"]) / 1e9
        if 0 < left_s <= self._tracker.timeout_s:
            raise RefusedError(Retry("an earlier request to create the run may still be under way", left_s))

    def _create(self, experiment_id: str) -> None:
        self._memory.put("intent", {"key": self._key, "time_ns": time.time_ns()})
        self._tracker.ask(
            self._tracker.client.create_run,
            experiment_id,
            start_time=max(self._run.created_ns // 1_000_000, 1),
            tags={RUN_TAG: self._tag, "mlflow.source.name": "verl-shipper", "mlflow.source.type": "JOB"},
            run_name=visible(self._run.experiment)[:NAME_CHARS_MAX] or "unnamed",
        )

    def _choose(self, runs: list[Any]) -> str:
        if not runs:
            raise RefusedError(Retry("the run was created but cannot be found yet"))
        best, *others = sorted(runs, key=lambda run: (is_empty(run), run.info.start_time, run.info.run_id))
        for other in others:
            if is_empty(other):
                self._tracker.ask(self._tracker.client.delete_run, other.info.run_id)
        return str(best.info.run_id)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        if self._lock_dir is None:
            yield
            return
        os.makedirs(self._lock_dir, 0o700, exist_ok=True)
        path = os.path.join(self._lock_dir, f"mlflow-{self._key[:32]}.lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise RefusedError(Retry("another lane is looking for the same run", 0.5)) from error
        finally:
            os.close(fd)


def is_empty(run: Any) -> bool:
    return not run.data.metrics and not run.data.params


def tag_value(run_id: str) -> str:
    """What the tag holds: the run id, or a digest of one that a search filter cannot quote."""
    if QUOTABLE.fullmatch(run_id):
        return run_id
    return "sha256:" + hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()


def experiment_name(project: str) -> str:
    """The experiment of a project: its name, as far as MLflow takes it."""
    name = visible(project).replace("\0", "\ufffd")
    return component(name, re.compile("\0"), bytes_max=NAME_CHARS_MAX) if name else "unnamed"
