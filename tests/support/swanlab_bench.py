"""One run of backend `swanlab` against our own server: short to write, judged by what the server holds.

    bench = SwanlabBench(server, tmp_path)
    backend = bench.backend()                    a new one with the same memory each time
    bench.deliver(backend, batch(...))           as a lane does it: until delivered, then remembered
    bench.points("loss"), bench.at_server()

Must not know: swanlab.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from servers.process import ServerProcess
from support import swanlab_reader
from support.batches import run_info
from support.memory import FakeMemory
from support.swanlab_reader import API_KEY
from verl_shipper.backends.base import Batch, Delivered, Outcome, Park, Reject, RunInfo
from verl_shipper.backends.swanlab import SwanlabBackend, cuid

DELIVER_S = 90.0


class SwanlabBench:
    """A server, a run of its own in it, and the backend's memory over all its lives."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.memory = FakeMemory()
        self.run: RunInfo = run_info(project="proj", run_id=f"r{uuid.uuid4().hex[:8]}")
        self.opened: list[SwanlabBackend] = []
        self.key_file = folder / "key"
        self.put_key(API_KEY)

    @property
    def cuid(self) -> str:
        return cuid(self.run.run_id)

    def put_key(self, key: str) -> None:
        self.key_file.touch(0o600)
        self.key_file.write_text(key)

    def settings(self, **more: Any) -> dict[str, Any]:
        return {
            "base_url": self.server.url,
            "api_key_file": str(self.key_file),
            "work_dir": str(self.folder / "work"),
            "log_dir": str(self.folder / "swanlog"),
            "settle_s": 0.5,
            **more,
        }

    def backend(self, **settings: Any) -> SwanlabBackend:
        made = SwanlabBackend(self.run, self.settings(**settings), self.memory)
        self.opened.append(made)
        return made

    def deliver(self, backend: SwanlabBackend, sent: Batch, *, seen: list[Outcome] | None = None) -> Delivered:
        """Upload until delivered, as a lane does: a Retry is obeyed, a Park looked at again soon."""
        deadline_s = time.monotonic() + DELIVER_S
        while time.monotonic() < deadline_s:
            outcome = backend.upload(sent)
            if seen is not None:
                seen.append(outcome)
            if isinstance(outcome, Delivered):
                self.memory.remember(outcome.remember)
                return outcome
            print(outcome)
            assert not isinstance(outcome, Reject), outcome
            time.sleep(0.5 if isinstance(outcome, Park) else outcome.after_s or 0.1)
        raise AssertionError("not delivered")

    def close(self) -> None:
        for backend in self.opened:
            backend.close()

    def at_server(self) -> dict[str, Any]:
        return swanlab_reader.run_state(self.server, self.cuid)

    def points(self, key: str) -> list[tuple[int, Any]]:
        return swanlab_reader.points(self.server, self.cuid, key)

    def media(self, key: str) -> list[tuple[int, list[bytes]]]:
        return swanlab_reader.media(self.server, self.cuid, key)

    def child_pid(self, backend: SwanlabBackend) -> int:
        """The process with the SDK."""
        run = backend._run
        assert run is not None
        assert run._child is not None
        return run._child.pid
