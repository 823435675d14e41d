"""A trackio backend over a real store in a folder of the test, and its reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.batches import TIME_NS, item, run_info
from support.memory import FakeMemory
from support.trackio_reader import TrackioReader
from verl_shipper.backends.base import Batch, Delivered, RunInfo
from verl_shipper.backends.trackio import TrackioBackend
from verl_shipper_spool.record import RecordKind

IDS = {"trace_id": b"\x01" * 16, "span_id": b"\x02" * 8, "parent_id": b"\x03" * 8}


@pytest.fixture(autouse=True)
def away_from_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TRACKIO_DIR", "HF_HOME", "XDG_CACHE_HOME", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


@pytest.fixture
def backend(folder: Path, memory: FakeMemory) -> TrackioBackend:
    return made(folder, memory)


@pytest.fixture
def reader(folder: Path) -> TrackioReader:
    return TrackioReader(folder)


def made(folder: Path, memory: FakeMemory, run: RunInfo | None = None, **settings: Any) -> TrackioBackend:
    backend = TrackioBackend(run or run_info(), {"dir": str(folder), **settings}, memory)
    assert backend.open() is None
    return backend


def delivered(backend: TrackioBackend, sent: Batch, memory: FakeMemory | None = None) -> Delivered:
    outcome = backend.upload(sent)
    assert isinstance(outcome, Delivered), outcome
    if memory is not None:
        memory.remember(outcome.remember)
    return outcome


def start(config: dict[Any, Any], ordinal: int = 0, **place: Any) -> Any:
    return item(RecordKind.RUN_START, {"config": config}, ordinal=ordinal, step=None, **place)


def span(name: str, ordinal: int = 0, **body: Any) -> Any:
    times = {"start_ns": TIME_NS, "end_ns": TIME_NS + 1_500_000}
    step = body.pop("step", 5)
    return item(RecordKind.SPAN, {"name": name, "status": "ok", **IDS, **times, **body}, ordinal=ordinal, step=step)
