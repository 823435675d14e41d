"""What the SwanLab test server holds, and what of it a reader may see already.

The store is append-only like the real one: the same (key, index) twice is two rows, and stays two rows. A row is seen
by summaries and read-back once it is `lag_s` old; `state()` of the server shows every row at once. Must not know: HTTP.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

KEY_LENGTH_MAX = 512
INDEX_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One scalar, media or log row. `at_s` is when it came in; `index` of a log row is its epoch."""

    index: int
    data: Any
    more: Any
    create_time: str
    at_s: float


@dataclass(slots=True)
class Run:
    """One experiment, known by its cuid."""

    cuid: str
    project: str  # cuid of the project
    name: str
    created_at: str
    described: dict[str, Any]  # description, labels, job, cluster, colors: as the first create call gave them
    state: str = "RUNNING"
    created: int = 0
    heartbeats: int = 0
    profile: dict[str, Any] = field(default_factory=dict)
    saves: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, list[Row]] = field(default_factory=dict)
    media: dict[str, list[Row]] = field(default_factory=dict)
    logs: list[Row] = field(default_factory=list)

    def rows(self, kind: str) -> dict[str, list[Row]]:
        """Rows of "scalar", "media" or "log" by key; all log rows share one key."""
        if kind == "log":
            return {"LOG": self.logs}
        return self.scalars if kind == "scalar" else self.media


@dataclass(slots=True)
class Project:
    """One project. Series belong to the project, not to a run."""

    cuid: str
    workspace: str
    name: str
    visibility: str
    series: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)


def rows_of(kind: str, metrics: Any, now_s: float) -> list[tuple[str, Row]]:
    """(key, row) of a POST to /house/metrics, or ValueError: one bad row refuses the whole POST."""
    if not isinstance(metrics, list) or not metrics:
        raise ValueError("metrics must be a list that is not empty")
    return [_row(kind, metric, now_s) for metric in metrics]


def _row(kind: str, metric: Any, now_s: float) -> tuple[str, Row]:
    if not isinstance(metric, dict):
        raise ValueError("a metric must be an object")  # noqa: TRY004 - the client's fault, not ours
    created = metric.get("create_time")
    if not isinstance(created, str):
        raise ValueError(f"bad create_time {created!r}")  # noqa: TRY004 - same
    datetime.fromisoformat(_six_digits(created).replace("Z", "+00:00"))
    if kind == "log":
        if metric.get("level") not in {"INFO", "WARN", "ERROR", "DEBUG"} or not isinstance(metric.get("message"), str):
            raise ValueError("a log row needs a level and a message")
        return "LOG", Row(_index(metric.get("epoch")), metric["message"], metric["level"], created, now_s)
    key = metric.get("key")
    if not isinstance(key, str) or not 0 < len(key) <= KEY_LENGTH_MAX:
        raise ValueError("a key must have 1 to 512 characters")
    index, data = _index(metric.get("index")), metric.get("data")
    if kind == "scalar":
        number = isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data)
        if not number and not (isinstance(data, str) and data.lower() in {"nan", "inf", "-inf"}):
            raise ValueError(f"bad scalar {data!r}")
        return key, Row(index, data, None, created, now_s)
    if not isinstance(data, list) or not data or not all(isinstance(path, str) for path in data):
        raise ValueError("media data must be a list of paths")
    return key, Row(index, data, metric.get("more"), created, now_s)


def _index(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= INDEX_MAX:
        raise ValueError(f"bad index {value!r}")
    return value


def _six_digits(stamp: str) -> str:
    """Nanoseconds cut to microseconds, which is all that Python 3.10 can read."""
    head, dot, tail = stamp.partition(".")
    digits = tail.rstrip("Z")
    return f"{head}.{digits[:6]:0<6}Z" if dot and digits.isdigit() else stamp


def seen(rows: Iterable[Row], lag_s: float, since_s: float) -> list[Row]:
    """Rows that came in at least `lag_s` ago and not before `since_s`."""
    until_s = time.time() - lag_s
    return [row for row in rows if since_s <= row.at_s <= until_s]


def summary(run: Run, lag_s: float, since_s: float) -> dict[str, list[dict[str, Any]]]:
    """The largest step of every key, as a resuming client asks for it."""
    told: dict[str, list[dict[str, Any]]] = {}
    for kind in ("log", "media", "scalar"):
        visible = {key: seen(rows, lag_s, since_s) for key, rows in run.rows(kind).items()}
        told[kind] = [{"key": key, "step": max(row.index for row in rows)} for key, rows in visible.items() if rows]
    return told


def object_name(path: str) -> str:
    """Name of an object's file; a path may be longer than a name may be."""
    return hashlib.sha256(path.encode()).hexdigest()


def doubles(run: Run) -> int:
    """How many scalar and media rows repeat a (key, index) that was there already."""
    held = [rows for kind in ("scalar", "media") for rows in run.rows(kind).values()]
    return sum(len(rows) - len({row.index for row in rows}) for rows in held)


def told(run: Run, project: Project) -> dict[str, Any]:
    """A run as JSON, for a test to judge."""
    fields = asdict(run)
    config = run.profile.get("config") or {}
    return {
        **{name: fields[name] for name in ("name", "state", "created", "heartbeats", "profile", "saves", "created_at")},
        **run.described,
        "workspace": project.workspace,
        "project": project.name,
        # The client sends every value as {value, sort, desc}.
        "config": {
            key: held["value"] if isinstance(held, dict) and "value" in held else held for key, held in config.items()
        },
        "scalars": {key: [[row.index, row.data, row.create_time] for row in rows] for key, rows in run.scalars.items()},
        "media": {key: [[row.index, row.data, row.more] for row in rows] for key, rows in run.media.items()},
        "doubles": doubles(run),
        "logs": len(run.logs),
        "series": {key: series["type"] for key, series in project.series.items()},
    }
