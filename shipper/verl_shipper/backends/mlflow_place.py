"""Where MLflow keeps runs: what a tracking URI means, and what is taken when there is none.

    http(s)://HOST         a server
    sqlite:///PATH         a database; artifacts beside it, in mlartifacts/
    a folder that is there, as ./mlruns, /data/mlruns, file:./mlruns or file:///data/mlruns
                           a database of ours inside it, mlflow.db, with artifacts/ beside it
    nothing                the same, in ./mlruns, if that is there: a folder, or a link to one on a big disk

MLflow's own folder store shows a point twice that is sent twice. So a folder gets a database, which `mlflow ui
--backend-store-uri sqlite:///mlruns/mlflow.db` shows; what the folder store has there stays as it is. Links are
followed once, when the configuration is loaded: the database knows its artifacts by their real place.

Must not know: the SDK. On failure: ConfigError.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from verl_shipper.backends.base import Decided
from verl_shipper.errors import ConfigError
from verl_shipper_spool.redact import scrub

# What MLflow itself can track to, besides sqlite and installed plugins.
SCHEMES = frozenset({"http", "https", "databricks", "databricks-uc", "uc", "mysql", "postgresql", "mssql"})
VARIABLE = "MLFLOW_TRACKING_URI"
WHERE = "backends.mlflow.tracking_uri"
DEFAULT_FOLDER = "mlruns"  # MLflow's own, in the working directory


@dataclass(frozen=True, slots=True)
class Store:
    """Where runs go. `folder`: the one that the database is in, when a folder was meant; else empty."""

    uri: str
    artifact_location: str | None
    folder: str = ""


def store_of(settings: Mapping[str, Any]) -> Store:
    """The store that counts; its URI is empty when there is none."""
    location = settings.get("artifact_location")
    uri = str(settings.get("tracking_uri") or os.environ.get(VARIABLE) or "")
    given = _folder_of(uri) if uri else DEFAULT_FOLDER
    if given is not None and os.path.isdir(given):
        folder = os.path.realpath(given)
        return Store(f"sqlite:///{folder}/mlflow.db", location or os.path.join(folder, "artifacts"), folder)
    scheme, separator, rest = uri.partition("://")
    return Store(f"{scheme}{separator}{rest.rstrip('/')}" if scheme in ("http", "https") else uri, location)


def decided(settings: Mapping[str, Any]) -> Decided:
    """Settings in which a folder is replaced by the database in it."""
    store = store_of(settings)
    if not store.folder:
        return Decided(settings)
    notes = []
    if not settings.get("tracking_uri") and not os.environ.get(VARIABLE):
        notes.append(f"no tracking URI is set, runs go to {store.uri}; look: mlflow ui --backend-store-uri {store.uri}")
    if any(Path(store.folder).glob("*/meta.yaml")):
        hint = "`mlflow migrate-filestore` copies them into a database"
        notes.append(
            f"{store.folder} holds runs of MLflow's old file store; they are not touched, and not shown; {hint}"
        )
    place = {"tracking_uri": store.uri, "artifact_location": store.artifact_location}
    return Decided({**settings, **place}, tuple(notes))


def check_uri(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a URI that cannot work."""
    uri = store_of(settings).uri
    scheme, separator, rest = uri.partition("://")
    if not uri:
        hint = f"set it, or {VARIABLE}, to http://HOST:PORT or sqlite:////PATH/mlflow.db; or mkdir ./{DEFAULT_FOLDER}"
        raise ConfigError("mlflow has no tracking URI", where=WHERE, hint=hint)
    if not separator or scheme == "file":
        hint = f"mkdir -p {scrub(_folder_of(uri) or uri)}, or use sqlite:////PATH/mlflow.db"
        raise ConfigError(f"mlflow's folder {scrub(uri)!r} does not exist", where=WHERE, hint=hint)
    if scheme.partition("+")[0] == "sqlite":
        if not rest.strip("/") or ":memory:" in rest:
            raise ConfigError(f"{scrub(uri)!r} names no file", where=WHERE, hint="use sqlite:////PATH/mlflow.db")
        if importlib.util.find_spec("sqlalchemy") is None:
            raise ConfigError("sqlite needs the full mlflow, not mlflow-skinny", hint="pip install mlflow")
    elif scheme.partition("+")[0] not in SCHEMES and scheme not in _plugin_schemes():
        hint = "use http://HOST:PORT or sqlite:////PATH/mlflow.db"
        raise ConfigError(f"mlflow knows no trackers at {scheme}://", where=WHERE, hint=hint)
    elif not rest.strip("/") and scheme in ("http", "https"):
        raise ConfigError(f"{scrub(uri)!r} names no host", where=WHERE, hint="use http://HOST:PORT")


def _folder_of(uri: str) -> str | None:
    """The folder that a URI means; None when it means something else."""
    if uri.startswith("file:"):
        return unquote(urlsplit(uri).path)
    return None if "://" in uri else os.path.expanduser(uri)


def _plugin_schemes() -> set[str]:
    return {entry.name for entry in entry_points(group="mlflow.tracking_store")}
