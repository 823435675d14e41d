"""Backend `mlflow`: one MLflow run per run, at a server (http, https) or in a database (sqlite:///path).

    run_start     params from the flattened configuration; status RUNNING
    metrics       one point per number, with the time and step of capture
    system        the same under system/<node>/…, which is MLflow's own page; step: seconds since the run began
    generations   val_generations/step_N.json
    span          a span of a trace that is linked to the run and tagged with step, sample_index, …
    text          text/<key>/step_N.txt
    file          profiles/step_N/<name>, memory/…, files/…
    run_finish    status FINISHED (exit code 0) or FAILED; only rank 0 speaks for the run

Everything may be sent again at any time: MLflow keys points by (name, time, step, value), spans by their ids, params
and artifacts by name. What it shows otherwise than it was logged: ±Inf as the largest finite number; a number without
a step at step 0 (counted as no_step); a param that had another value at an earlier start keeps that one
(param_changed).

Settings: docs/configuration.md. Credentials: as MLflow reads them from the environment.

    mlflow.py ── mlflow_plan.py ── mlflow_{names,params,artifacts,spans}.py      what is sent
        ├─────── mlflow_files.py ── file_assembly.py                         files, whole
        └─────── mlflow_run.py ─── mlflow_http.py ── mlflow_outcome.py           how it is sent

Must not know: cursors, backoff. On failure: the outcome of the first request that failed. Requests that were answered
are not repeated when the same batch comes again.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from verl_shipper.backends import mlflow_diagnose
from verl_shipper.backends.base import (
    Backend,
    Batch,
    Decided,
    Delivered,
    Limits,
    Memory,
    Outcome,
    Park,
    Reject,
    Retry,
    RunInfo,
)
from verl_shipper.backends.file_assembly import Taken
from verl_shipper.backends.mlflow_files import Files
from verl_shipper.backends.mlflow_http import TIMEOUT_S, Tracker, mlflow_road
from verl_shipper.backends.mlflow_outcome import RefusedError
from verl_shipper.backends.mlflow_place import check_uri, decided, store_of
from verl_shipper.backends.mlflow_plan import Planner, Request, deliver
from verl_shipper.backends.mlflow_run import Place, RunFinder
from verl_shipper.backends.mlflow_settings import SETTINGS
from verl_shipper.checks import Finding
from verl_shipper.errors import ConfigError
from verl_shipper.schema import Key

SEND_S_MAX = 60.0  # then the lane gets control back, well before it would think us hung


@dataclass(slots=True)
class Progress:
    """How far the batch in flight has come: what was answered stays answered over retries."""

    batch_id: str = ""
    planned: int = 0
    done: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    late: Counter[str] = field(default_factory=Counter)  # values found to be ignored while sending


class MlflowBackend(Backend):
    """Delivers one run to MLflow."""

    name: ClassVar[str] = "mlflow"
    settings_known: ClassVar[tuple[str | Key, ...] | None] = SETTINGS
    limits: ClassVar[Limits] = Limits(items_max=500)

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        check_uri(settings)
        timeout_s = settings.get("timeout_s", TIMEOUT_S)
        if not isinstance(timeout_s, int | float) or not 1 <= timeout_s <= SEND_S_MAX:
            raise ConfigError(
                f"timeout_s is {timeout_s!r}",
                where="backends.mlflow.timeout_s",
                hint=f"give a number from 1 to {SEND_S_MAX:g}",
            )
        mlflow_road(settings)
        if importlib.util.find_spec("mlflow") is None:
            raise ConfigError("mlflow is not installed", hint="pip install 'verl-shipper[mlflow]'")

    @classmethod
    def decide(cls, settings: Mapping[str, Any]) -> Decided:
        return decided(settings)

    @classmethod
    def diagnose(cls, settings: Mapping[str, Any]) -> Iterator[Finding]:
        return mlflow_diagnose.findings(store_of(settings).uri, mlflow_road(settings))

    def __init__(self, run: RunInfo, settings: Mapping[str, Any], memory: Memory) -> None:
        super().__init__(run, settings, memory)
        store = store_of(settings)
        self._tracker = Tracker(
            store.uri,
            mlflow_road(settings),
            timeout_s=float(settings.get("timeout_s", TIMEOUT_S)),
            artifact_location=store.artifact_location,
        )
        attach_id = settings.get("run_id") or os.environ.get("MLFLOW_RUN_ID")
        self._finder = RunFinder(self._tracker, run, memory, attach_id=attach_id, lock_dir=settings.get("lock_dir"))
        self._planner = Planner(self._tracker, memory)
        self._files = Files(self._tracker, settings, run.run_id, memory, self.keep_busy)
        self._place: Place | None = None
        self._progress = Progress()

    def open(self) -> Outcome | None:
        try:
            self._files.staging.open()
            self._tracker.open()
            self._place = self._finder.find()
        except RefusedError as refused:
            # A refusal at this point is no record's fault.
            return Park(refused.outcome.reason) if isinstance(refused.outcome, Reject) else refused.outcome
        except OSError as error:
            return Retry(f"cannot look for the run: {error}")
        return None

    def upload(self, batch: Batch) -> Outcome:
        if self._place is None:
            outcome = self.open()
            if outcome is not None or self._place is None:
                return outcome or Retry("the run is not ready")
        if self._progress.batch_id != batch.batch_id:
            self._progress = Progress(batch.batch_id)
        try:
            return self._deliver(batch, self._files.staging.take(batch.items), self._place)
        except OSError as error:
            return Retry(f"cannot put a file together: {error.strerror or error}")

    def _deliver(self, batch: Batch, taken: Taken, place: Place) -> Outcome:
        progress = self._progress
        plan = self._planner.plan(batch, place, progress.late)
        plan.refused |= taken.refused
        before_status = len(plan.requests) - (plan.status_ns is not None)
        plan.requests[before_status:before_status] = self._files.requests(taken, place)
        if progress.planned != len(plan.requests):  # a file that was whole is gone meanwhile
            progress.planned, progress.done = len(plan.requests), 0
        done_before = progress.done
        try:
            self._send(plan.requests)
        except RefusedError as refused:
            if isinstance(refused.outcome, Park):
                self._place = None  # the run may be gone; look again before the next attempt
            if isinstance(refused.outcome, Retry):
                return replace(refused.outcome, progressed=progress.done > done_before)
            return refused.outcome
        refused_items = plan.refused | progress.refused
        for whole in taken.wholes:
            if whole.index not in refused_items:
                self._files.staging.finish(whole)
        if refused_items:
            reasons = list(dict.fromkeys(refused_items.values()))
            return Reject("; ".join(reasons[:3]), sorted(refused_items), refused_items)
        remember = {} if plan.status_ns is None else {"status_ns": plan.status_ns}
        return Delivered(remember, plan.ignored + progress.late)

    def watermark(self) -> Mapping[str, int]:
        return {}  # repeats are harmless

    def close(self) -> None:
        """The SDK's connections serve all runs of the process."""

    def _send(self, requests: Sequence[Request]) -> None:
        progress = self._progress
        deadline_s = time.monotonic() + SEND_S_MAX
        for request in requests[progress.done :]:
            if time.monotonic() > deadline_s:
                answered = f"{progress.done} of {len(requests)} requests answered in {SEND_S_MAX:g} s"
                raise RefusedError(Retry(f"slow server: {answered}", 0.0))
            progress.refused |= deliver(request.send, request.items, deadline_s)
            progress.done += 1
