"""Traces of a real profiler and snapshots of memory: whole, named apart, nothing left behind, never an exception."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unit.client.spooled import bodies
from verl_shipper_client import Client
from verl_shipper_client.torch import memory_snapshot, profiler_handler
from verl_shipper_spool.record import RecordKind

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(120),
    # torch's own; as an error in the middle of a cycle it ends in a segmentation fault of torch.
    pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning"),
]
NODE = os.uname().nodename


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def client(spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    made = Client("p", "e", rank=3, world=4, spool_dir=spool)
    yield made
    made.finish(timeout_s=0)


def _left(tmp_path: Path) -> list[str]:
    """What of ours is among the temporary files; torch leaves some of its own."""
    return [name for name in os.listdir(tmp_path / "tmp") if name.startswith("verl-shipper")]


def _files(spool: Path) -> dict[str, bytes]:
    """Name and content of every file in a spool, put together and checked."""
    parts: dict[bytes, list[dict[Any, Any]]] = {}
    for body in bodies(spool, RecordKind.FILE):
        parts.setdefault(body["file_id"], []).append(body)
    found = {}
    for each in parts.values():
        content = b"".join(part["data"] for part in each)
        assert (each[-1]["size"], each[-1]["sha256"]) == (len(content), hashlib.sha256(content).digest())
        assert each[0]["name"] not in found
        found[each[0]["name"]] = content
    return found


@pytest.fixture
def torch() -> Any:
    return importlib.import_module("torch")  # the file is read where there is none, too, to be left out


def _train(torch: Any, steps: int, **arguments: Any) -> None:
    model = torch.nn.Linear(8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **arguments) as profiler:
        for _ in range(steps):
            model(torch.ones(2, 8)).sum().backward()
            profiler.step()


def test_each_cycle_of_a_schedule_becomes_a_file_under_its_step(
    torch: Any, client: Client, spool: Path, tmp_path: Path
) -> None:
    plan = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)

    _train(torch, 10, schedule=plan, on_trace_ready=profiler_handler(client))

    files = _files(spool)
    assert set(files) == {f"{NODE}.rank3.step{step}.pt.trace.json.gz" for step in (4, 8)}
    for content in files.values():
        trace = json.loads(gzip.decompress(content))
        assert any("aten::" in str(event.get("name")) for event in trace["traceEvents"])
    steps = {record["purpose"] for record in bodies(spool, RecordKind.FILE)}
    assert steps == {"profile"}
    assert _left(tmp_path) == []
    assert client.errors == 0


def test_traces_of_the_same_step_and_of_named_profilers_stay_apart(torch: Any, client: Client, spool: Path) -> None:
    handler = profiler_handler(client, name="forward")

    for _ in range(2):
        _train(torch, 0, on_trace_ready=handler)

    stem = f"forward.{NODE}.rank3.step0"
    assert set(_files(spool)) == {f"{stem}.pt.trace.json.gz", f"{stem}.2.pt.trace.json.gz"}


class _Profiler:
    """Writes what it is told to, as torch on a disk that is full or broken."""

    step_num = 7

    def __init__(self, content: bytes, error: Exception | None = None) -> None:
        self._content, self._error = content, error

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_bytes(self._content)
        Path(f"{path}.tmp").write_bytes(b"left")
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    "profiler",
    [
        _Profiler(b'{"traceEvents": [', RuntimeError("Trace is already saved.")),
        _Profiler(b'{"traceEvents": [{"a"'),
        _Profiler(b""),
        object(),
    ],
    ids=["raises", "cut short", "empty", "none"],
)
def test_a_trace_that_fails_is_counted_and_leaves_nothing(
    client: Client, spool: Path, tmp_path: Path, profiler: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    profiler_handler(client)(profiler)

    assert client.errors == 1
    assert _files(spool) == {}
    assert _left(tmp_path) == []
    assert "profiler_handler failed" in capfd.readouterr().err


def test_a_snapshot_of_memory_becomes_a_file(
    torch: Any, client: Client, spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dump(path: str) -> None:
        Path(path).write_bytes(pickle.dumps({"segments": []}))

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)

    memory_snapshot(client, step=5)
    memory_snapshot(client, name="after")

    files = _files(spool)
    assert set(files) == {f"{NODE}.rank3.step5.pickle.gz", f"after.{NODE}.rank3.pickle.gz"}
    assert all(pickle.loads(gzip.decompress(content)) == {"segments": []} for content in files.values())
    assert _left(tmp_path) == []


def test_a_snapshot_without_a_gpu_is_counted_and_raises_nothing(torch: Any, client: Client) -> None:
    memory_snapshot(client, step=1)

    assert client.errors == int(not torch.cuda.is_available())
