"""What the mlflow backend is tested against: a real server and a database, and what they hold.

MLflow is loaded into the test process. Environment and database connections are put back afterwards.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.batches import run_info
from support.memory import FakeMemory
from support.mlflow_server import MlflowServer
from verl_shipper.backends.base import Batch, Delivered, RunInfo
from verl_shipper.backends.mlflow import MlflowBackend


@dataclass(frozen=True)
class TestTracker:
    """One tracker and one project of its own in it."""

    __test__ = False

    uri: str
    project: str

    @property
    def is_http(self) -> bool:
        return self.uri.startswith("http")

    @property
    def client(self) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=self.uri)

    @property
    def experiment_id(self) -> str:
        return str(self.client.get_experiment_by_name(self.project).experiment_id)

    def run_info(self, own_id: str = "run1") -> RunInfo:
        return run_info(project=self.project, run_id=own_id)

    def backend(self, memory: FakeMemory | None = None, own_id: str = "run1", **settings: Any) -> MlflowBackend:
        """A backend that is not open yet."""
        settings.setdefault("tracking_uri", self.uri)
        return MlflowBackend(self.run_info(own_id), settings, memory or FakeMemory())

    def opened(self, memory: FakeMemory | None = None, own_id: str = "run1", **settings: Any) -> MlflowBackend:
        backend = self.backend(memory, own_id, **settings)
        assert backend.open() is None
        return backend

    def runs(self) -> list[Any]:
        return list(self.client.search_runs([self.experiment_id]))

    def run(self) -> Any:
        (run,) = self.runs()
        return run

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of every point of a metric, in order of steps."""
        history = self.client.get_metric_history(self.run().info.run_id, key)
        return sorted((point.step, point.value) for point in history)

    def artifacts(self, folder: str) -> list[str]:
        """Paths of all files below a folder."""
        found: list[str] = []
        for entry in self.client.list_artifacts(self.run().info.run_id, folder):
            found += self.artifacts(entry.path) if entry.is_dir else [entry.path]
        return sorted(found)

    def artifact(self, path: str, folder: Path) -> str:
        return Path(self.client.download_artifacts(self.run().info.run_id, path, str(folder))).read_text("utf-8")

    def traces(self, **search: Any) -> list[Any]:
        return list(self.client.search_traces(locations=[self.experiment_id], **search))


def delivered(backend: MlflowBackend, sent: Batch, memory: FakeMemory | None = None) -> Delivered:
    """Upload, and commit as the lane does when a memory is given."""
    outcome = backend.upload(sent)
    assert isinstance(outcome, Delivered), outcome
    if memory is not None:
        memory.remember(outcome.remember)
    return outcome


@pytest.fixture
def own_environment() -> Iterator[None]:
    """The backend sets variables of its process, which here is the tests' process."""
    before = dict(os.environ)
    for name in ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "_MLFLOW_SERVER_ARTIFACT_ROOT"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database as MLflow makes it, which takes seconds; tests get copies."""
    path = tmp_path_factory.mktemp("mlflow_database") / "empty.db"
    TestTracker(f"sqlite:///{path}", "unused").opened()
    _dispose(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session", params=["http", "sqlite"])
def origin(request: pytest.FixtureRequest) -> str | Path:
    """A server's URI, then an empty database. Of the session, so that the server is no leak of a single test."""
    if request.param == "http":
        server: MlflowServer = request.getfixturevalue("mlflow_server")
        return server.uri
    database: Path = request.getfixturevalue("empty_database")
    return database


@pytest.fixture
def tracker(origin: str | Path, own_environment: None, tmp_path: Path) -> Iterator[TestTracker]:
    """A server, then a database."""
    project = f"project-{uuid.uuid4().hex[:8]}"
    if isinstance(origin, str):
        yield TestTracker(origin, project)
        return
    path = tmp_path / "db" / "mlflow.db"
    path.parent.mkdir()
    shutil.copy(origin, path)
    yield TestTracker(f"sqlite:///{path}", project)
    _dispose(f"sqlite:///{path}")


def _dispose(uri: str) -> None:
    from mlflow.tracking import MlflowClient

    MlflowClient(tracking_uri=uri)._tracking_client.store.engine.dispose()
