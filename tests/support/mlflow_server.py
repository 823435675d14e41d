"""A real `mlflow server` for tests: sqlite store and artifacts in one folder, one worker, a free port.

    pytest_plugins = ["support.mlflow_server"]      in a test module that wants the session-wide fixture `mlflow_server`
    MlflowServer(folder)                            for a server of one's own that may be killed and restarted

Keeps its port over `kill` and `start`, so that a backend finds it again. Leaves no process behind: the server and its
workers are one process group, ended by its id.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

START_S_MAX = 120.0
STOP_S_MAX = 15.0
PORTS = (10_240, 32_768)  # the kernel's own begin behind (ip_local_port_range)

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}


class MlflowServer:
    """One server with its state in `folder`. Not started by the constructor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.log_path = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, or start again after `kill` or `stop`; returns when /health answers."""
        assert self._process is None
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *self._arguments()],
                cwd=self.folder,
                env=os.environ | QUIET,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_for_health()

    def kill(self) -> None:
        """SIGKILL, as power loss of the server's process would be."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP: connections are accepted by the kernel and never answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _arguments(self) -> list[str]:
        return [
            "--host=127.0.0.1",
            f"--port={self.port}",
            "--workers=1",
            f"--backend-store-uri=sqlite:///{self.folder}/server.db",
            f"--artifacts-destination={self.folder}/artifacts",
        ]

    def _wait_for_health(self) -> None:
        deadline = time.monotonic() + START_S_MAX
        assert self._process is not None
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.1)
        self.kill()
        raise AssertionError(f"mlflow server did not start: {self.log_path.read_text(errors='replace')[-2000:]}")

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S_MAX)
        # Workers may outlive their parent; the group's id stays theirs until the last one is gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S_MAX)


def free_port() -> int:
    """A port that nobody has now and that the kernel gives to nobody: below the range of outgoing connections.

    A server that is killed and started again must find its port free, whatever other tests connect to meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """One healthy server for the whole session. Use projects of your own; do not kill it."""
    server = MlflowServer(tmp_path_factory.mktemp("mlflow_server"))
    try:
        server.start()
        yield server
    finally:
        server.stop()
