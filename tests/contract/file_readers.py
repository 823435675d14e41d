"""What a tracker of the contract suite holds of shipped files: names and contents, None where it has no place for them.

Must not know: tests, lanes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from contract.kits import FileKit, Kit, MlflowDatabaseKit, MlflowServerKit, WandbKit
from support.four_trackers import MlflowRest
from support.mlflow_trackers import TestTracker
from support.wandb_reader import ENTITY
from verl_shipper.backends.base import RunInfo

Found = list[tuple[str, bytes]]
FOLDERS = ("profiles", "memory", "files")


def files(kit: Kit, run: RunInfo) -> Found:
    """Every whole file, by the name it has there."""
    return sorted(READERS[type(kit)](kit, run))


def has_place(kind: type[Kit]) -> bool:
    return kind in READERS


def contents(kit: Kit, run: RunInfo) -> list[bytes]:
    return sorted(content for _, content in files(kit, run))


def _in_folder(kit: Any, run: RunInfo) -> Found:
    """Lines and files agree."""
    lines = kit._path(run)
    told = [json.loads(line) for line in lines.read_bytes().splitlines()]
    paths = [line["data"]["path"] for line in told if line["kind"] == "file" and "sha256" in line["data"]]
    shelf = lines.with_suffix(".files")
    there = {str(path.relative_to(lines.parent)) for path in shelf.rglob("*") if path.is_file()}
    assert there == set(paths)
    return [(path, (lines.parent / path).read_bytes()) for path in there]


def _by_rest(kit: Any, run: RunInfo) -> Found:
    rest = MlflowRest(kit.uri, run.project)
    paths = [path for folder in FOLDERS for path in rest.artifacts(run.run_id, folder)]
    return [(path, rest.artifact(run.run_id, path)) for path in paths]


def _beside_database(kit: Any, run: RunInfo) -> Found:
    root = Path(unquote(urlsplit(TestTracker(kit.uri, run.project).run().info.artifact_uri).path))
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()]
    return [(str(path.relative_to(root)), path.read_bytes()) for path in found]


def _artifacts(kit: Any, run: RunInfo) -> Found:
    told = [each for each in kit.server.state()["artifacts"] if each["run"] == f"{ENTITY}/{run.project}/{run.run_id}"]
    assert all(each["state"] == "COMMITTED" for each in told)
    storage = kit.server.folder / "storage" / "artifacts"
    return [
        (f"{each['name']}/{name}", (storage / each["artifact_id"] / name).read_bytes())
        for each in told
        for name in each["files"]
    ]


READERS: dict[type[Kit], Callable[[Any, RunInfo], Found]] = {
    FileKit: _in_folder,
    MlflowServerKit: _by_rest,
    MlflowDatabaseKit: _beside_database,
    WandbKit: _artifacts,
}
