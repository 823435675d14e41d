"""Asks MLflow's own client what it holds, and prints it as JSON. Arguments: URI PROJECT [METRIC KEY ...].

A program of its own: importing mlflow into the test process would bring its threads, warnings and open databases.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mlflow.tracking import MlflowClient


def main() -> None:
    uri, project, *keys = sys.argv[1:]
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(project)
    runs = [] if experiment is None else client.search_runs([experiment.experiment_id], max_results=1000)
    print(json.dumps([_told(client, run, keys) for run in runs]))


def _told(client: Any, run: Any, keys: list[str]) -> dict[str, Any]:
    run_id = run.info.run_id
    return {
        "mlflow_id": run_id,
        "name": run.info.run_name,
        "status": run.info.status,
        "tags": run.data.tags,
        "params": run.data.params,
        "latest": run.data.metrics,
        "points": {
            key: [[point.step, point.value] for point in client.get_metric_history(run_id, key)] for key in keys
        },
        "artifacts": _artifacts(client, run_id, None),
    }


def _artifacts(client: Any, run_id: str, folder: str | None) -> list[str]:
    found: list[str] = []
    for entry in client.list_artifacts(run_id, folder):
        found += _artifacts(client, run_id, entry.path) if entry.is_dir else [entry.path]
    return found


if __name__ == "__main__":
    main()
