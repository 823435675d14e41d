"""What trackio's dashboard would show of a store: by its own reader, the functions its server answers with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_shipper.backends.base import RunInfo
from verl_shipper.backends.trackio_store import project_name, storage_module


class TrackioReader:
    """Reads a store in a folder."""

    def __init__(self, folder: Path) -> None:
        self._storage = storage_module(str(folder)).SQLiteStorage

    def runs(self, project: str) -> list[dict[str, Any]]:
        return list(self._storage.get_run_records(self._name(project)))

    def logs(self, run: RunInfo) -> list[dict[str, Any]]:
        """Every row, as it arrived, with `step` and `timestamp`."""
        return list(self._storage.get_logs(self._name(run.project), run.experiment, run_id=run.run_id))

    def numbers(self, run: RunInfo) -> list[dict[str, Any]]:
        """Rows that have numbers, with nothing else."""
        rows = [{key: value for key, value in row.items() if key != "timestamp"} for row in self.logs(run)]
        return [row for row in rows if len(row) > 1]

    def system_logs(self, run: RunInfo) -> list[dict[str, Any]]:
        """Every row of system metrics, with `timestamp`."""
        return list(self._storage.get_system_logs(self._name(run.project), run.experiment, run_id=run.run_id))

    def traces(self, run: RunInfo, **wanted: Any) -> list[dict[str, Any]]:
        order = {"sort": "request_time_asc", **wanted}
        return list(self._storage.get_traces(self._name(run.project), run.experiment, run_id=run.run_id, **order))

    def config(self, run: RunInfo) -> dict[str, Any]:
        return dict(self._storage.get_run_config(self._name(run.project), run.experiment, run_id=run.run_id) or {})

    def alerts(self, run: RunInfo) -> list[dict[str, Any]]:
        return list(self._storage.get_alerts(self._name(run.project)))

    def _name(self, project: str) -> str:
        return project_name(project, getattr(self._storage, "validate_project_name", None))
