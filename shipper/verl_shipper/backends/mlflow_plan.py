"""From a batch to the requests that deliver it, in the order in which they are sent.

    params of every run_start       at most 100 a request
    metrics of all records          at most 500 a request; a node's facts with seconds since the run began as step
    generations and texts           one artifact each
    spans of all records            at most 100, or 2 MiB, a request
    (files)                         one request each, see mlflow_files.py
    status                          the newest run_start or run_finish of rank 0, unless a newer one was sent

The same batch gives the same requests every time: names and claims that were made for it are in the memory before it
is sent. Each request knows its items, so that a refused one can be halved until the culprit stands alone (`deliver`).

Must not know: retries, cursors. On failure: a record that cannot be sent at all is in `refused`, the others are
planned.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.backends.base import Batch, Item, Memory, Reject
from verl_shipper.backends.mlflow_artifacts import Claims, generations_artifact, text_artifact
from verl_shipper.backends.mlflow_http import Tracker
from verl_shipper.backends.mlflow_names import Names
from verl_shipper.backends.mlflow_outcome import RefusedError
from verl_shipper.backends.mlflow_params import params_of
from verl_shipper.backends.mlflow_run import Place
from verl_shipper.backends.mlflow_spans import span_of
from verl_shipper.backends.system_facts import facts_of, step_of
from verl_shipper.values import flatten_metrics
from verl_shipper_spool.record import RecordKind

LOG = logging.getLogger(__name__)

PARAMS_PER_REQUEST = 100
METRICS_PER_REQUEST = 500  # a server takes 1000; half keeps a repeat, which costs it five times more, near 0.3 s
SPANS_PER_REQUEST = 100  # also the most traces that MLflow links to a run at once
SPAN_BYTES_PER_REQUEST = 2 * 1024 * 1024
STEP_MIN, STEP_MAX = -(2**63), 2**63 - 1

Send = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class Request:
    """One request to come. `send(indices)` sends what of it belongs to these items of the batch."""

    items: tuple[int, ...]
    send: Send


@dataclass(slots=True)
class Plan:
    """What is to be done for a batch. `refused`: reason by item, of items that have no request."""

    requests: list[Request] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    status_ns: int | None = None  # time of the status that the plan sets


def deliver(send: Send, items: Sequence[int], deadline_s: float = math.inf) -> dict[int, str]:
    """Send; of a refused request send the halves. Returns the items that are refused even alone, with the reason.

    Behind `deadline_s` (monotonic) the refusal is passed on instead: the lane then halves the batch, upload by upload.
    """
    try:
        send(items)
    except RefusedError as refused:
        if not isinstance(refused.outcome, Reject):
            raise
        if len(items) == 1 or refused.is_for_all:
            return dict.fromkeys(items, refused.outcome.reason)
        if time.monotonic() > deadline_s:
            raise
    else:
        return {}
    middle = len(items) // 2
    return deliver(send, items[:middle], deadline_s) | deliver(send, items[middle:], deadline_s)


class Planner:
    """Makes the plans of one run; owns its names and claims."""

    def __init__(self, tracker: Tracker, memory: Memory) -> None:
        self._tracker = tracker
        self._memory = memory
        self._metric_names = Names(memory.get("metric_names"))
        self._param_names = Names(memory.get("param_names"))
        self._claims = Claims(memory.get("claims"))
        self._has_told_of_params = False

    def plan(self, batch: Batch, place: Place, late: Counter[str]) -> Plan:
        """The plan of a batch. What is found out while sending is counted in `late`."""
        plan = Plan()
        items = list(self._sendable(batch, plan))
        for index, item in items:
            if item.record.kind is RecordKind.RUN_START and not item.record.body.get("forked"):
                plan.requests += self._param_requests(index, item, place, late)
        plan.requests += self._metric_requests(items, batch.run.created_ns, place, plan)
        for index, item in items:
            plan.requests += self._artifact_requests(index, item, place)
        plan.requests += self._span_requests(items, batch.run.experiment, place, plan)
        plan.requests += self._status_requests(items, place, plan)
        self._note()
        return plan

    def _note(self) -> None:
        """Names and claims become durable before anybody sees them."""
        for key, names in (("metric_names", self._metric_names), ("param_names", self._param_names)):
            if names.is_changed:
                self._memory.put(key, names.notes())
        if self._claims.is_changed:
            self._memory.put("claims", self._claims.notes())

    def _sendable(self, batch: Batch, plan: Plan) -> Iterator[tuple[int, Item]]:
        for index, item in enumerate(batch.items):
            if item.record.step is None or STEP_MIN <= item.record.step <= STEP_MAX:
                yield index, item
            else:
                plan.refused[index] = f"step {item.record.step} does not fit into 64 bits"

    def _param_requests(self, index: int, item: Item, place: Place, late: Counter[str]) -> Iterator[Request]:
        from mlflow.entities import Param

        texts = params_of(item.record.body.get("config"))
        params = [Param(self._param_names.name(name), text) for name, text in texts.items()]
        for part in chunks(params, PARAMS_PER_REQUEST):

            def send(_items: Sequence[int], part: Sequence[Any] = part) -> None:
                self._send_params(place, part, late)

            yield Request((index,), send)

    def _send_params(self, place: Place, params: Sequence[Any], late: Counter[str]) -> None:
        """Send params; those that MLflow does not take never stop the run."""
        try:
            self._log_batch(place, params=params)
        except RefusedError as refused:
            if not isinstance(refused.outcome, Reject):
                raise
        else:
            return
        shown = self._tracker.ask(self._tracker.client.get_run, place.run_id).data.params
        changed = [param.key for param in params if shown.get(param.key, param.value) != param.value]
        fresh = [param for param in params if param.key not in shown]

        def send(places: Sequence[int]) -> None:
            self._log_batch(place, params=[fresh[i] for i in places])

        refused_count = len(deliver(send, range(len(fresh)))) if fresh else 0
        late.update(param_changed=len(changed), param_refused=refused_count)
        if not self._has_told_of_params:
            # Names only: the values at the tracker may be older than our redaction.
            LOG.warning("run %s: MLflow keeps the old values of params %s", place.run_id, ", ".join(changed[:5]))
            self._has_told_of_params = True

    def _metric_requests(
        self, items: Iterable[tuple[int, Item]], created_ns: int, place: Place, plan: Plan
    ) -> Iterator[Request]:
        points: list[tuple[int, Any]] = []
        for index, item in items:
            if item.record.kind is RecordKind.METRICS:
                points += ((index, metric) for metric in self._metrics_of(item, plan.ignored))
            elif item.record.kind is RecordKind.SYSTEM:
                points += ((index, metric) for metric in self._facts_of(item, created_ns, plan.ignored))
        for part in chunks(points, METRICS_PER_REQUEST):

            def send(wanted: Sequence[int], part: Sequence[tuple[int, Any]] = part) -> None:
                self._log_batch(place, metrics=[metric for index, metric in part if index in wanted])

            yield Request(tuple(dict.fromkeys(index for index, _ in part)), send)

    def _metrics_of(self, item: Item, ignored: Counter[str]) -> Iterator[Any]:
        from mlflow.entities import Metric

        record = item.record
        flat = flatten_metrics(record.body)
        ignored.update(flat.ignored)
        if record.step is None:
            ignored["no_step"] += len(flat.numbers)
        time_ms = max(record.time_ns // 1_000_000, 0)
        for name, number in flat.numbers.items():
            try:
                value = float(number)
            except OverflowError:
                ignored["too_large"] += 1
                continue
            yield Metric(self._metric_names.name(name), value, time_ms, record.step or 0)

    def _facts_of(self, item: Item, created_ns: int, ignored: Counter[str]) -> Iterator[Any]:
        from mlflow.entities import Metric

        time_ms = max(item.record.time_ns // 1_000_000, 0)
        for name, value in facts_of(item.record, ignored).items():
            yield Metric(self._metric_names.name(name), value, time_ms, step_of(item.record, created_ns))

    def _artifact_requests(self, index: int, item: Item, place: Place) -> Iterator[Request]:
        artifacts: list[tuple[str, str]] = []
        if item.record.kind is RecordKind.GENERATIONS:
            artifacts.append(generations_artifact(item, self._claims))
        elif item.record.kind is RecordKind.TEXT:
            artifacts += (text_artifact(item, key, text, self._claims) for key, text in item.record.body.items())
        for path, content in artifacts:

            def send(_items: Sequence[int], path: str = path, content: str = content) -> None:
                self._tracker.ask(self._tracker.client.log_text, place.run_id, content, path)

            yield Request((index,), send)

    def _span_requests(
        self, items: Iterable[tuple[int, Item]], experiment: str, place: Place, plan: Plan
    ) -> Iterator[Request]:
        spans: list[tuple[int, Any]] = []
        for index, item in items:
            if item.record.kind is RecordKind.SPAN:
                try:
                    span = span_of(item.record.body, step=item.record.step, rank=item.rank, experiment=experiment)
                except (ValueError, TypeError) as error:
                    plan.refused[index] = str(error)
                else:
                    spans.append((index, span))
        for part in span_chunks(spans):

            def send(wanted: Sequence[int], part: Sequence[tuple[int, Any]] = part) -> None:
                chosen = [span for index, span in part if index in wanted]
                self._tracker.send_spans(chosen, place.experiment_id, place.run_id)

            yield Request(tuple(index for index, _ in part), send)

    def _status_requests(self, items: Iterable[tuple[int, Item]], place: Place, plan: Plan) -> Iterator[Request]:
        newest = self._memory.get("status_ns")
        newest_ns = newest if isinstance(newest, int) else 0
        chosen: tuple[int, Item] | None = None
        for index, item in items:
            if speaks_for_run(item) and item.record.time_ns >= newest_ns:
                newest_ns = item.record.time_ns
                chosen = index, item
        if chosen is None:
            return
        plan.status_ns = newest_ns
        index, item = chosen

        def send(_items: Sequence[int]) -> None:
            self._set_status(place, item)

        yield Request((index,), send)

    def _set_status(self, place: Place, item: Item) -> None:
        client = self._tracker.client
        if item.record.kind is RecordKind.RUN_START:
            self._tracker.ask(client.update_run, place.run_id, status="RUNNING")
            return
        status = "FINISHED" if item.record.body.get("exit_code") == 0 else "FAILED"
        time_ms = max(item.record.time_ns // 1_000_000, 1)
        self._tracker.ask(client.set_terminated, place.run_id, status=status, end_time=time_ms)

    def _log_batch(self, place: Place, *, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        self._tracker.ask(
            self._tracker.client.log_batch, place.run_id, metrics=metrics, params=params, synchronous=True
        )


def speaks_for_run(item: Item) -> bool:
    """Whether this record tells the state of the whole run."""
    kinds = (RecordKind.RUN_START, RecordKind.RUN_FINISH)
    return item.record.kind in kinds and item.rank == 0 and not item.record.body.get("forked")


def chunks(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def span_chunks(spans: Iterable[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    """Groups of spans that go into one request."""
    part: list[tuple[int, Any]] = []
    size_bytes = 0
    for index, span in spans:
        if part and (len(part) == SPANS_PER_REQUEST or size_bytes + span.ByteSize() > SPAN_BYTES_PER_REQUEST):
            yield part
            part, size_bytes = [], 0
        part.append((index, span))
        size_bytes += span.ByteSize()
    if part:
        yield part
