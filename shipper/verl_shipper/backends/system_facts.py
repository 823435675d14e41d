"""The facts of a node as trackers show them: numbers under `system/<node>/<name>`, at a run's own time. Pure.

A node's name is one part of that path: what is a `/` in it becomes `_`, with a digest, so that two nodes never meet.
NaN and infinities are no facts: they are left out and counted as `not_finite`, as everything else that is no number is
by its own reason (values.py).

The step is whole seconds since the run began: facts have none of their own. It comes from what was frozen at capture
and from the run, so a repeat has the same one, and it only rises with time.

Must not know: trackers. Never raises.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from verl_shipper.backends.mlflow_names import with_digest
from verl_shipper.values import flatten_metrics, key_text
from verl_shipper_spool.record import Record

PREFIX = "system"
NODE_CHARS_MAX = 100


def facts_of(record: Record, ignored: Counter[str]) -> dict[str, float]:
    """Finite numbers of a `system` record by their whole names; the rest is added to `ignored`."""
    values = record.body.get("values")
    flat = flatten_metrics(values if isinstance(values, Mapping) else {})
    ignored.update(flat.ignored)
    node = node_name(record.body.get("node"))
    facts: dict[str, float] = {}
    for name, number in flat.numbers.items():
        value = _float(number)
        if math.isfinite(value):
            facts[f"{PREFIX}/{node}/{name}"] = value
        else:
            ignored["not_finite"] += 1
    return facts


def node_name(node: object) -> str:
    """The node's name as one part of a path."""
    told = key_text(node) if node is not None else ""
    name = told.replace("/", "_")
    if len(name) > NODE_CHARS_MAX or name != told:
        return with_digest(name[:NODE_CHARS_MAX], told)
    return (name.strip() and name) or "unnamed"


def elapsed_s(record: Record, created_ns: int) -> float:
    """Seconds between the run's beginning and the capture; 0 for what a clock says was before."""
    return max(record.time_ns - created_ns, 0) / 1e9


def step_of(record: Record, created_ns: int) -> int:
    return max(record.time_ns - created_ns, 0) // 10**9


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf
