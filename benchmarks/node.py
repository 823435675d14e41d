"""A node for a benchmark: a folder with spool and state, and a real daemon on it.

Must not know: what is measured. On failure: RuntimeError with the daemon's own last words.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

READY_S_MAX = 30.0
END_S_MAX = 20.0
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
WITHOUT_SAMPLES = ("--set", "system_metrics.enabled=no")  # what is measured is what was logged


class Node:
    """Places and environment; as a context manager it ends the daemon."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.spool = os.path.join(root, "spool")
        self.state = os.path.join(root, "state")
        self.home = os.path.join(root, "home")
        self._daemon: subprocess.Popen[bytes] | None = None
        self._words_path = os.path.join(root, "daemon.log")
        os.makedirs(self.home, exist_ok=True)

    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VERL_SHIPPER_")}
        ours = {"VERL_SHIPPER_SPOOL_DIR": self.spool, "VERL_SHIPPER_STATE_DIR": self.state}
        return kept | ours | {"HOME": self.home}

    def start(self, *arguments: str) -> int:
        """Start `verl-shipper run`, wait until it says that it is ready, return its pid."""
        words = os.open(self._words_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._daemon = subprocess.Popen(
                [*_command(), "run", "--set", "system_metrics.enabled=no", *arguments],
                env=self.env(),
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
            )
        finally:
            os.close(words)
        deadline_s = time.monotonic() + READY_S_MAX
        while "ready" not in self._words():
            if self._daemon.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the daemon did not become ready: {self._words()[-500:]}")
            time.sleep(0.02)
        return self._daemon.pid

    def send_signal(self, number: int) -> None:
        assert self._daemon is not None
        self._daemon.send_signal(number)
        if number == signal.SIGSTOP:
            while process_state(self._daemon.pid) != "T":
                time.sleep(0.001)

    def status(self) -> dict[str, Any]:
        command = [*_command(), "status", "--json"]
        told = subprocess.run(command, env=self.env(), capture_output=True, check=True, timeout=60.0)
        answer: dict[str, Any] = json.loads(told.stdout)
        return answer

    def stop(self) -> None:
        if self._daemon is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._daemon.send_signal(signal.SIGCONT)
            self._daemon.terminate()
        try:
            self._daemon.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()
        self._daemon = None

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _words(self) -> str:
        with open(self._words_path, encoding="utf-8", errors="replace") as file:
            return file.read()


def _command() -> list[str]:
    beside = os.path.join(os.path.dirname(sys.executable), "verl-shipper")
    return [beside] if os.path.exists(beside) else ["verl-shipper"]


def process_state(pid: int) -> str:
    return _stat_fields(pid)[0]


def cpu_s(pid: int) -> float:
    """CPU seconds, user and system, of one process with all its threads and without its children."""
    fields = _stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def rss_bytes(pid: int, *, peak: bool = False) -> int:
    wanted = "VmHWM:" if peak else "VmRSS:"
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(wanted):
                return int(line.split()[1]) * 1024
    return 0


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the name; the first is the state."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def machine() -> dict[str, str | int | float]:
    """What a reader must know to compare figures."""
    model = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        model = names[0] if names else ""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "load_average_5min": os.getloadavg()[1],
    }
