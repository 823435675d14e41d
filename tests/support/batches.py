"""Batches for backend tests: short to write, and the same every time they are made."""

from __future__ import annotations

import itertools
from typing import Any

from verl_shipper.backends.base import Batch, Item, RunInfo
from verl_shipper_spool.record import Record, RecordKind

TIME_NS = 1_790_000_000_123_456_789
STREAM = "5" * 32
_batch_numbers = itertools.count()


def run_info(project: str = "project", experiment: str = "experiment", run_id: str = "run1") -> RunInfo:
    return RunInfo(run_id, project, experiment, TIME_NS)


def item(
    kind: RecordKind,
    body: dict[Any, Any],
    *,
    ordinal: int = 0,
    step: int | None = 0,
    rank: int = 0,
    stream_id: str = STREAM,
    time_ns: int | None = None,
) -> Item:
    at_ns = TIME_NS + ordinal * 1_000_000_000 if time_ns is None else time_ns
    return Item(stream_id, ordinal, rank, Record(kind, ordinal, step, at_ns, body))


def metrics(ordinal: int, body: dict[Any, Any] | None = None, **place: Any) -> Item:
    """A metrics record whose step is its ordinal."""
    place.setdefault("step", ordinal)
    return item(RecordKind.METRICS, {"n": ordinal} if body is None else body, ordinal=ordinal, **place)


def batch(*items: Item, run: RunInfo | None = None) -> Batch:
    return Batch(f"batch{next(_batch_numbers)}", run or run_info(), items)
