"""From a batch to what trackio stores: rows, the run's configuration, alerts. Pure.

    log_id   "<stream_id>:<ordinal>", of every row and alert; trackio keeps the first of two with the same
    step     of the record; 0 where there is none (counted as `no_step`)
    names    as trackio's own `log` has them: `step`, `time`, … and what begins with `__` gets two underscores before it

The configuration is that of the lowest rank, and the newest of it; another rank's is counted as `other_config`.

Must not know: the store. On failure: a record that cannot be stored is in `refused`, the others are planned.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from verl_shipper.backends.base import Batch, Item
from verl_shipper.backends.system_facts import facts_of
from verl_shipper.backends.trackio_traces import Shown, generation_traces, span_key, span_trace
from verl_shipper.values import flatten_metrics, key_text, to_json, visible
from verl_shipper_spool.file_parts import is_last
from verl_shipper_spool.record import RecordKind
from verl_shipper_spool.redact import redact

CONFIG_OF = "config_of"  # whose configuration is shown: [rank, time of capture]
GENERATIONS_KEY = "val/generations"  # verl's own
RESERVED = ("project", "run", "timestamp", "step", "time", "metrics")
STEP_MIN, STEP_MAX = -(2**63), 2**63 - 1
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**64 - 1  # what trackio's JSON carries
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
TIME_S_MAX = 253_402_300_799  # end of the year 9999


@dataclass(frozen=True, slots=True)
class Row:
    """One row: numbers, reports and traces by name."""

    log_id: str
    step: int
    timestamp: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FactsRow:
    """One row of system metrics. They have no step."""

    log_id: str
    timestamp: str
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Alert:
    """What trackio shows beside the charts."""

    log_id: str
    step: int | None
    timestamp: str
    title: str
    text: str
    level: str


@dataclass(slots=True)
class Plan:
    """What is to be stored for a batch. `refused`: reason by item."""

    rows: list[Row] = field(default_factory=list)
    facts: list[FactsRow] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    config: dict[str, Any] | None = None
    config_of: list[int] | None = None
    refused: dict[int, str] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)


def plan(batch: Batch, config_of: Any, numbers_max: int) -> Plan:
    """The plan of a batch. `config_of`: as it was remembered."""
    made = Plan(config_of=config_of if isinstance(config_of, list) else None)
    shown = Shown(numbers_max, made.ignored)
    for index, item in enumerate(batch.items):
        if item.record.step is not None and not STEP_MIN <= item.record.step <= STEP_MAX:
            made.refused[index] = f"step {item.record.step} does not fit into 64 bits"
            continue
        values = _values(item, batch, made, shown)
        if values is not None:
            made.rows.append(Row(log_id(item), _step(item, values, made.ignored), timestamp(item), values))
        if item.record.kind is RecordKind.RUN_FINISH and item.rank == 0 and not item.record.body.get("forked"):
            made.alerts.append(_finish(item))
    return made


def log_id(item: Item) -> str:
    return f"{item.stream_id}:{item.ordinal}"


def timestamp(item: Item) -> str:
    """Time of capture as ISO 8601."""
    return iso(item.record.time_ns)


def iso(time_ns: int) -> str:
    seconds, rest_ns = divmod(time_ns, 10**9)
    seconds = min(max(seconds, 0), TIME_S_MAX)
    return (EPOCH + timedelta(seconds=seconds, microseconds=rest_ns // 1000)).isoformat()


def _values(item: Item, batch: Batch, made: Plan, shown: Shown) -> dict[str, Any] | None:
    """The row of one record, None when it needs none."""
    record = item.record
    match record.kind:
        case RecordKind.METRICS:
            return _numbers(record.body, made.ignored) or None
        case RecordKind.RUN_START:
            return _start(item, batch, made)
        case RecordKind.GENERATIONS:
            traces = generation_traces(item, shown)
            named = item.record.body.get("name")
            return {_name(named) if named else GENERATIONS_KEY: traces} if traces else None
        case RecordKind.SPAN:
            return {span_key(record.body): span_trace(item, batch.run.experiment, shown)}
        case RecordKind.TEXT:
            return {_name(key): _report(text) for key, text in record.body.items()} or None
        case RecordKind.SYSTEM:
            facts = facts_of(record, made.ignored)
            made.facts += [FactsRow(log_id(item), timestamp(item), facts)] if facts else []
        case RecordKind.FILE:
            made.ignored["file"] += is_last(record.body)
    return None


def _step(item: Item, values: Mapping[str, Any], ignored: Counter[str]) -> int:
    if item.record.step is not None:
        return item.record.step
    attributes = item.record.body.get("attributes")
    told = attributes.get("step") if isinstance(attributes, Mapping) else None
    if item.record.kind is RecordKind.SPAN and type(told) is int and STEP_MIN <= told <= STEP_MAX:
        return told
    ignored["no_step"] += len(values)
    return 0


def _numbers(body: Mapping[Any, Any], ignored: Counter[str]) -> dict[str, int | float]:
    flat = flatten_metrics(body)
    ignored.update(flat.ignored)
    numbers: dict[str, int | float] = {}
    for name, number in flat.numbers.items():
        value = number
        if isinstance(number, int) and not INTEGER_MIN <= number <= INTEGER_MAX:
            try:
                value = float(number)
            except OverflowError:
                ignored["too_large"] += 1
                continue
        numbers[_name(name)] = value
    return numbers


def _start(item: Item, batch: Batch, made: Plan) -> dict[str, Any] | None:
    """Show its configuration, unless a better one is known. A row without numbers makes the run appear at once."""
    body = item.record.body
    config = body.get("config")
    mine = [item.rank, item.record.time_ns]
    known = made.config_of
    if body.get("forked") or (known is not None and (mine[0] > known[0] or (mine[0] == known[0] and mine < known))):
        made.ignored["other_config"] += bool(config)
        return None
    leaves = to_json(redact(config)) if isinstance(config, Mapping) else {}
    # Names with an underscore in front are trackio's own there, as the time in `_Created`.
    named = {f"config{key}" if key.startswith("_") else key: Shown.fit(value) for key, value in leaves.items()}
    made.config = {**named, "_Created": iso(batch.run.created_ns)}
    made.config_of = mine
    return {}


def _finish(item: Item) -> Alert:
    code, reason = item.record.body.get("exit_code"), item.record.body.get("reason")
    has_succeeded = code == 0
    words = [f"exit code {'unknown' if code is None else code}", visible(str(reason)) if reason else ""]
    return Alert(
        log_id(item),
        item.record.step,
        timestamp(item),
        "run finished" if has_succeeded else "run failed",
        ", ".join(word for word in words if word),
        "info" if has_succeeded else "error",
    )


def _name(key: Any) -> str:
    name = key_text(key)
    return f"__{name}" if name in RESERVED or name.startswith("__") else name


def _report(text: Any) -> dict[str, str]:
    content = visible(text) if isinstance(text, str) else json.dumps(Shown.fit(to_json(text)), ensure_ascii=False)
    return {"_type": "trackio.markdown", "_value": content}
