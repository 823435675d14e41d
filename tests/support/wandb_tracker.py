"""What the wandb backend is tested with: our server, a run of one's own in it, a memory that outlives backends."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

from servers.process import ServerProcess
from support import wandb_reader
from support.batches import item, run_info
from support.memory import FakeMemory
from verl_shipper.backends.base import Batch, Delivered, Item, Outcome, Reject, RunInfo
from verl_shipper.backends.wandb import WandbBackend
from verl_shipper_spool.record import RecordKind

KEY = "k" * 40
PROJECT = "proj"


class WandbTracker:
    """One run at one server."""

    def __init__(self, server: ServerProcess, folder: Path, run_id: str | None = None) -> None:
        self.server = server
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.memory = FakeMemory()
        self.run: RunInfo = run_info(project=PROJECT, run_id=run_id or f"r{uuid.uuid4().hex[:8]}")
        self.key = folder / "key"
        self.write_key(KEY)
        self._made: list[WandbBackend] = []

    def write_key(self, key: str) -> None:
        self.key.touch(0o600)
        self.key.write_text(key)

    def backend(self, **settings: Any) -> WandbBackend:
        """A backend that is not open yet."""
        base = {
            "base_url": self.server.url,
            "api_key_file": str(self.key),
            "work_dir": str(self.folder / "work"),
            "settle_s": 0.5,
        }
        made = WandbBackend(self.run, {**base, **settings}, self.memory)
        self._made.append(made)
        return made

    def deliver(self, backend: WandbBackend, sent: Batch, timeout_s: float = 60.0) -> list[Outcome]:
        """Upload until delivered, and commit as the lane does; returns what was answered before."""
        before: list[Outcome] = []
        deadline_s = time.monotonic() + timeout_s
        while not isinstance(outcome := backend.upload(sent), Delivered):
            before.append(outcome)
            assert not isinstance(outcome, Reject), outcome
            assert time.monotonic() < deadline_s, before[-5:]
            time.sleep(0.3)
        self.memory.remember(outcome.remember)
        return before

    def at_server(self) -> dict[str, Any]:
        return wandb_reader.run(self.server, PROJECT, self.run.run_id)

    def rows(self) -> list[dict[str, Any]]:
        return wandb_reader.rows(self.server, PROJECT, self.run.run_id)

    def values(self, key: str) -> list[tuple[int, Any]]:
        """(step, value) of every row that has the key, in order of lines."""
        return [(row["trainer/global_step"], row[key]) for row in self.rows() if key in row]

    def assert_clean(self) -> None:
        """No row was written twice with different content, none left out."""
        run = self.at_server()
        assert (run["conflicts"], run["gaps"]) == (0, 0), run

    def close(self) -> None:
        for backend in self._made:
            backend.close()


def start(ordinal: int = 0, *, rank: int = 0, **config: Any) -> Item:
    return item(RecordKind.RUN_START, {"config": config}, ordinal=ordinal, step=None, rank=rank)


def finish(ordinal: int, exit_code: int | None = 0) -> Item:
    return item(RecordKind.RUN_FINISH, {"exit_code": exit_code, "reason": ""}, ordinal=ordinal, step=None)


def generations(ordinal: int, rows: list[list[Any]], step: int = 0, part: int = 0) -> Item:
    body = {"columns": ["input", "output", "score"], "rows": rows, "part": part, "parts": 1, "call": 0}
    return item(RecordKind.GENERATIONS, body, ordinal=ordinal, step=step)


def kill_child(backend: WandbBackend) -> None:
    """SIGKILL to the SDK's Python process; its helper must notice by itself."""
    run = backend._run
    if run is not None and run._child is not None:
        os.kill(run._child.pid, signal.SIGKILL)
