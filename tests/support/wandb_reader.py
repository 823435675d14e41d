"""What our wandb server holds of one run, for tests to judge.

    rows(server, project, run_id)           the history, parsed, in the order of its lines
    tables(server, project, run_id, key)    every table that the history refers to under this key: [(_step, rows)]
    table / body(…, name)                   one uploaded run file, by its name (`media/table/….table.json`)

Must not know: what our product sends.
"""

from __future__ import annotations

import json
from typing import Any

from servers.process import ServerProcess

ENTITY = "tester"  # the server's default


def run(server: ServerProcess, project: str, run_id: str, entity: str = ENTITY) -> dict[str, Any]:
    """Everything the server tells of a run; KeyError when there is none."""
    told: dict[str, Any] = server.state()["runs"][f"{entity}/{project}/{run_id}"]
    return told


def rows(server: ServerProcess, project: str, run_id: str, entity: str = ENTITY) -> list[dict[str, Any]]:
    """The history. A hole is an empty row."""
    return [row or {} for row in run(server, project, run_id, entity)["history"]]


def body(server: ServerProcess, project: str, run_id: str, name: str, entity: str = ENTITY) -> bytes:
    """One uploaded run file."""
    return (server.folder / "storage" / "runs" / entity / project / run_id / name).read_bytes()


def table(server: ServerProcess, project: str, run_id: str, name: str, entity: str = ENTITY) -> list[list[Any]]:
    """The rows of one uploaded table."""
    data: list[list[Any]] = json.loads(body(server, project, run_id, name, entity))["data"]
    return data


def tables(
    server: ServerProcess, project: str, run_id: str, key: str, entity: str = ENTITY
) -> list[tuple[int, list[list[Any]]]]:
    """The tables under `key` with the `_step` of the row that refers to each."""
    found = [(row["_step"], row[key]) for row in rows(server, project, run_id, entity) if key in row]
    return [(step, table(server, project, run_id, told["path"], entity)) for step, told in found]
