"""trackio's local store, tamed: where it is, and its one function that writes.

    <dir>/<project>.db      rows of all runs of a project; trackio shows them by run id
    <dir>/traces/…          a file for each trace, for the Hub; written by trackio from the same rows

A project's name keeps letters, digits, `-` and `_`, as trackio does it. Names that trackio reserves or no file can
have get a digest. trackio reads its folder once, when it is loaded, into variables of its modules; they are set here,
for the whole process: a lane has one folder.

Must not know: records. On failure: Retry for a store that is busy, full or away, Park for one that is broken.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_shipper.backends.base import Decided, Outcome, Park, Retry, RunInfo
from verl_shipper.backends.paths import component
from verl_shipper.backends.trackio_plan import Plan
from verl_shipper.values import visible

VARIABLE = "TRACKIO_DIR"
DURABILITY = "TRACKIO_SQLITE_SYNCHRONOUS"  # trackio's own default loses the last commits with the power
REMOTES = ("TRACKIO_BUCKET_ID", "TRACKIO_DATASET_ID")  # from which trackio would fetch before it writes
NAME_BYTES_MAX = 200
REASON_CHARS_MAX = 300
_LOADING = threading.Lock()


def folder_of(settings: Mapping[str, Any]) -> str:
    """The folder of the store, absolute; empty when somebody gave an empty one."""
    given = settings.get("dir")
    if given is None:
        given = os.environ.get(VARIABLE) or _default_folder()
    return os.path.abspath(os.path.expanduser(str(given))) if str(given).strip() else ""


def decided(settings: Mapping[str, Any]) -> Decided:
    """Settings with the folder that is meant, and a word about it when nobody named one."""
    folder = folder_of(settings)
    notes = []
    if settings.get("dir") is None and not os.environ.get(VARIABLE):
        notes.append(f"no folder is set, trackio runs go to {folder}; look: {VARIABLE}={folder} trackio show")
    return Decided({**settings, "dir": folder}, tuple(notes))


def _default_folder() -> str:
    """Where trackio would go: a folder of the Hugging Face cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.join(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface"), "trackio")


class Store:
    """One run in the store. `open` and `write` return None when all went well."""

    def __init__(self, folder: str, run: RunInfo) -> None:
        self._folder = folder
        self._project = run.project
        self._run_name = visible(run.experiment) or "unnamed"
        self._run_id = visible(run.run_id)

    def open(self) -> Outcome | None:
        """Make the project's database, if it is not there."""
        return self._tried(lambda module: module.SQLiteStorage.init_db(self._name(module)))

    def write(self, plan: Plan) -> Outcome | None:
        """Commit everything that is planned; rows that are there already stay as they are."""

        def send(module: Any) -> None:
            place = {"project": self._name(module), "run": self._run_name, "run_id": self._run_id}
            if plan.rows:
                module.SQLiteStorage.bulk_log(
                    **place,
                    metrics_list=[row.values for row in plan.rows],
                    steps=[row.step for row in plan.rows],
                    timestamps=[row.timestamp for row in plan.rows],
                    log_ids=[row.log_id for row in plan.rows],
                    config=plan.config,
                )
            if plan.facts:
                module.SQLiteStorage.bulk_log_system(
                    **place,
                    metrics_list=[row.values for row in plan.facts],
                    timestamps=[row.timestamp for row in plan.facts],
                    log_ids=[row.log_id for row in plan.facts],
                )
            for alert in plan.alerts:
                module.SQLiteStorage.bulk_alert(
                    **place,
                    titles=[alert.title],
                    texts=[alert.text],
                    levels=[alert.level],
                    steps=[alert.step],
                    timestamps=[alert.timestamp],
                    alert_ids=[alert.log_id],
                )

        return self._tried(send)

    def _name(self, module: Any) -> str:
        return project_name(self._project, getattr(module.SQLiteStorage, "validate_project_name", None))

    def _tried(self, action: Callable[[Any], object]) -> Outcome | None:
        try:
            module = storage_module(self._folder)
        except ImportError as error:
            return Park(f"trackio cannot be loaded: {_line(error)}")
        try:
            action(module)
        except OSError as error:
            return Retry(f"cannot write to {self._folder}: {_line(error)}")
        except module.sqlite3.OperationalError as error:  # locked, full, read-only, cannot be opened
            return Retry(f"cannot write to {self._folder}: {_line(error)}")
        except module.sqlite3.DatabaseError as error:
            return Park(f"the database of project {self._project!r} in {self._folder} is broken: {_line(error)}")
        return None


def storage_module(folder: str) -> Any:
    """trackio's module that stores, set to `folder`. Raises ImportError."""
    with _LOADING:
        os.environ[VARIABLE] = folder
        os.environ.setdefault(DURABILITY, "full")
        for name in REMOTES:
            os.environ.pop(name, None)
        from trackio import sqlite_storage, utils

        for module in (sqlite_storage, utils):
            module.TRACKIO_DIR = Path(folder)
    return sqlite_storage


def project_name(project: str, validate: Callable[[str], object] | None) -> str:
    """The name of a project's database. `validate`: trackio's own check, which raises ValueError."""
    kept = "".join(sign for sign in visible(project) if sign.isalnum() or sign in "-_") or "default"
    name = component(kept, re.compile("\0"), bytes_max=NAME_BYTES_MAX)
    try:
        if validate is not None:
            validate(name)
    except ValueError:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"project-{name}-{digest}"
    return name


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:REASON_CHARS_MAX]
