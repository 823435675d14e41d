"""Backend `otlp`: rollout traces to an OpenTelemetry collector, over OTLP/HTTP in protobuf, in GenAI's conventions.

    span          a span with the ids, times and status of capture; attributes as in otlp_spans.py and otlp_genai.py
    everything    not shown, counted as ignored values: `metrics` and `system` (each number), `generations`, `text`,
    else          `file` (each record); run_start and run_finish are delivered without a word

A collector promises nothing about repeats: on the wire a span is sent at least once, always with the same trace id and
span id. A store that keys by these ids shows it once.

Settings: docs/configuration.md.

    otlp.py ── otlp_spans.py ── otlp_genai.py ── otlp_messages.py      what is sent
        └───── otlp_http.py                                           how, and what the answer means
        └───── otlp_settings.py                                       to whom

Must not know: cursors, backoff. On failure: the outcome of the batch's one request.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from verl_shipper.backends import otlp_diagnose
from verl_shipper.backends.base import (
    Backend,
    Batch,
    Decided,
    Delivered,
    Item,
    Limits,
    Memory,
    Outcome,
    Park,
    Reject,
    RunInfo,
)
from verl_shipper.backends.otlp_http import Collector
from verl_shipper.backends.otlp_settings import (
    SETTINGS,
    captures_content,
    endpoint_of,
    headers_of,
    is_compressed,
    otlp_road,
    protocol_note,
    resource_attributes,
    timeout_of,
)
from verl_shipper.backends.otlp_spans import request_of, span_of
from verl_shipper.backends.system_facts import facts_of
from verl_shipper.checks import Finding
from verl_shipper.errors import ConfigError
from verl_shipper.schema import Key
from verl_shipper.values import flatten_metrics
from verl_shipper_spool.file_parts import is_last
from verl_shipper_spool.record import KIND_NAME, RecordKind

PACKAGES = {"opentelemetry-proto": "opentelemetry.proto.collector.trace.v1", "requests": "requests"}
SILENT = (RecordKind.RUN_START, RecordKind.RUN_FINISH)


class OtlpBackend(Backend):
    """Delivers the spans of one run to a collector."""

    name: ClassVar[str] = "otlp"
    settings_known: ClassVar[tuple[str | Key, ...] | None] = SETTINGS
    limits: ClassVar[Limits] = Limits(items_max=500)  # packed token ids grow fivefold as text; a collector takes 20 MiB

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        endpoint_of(settings)
        headers_of(settings)
        resource_attributes(settings)
        is_compressed(settings)
        timeout_of(settings)
        otlp_road(settings)
        for package, module in PACKAGES.items():
            if not _is_there(module):
                raise ConfigError(f"{package} is not installed", hint="pip install 'verl-shipper[otlp]'")

    @classmethod
    def decide(cls, settings: Mapping[str, Any]) -> Decided:
        note = protocol_note(settings)
        return Decided(settings, (note,) if note else ())

    @classmethod
    def diagnose(cls, settings: Mapping[str, Any]) -> Iterator[Finding]:
        return otlp_diagnose.findings(settings)

    def __init__(self, run: RunInfo, settings: Mapping[str, Any], memory: Memory) -> None:
        super().__init__(run, settings, memory)
        self._with_content = captures_content(settings)
        self._resource = resource_attributes(settings)
        self._collector = Collector(
            endpoint_of(settings),
            otlp_road(settings),
            timeout_s=timeout_of(settings),
            compressed=is_compressed(settings),
        )

    def open(self) -> Outcome | None:
        """A run has no place at a collector that would have to be made; but whether it is there, and takes our key, is
        asked by a request without spans."""
        outcome = self._asked((), self.run)
        return None if isinstance(outcome, Reject) else outcome  # some refuse to be asked for nothing

    def upload(self, batch: Batch) -> Outcome:
        ignored: Counter[str] = Counter()
        refused: dict[int, str] = {}
        spans: dict[int, tuple[int, Any]] = {}
        for index, item in enumerate(batch.items):
            if item.record.kind is not RecordKind.SPAN:
                count_ignored(item, ignored)
                continue
            try:
                span, left_out = span_of(
                    item.record.body, step=item.record.step, rank=item.rank, content=self._with_content
                )
            except (ValueError, TypeError) as error:
                refused[index] = str(error)
                continue
            spans[index] = item.rank, span
            ignored["content"] += left_out
        outcome = self._asked(tuple(spans.values()), batch.run) if spans else None
        if isinstance(outcome, Reject):
            return _by_index(outcome, list(spans), refused)
        if outcome is not None:
            return outcome
        if refused:
            return Reject("; ".join(list(dict.fromkeys(refused.values()))[:3]), sorted(refused), refused)
        return Delivered(ignored=+ignored)

    def watermark(self) -> Mapping[str, int]:
        return {}  # a collector cannot be asked

    def close(self) -> None:
        self._collector.close()

    def _asked(self, spans: Sequence[tuple[int, Any]], run: RunInfo) -> Outcome | None:
        """One request; None when the collector has everything in it."""
        try:
            headers, _ = headers_of(self.settings)
        except ConfigError as error:
            return Park(error.line())
        request = request_of(spans, run, self._resource)
        return self._collector.send(request.SerializeToString(), len(spans), headers)


def count_ignored(item: Item, ignored: Counter[str]) -> None:
    """What of a record a collector of traces cannot show."""
    kind = item.record.kind
    if kind is RecordKind.METRICS:
        flat = flatten_metrics(item.record.body)
        ignored["metrics"] += len(flat.numbers) + sum(flat.ignored.values())
    elif kind is RecordKind.SYSTEM:
        ignored["system"] += len(facts_of(item.record, ignored))
    elif kind not in SILENT:
        ignored[KIND_NAME[kind]] += kind is not RecordKind.FILE or is_last(item.record.body)


def _by_index(outcome: Reject, indices: list[int], refused: Mapping[int, str]) -> Reject:
    """A refusal of spans of the request, in terms of the batch."""
    places = range(len(indices)) if len(indices) == 1 else outcome.items
    if places is None and not refused:
        return outcome
    found = dict.fromkeys([indices[place] for place in places or ()], outcome.reason) | dict(refused)
    return Reject(outcome.reason, sorted(found), found)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
