"""What each tracker shows of the facts of nodes, for the contract suite.

    facts(kit, run)     every one as (name, value, time), in no order; what came twice is there twice
    SHOWS, STEPS        backends that show them, and those that place them by a step

Must not know: tests. On failure: KeyError for a tracker it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

from contract.kits import FileKit, MlflowKit, SwanlabKit, WandbKit
from contract.trackio_kit import TrackioKit
from support import swanlab_reader, wandb_reader
from support.mlflow_trackers import TestTracker
from support.trackio_reader import TrackioReader
from verl_shipper.backends.base import RunInfo

Fact = tuple[str, float, float]
SILENT = frozenset({"console", "otlp"})


def facts(kit: Any, run: RunInfo) -> list[Fact]:
    """Times in seconds."""
    if kit.backend in SILENT:
        return []
    return list(READERS[kit.backend](kit, run))


def _file(kit: FileKit, run: RunInfo) -> Iterator[Fact]:
    for line in map(json.loads, kit._path(run).read_bytes().splitlines()):
        if line["kind"] == "system":
            for name, value in line["data"]["values"].items():
                yield f"system/{line['data']['node']}/{name}", float(value), line["time_ns"] / 1e9


def _mlflow(kit: MlflowKit, run: RunInfo) -> Iterator[Fact]:
    tracker = TestTracker(kit.uri, run.project)
    told = tracker.run()
    for key in told.data.metrics:
        if key.startswith("system/"):
            for point in tracker.client.get_metric_history(told.info.run_id, key):
                assert point.step == max(int(point.timestamp / 1e3 - run.created_ns / 1e9 + 1e-3), 0)
                yield key, point.value, point.timestamp / 1e3


def _wandb(kit: WandbKit, run: RunInfo) -> Iterator[Fact]:
    for row in wandb_reader.rows(kit.server, run.project, run.run_id):
        if "system/elapsed_s" not in row:
            assert not [key for key in row if key.startswith("system/")]
            continue
        assert "trainer/global_step" not in row
        assert row["system/elapsed_s"] == max(round(row["_timestamp"] - run.created_ns / 1e9, 3), 0)
        for key, value in row.items():
            if not key.startswith("_") and key != "system/elapsed_s":
                yield key, float(value), row["_timestamp"]


def _swanlab(kit: SwanlabKit, run: RunInfo) -> Iterator[Fact]:
    for key, rows in swanlab_reader.run_state(kit.server, kit.name_of(run))["scalars"].items():
        if key.startswith("system/"):
            for _, value, created in rows:
                moment = datetime.fromisoformat(f"{created[:23]}").replace(tzinfo=timezone.utc)
                yield key, float(value), moment.timestamp()


def _trackio(kit: TrackioKit, run: RunInfo) -> Iterator[Fact]:
    for row in TrackioReader(kit._out).system_logs(run):
        moment = datetime.fromisoformat(row.pop("timestamp"))
        for key, value in row.items():
            yield key, float(value), moment.timestamp()


READERS: dict[str, Callable[[Any, RunInfo], Iterator[Fact]]] = {
    "file": _file,
    "mlflow": _mlflow,
    "wandb": _wandb,
    "swanlab": _swanlab,
    "trackio": _trackio,
}
