"""A real daemon under test: `verl-shipper run` in a session of its own, killed and watched as an operator would.

Promises: `start` returns when the daemon said that it is ready; `close` leaves no process of ours behind.
Must not know: what a test expects. On failure: AssertionError with the daemon's last words.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

from support.oracle import Status
from support.processes import children, command_line, descendants, is_alive, kill, wait_for, wait_gone
from support.site import Site
from verl_shipper.status import report

SHIPPER = [sys.executable, "-m", "verl_shipper"]
READY = re.compile(r"\bready\b")
READY_S = 30.0
STOP_S = 10.0  # the promise: SIGTERM ends a daemon in less


def without_samples(arguments: Sequence[str]) -> list[str]:
    """Tests count records: this node's own facts are none of them, unless a test speaks of them itself."""
    is_told = any("system_metrics" in argument for argument in arguments)
    return [] if is_told else ["--set", "system_metrics.enabled=false"]


def shipper(
    site: Site, *arguments: str | Path, timeout_s: float = 60.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one `verl-shipper` command to its end."""
    given = [str(argument) for argument in arguments]
    command = [*SHIPPER, *given[:1], *(without_samples(given) if given[:1] == ["run"] else ()), *given[1:]]
    return subprocess.run(
        command,
        env=site.env(**(env or {})),
        cwd=site.root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@final
class Daemon:
    """`verl-shipper run ARGUMENTS`, restartable. Standard error of all its lives is in `log`."""

    def __init__(
        self,
        site: Site,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        launcher: Sequence[str] = SHIPPER,
        name: str = "daemon",
    ) -> None:
        self.site = site
        self.arguments = [str(argument) for argument in arguments]
        self.log = site.root / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._env = dict(env or {})
        self._launcher = list(launcher)
        self._log_start_bytes = 0
        self._known: set[int] = set()  # every lane child ever seen

    def __enter__(self) -> Daemon:
        return self if self.is_running() else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self.process is not None, "not started"
        return self.process.pid

    def start(self, *, wait: bool = True) -> Daemon:
        """Start it (again). With `wait`, return when it is ready."""
        assert self.process is None or self.process.poll() is not None, "already running"
        self._log_start_bytes = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*self._launcher, "run", *without_samples(self.arguments), *self.arguments],
                env=self.site.env(**self._env),
                cwd=self.site.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        def ready() -> bool:
            if READY.search(self.words()):
                return True
            assert self.process is not None
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.words()}"
            return False

        try:
            wait_for(ready, timeout_s, "daemon is ready", pause_s=0.02)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.words()}") from None

    def words(self) -> str:
        """What this life of the daemon has printed so far."""
        with open(self.log, "rb") as log:
            log.seek(self._log_start_bytes)
            return log.read().decode(errors="replace")

    def all_words(self) -> str:
        """What all lives have printed."""
        return self.log.read_text(errors="replace")

    def lanes(self) -> list[int]:
        """Lane children that live now."""
        found = [pid for pid in children(self.pid) if "lane" in command_line(pid)]
        self._known.update(descendants(self.pid))
        return found

    def kill(self) -> None:
        """SIGKILL to the daemon alone; its lanes must notice by themselves."""
        self._known.update(descendants(self.pid))
        kill(self.pid)
        assert self.process is not None
        self.process.wait(timeout=10)

    def stop(self, timeout_s: float = STOP_S, number: int = signal.SIGTERM) -> float:
        """SIGTERM; returns the seconds it took. Fails when the daemon is still there after `timeout_s`."""
        assert self.process is not None
        self._known.update(descendants(self.pid))
        began_s = time.monotonic()
        kill(self.pid, number)
        try:
            self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"SIGTERM did not end it in {timeout_s} s:\n{self.words()[-2000:]}") from None
        return time.monotonic() - began_s

    def pause(self) -> None:
        """SIGSTOP: there, but deaf."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def status(self) -> Status:
        """`verl-shipper status --json`, parsed strictly."""
        result = shipper(self.site, "status", "--json", "--state-dir", self.state_dir(), timeout_s=30)
        assert result.returncode == 0, f"status: {result.returncode}\n{result.stderr}\n{self.words()[-2000:]}"
        status: Status = json.loads(result.stdout)
        return status

    def state_dir(self) -> str:
        if "--state-dir" in self.arguments:
            return self.arguments[self.arguments.index("--state-dir") + 1]
        return str(self.site.state)

    def wait_until(
        self, condition: Callable[[Status], object], timeout_s: float = 60.0, what: str = "status"
    ) -> Status:
        """Poll until `condition` holds for what `verl-shipper status --json` prints; returns that status.

        While it does not hold we look by a call, not a command: a hundred interpreters would slow the daemon down.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            status = report(self.state_dir()).to_json()
            if condition(status):
                status = self.status()
                if condition(status):
                    return status
            assert self.is_running(), f"the daemon has ended while we wait for {what}:\n{self.words()[-3000:]}"
            if time.monotonic() > deadline_s:
                words = self.words()[-3000:]
                raise AssertionError(
                    f"not within {timeout_s} s: {what}\n{json.dumps(_totals(status), indent=1)}\n{words}"
                )
            time.sleep(0.05)

    def wait_settled(
        self, logged: int = 1, *, backends: Sequence[str] | None = None, timeout_s: float = 60.0
    ) -> Status:
        """Wait until the named backends (default: all) know of `logged` records or more and none is pending."""

        def settled(status: Status) -> bool:
            names = status["backends"].keys() if backends is None else backends
            figures = [status["backends"].get(name, {"logged": 0, "pending": 1}) for name in names]
            return bool(figures) and all(figure["logged"] >= logged and figure["pending"] == 0 for figure in figures)

        return self.wait_until(settled, timeout_s, f"{logged} records logged and none pending")

    def close(self) -> None:
        """End everything this daemon started, whatever state it is in."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self._known.update(descendants(self.pid))
            kill(self.pid)
            self.process.wait(timeout=10)
        try:
            wait_gone(self._known, 10)
        finally:
            for pid in self._known:
                if is_alive(pid) and "python" in command_line(pid):
                    kill(pid)


def _totals(status: Status) -> Status:
    return {
        name: {key: value for key, value in figures.items() if key != "runs"}
        for name, figures in status.get("backends", {}).items()
    }
