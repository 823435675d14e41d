"""The supervisor: one child process per lane (or the collector), started again when it dies or stops answering.

    RUNNING ─ exit or silence for SILENT_S ─▶ WAITING (backoff) ─▶ RUNNING
    RUNNING ─ other orders, or none any more ─▶ ENDING ─ exit ─▶ RUNNING at once, or gone
    RUNNING ─ exit with 0, orders that end ─▶ done

Nothing here waits but `stop`: a lane that is told to end has STOP_S, then it is killed.

Must not know: what a child does. On failure to start a process: like a death, with backoff. A lane's exit costs
nothing: its outbox and cursors are on disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_shipper.lane_process import LaneOrder
from verl_shipper.policy.backoff import delay_s

log = logging.getLogger(__name__)

SILENT_S = 60.0  # a lane beats every second; loading a tracker's package takes a few
SAID_BYTES_MAX = 65536  # what a pipe holds
HEALTHY_S = 30.0  # having lived so long, a lane's next death is its first again
STOP_S = 5.0  # from "stop" to SIGKILL


class ChildOrders(Protocol):
    """What a child is to do. `module`: what runs it. `ends`: it has an end of its own, after which it is done."""

    @property
    def module(self) -> str: ...

    @property
    def ends(self) -> bool: ...

    def line(self, name: str, state_dir: str, spool_dir: str, beat_fd: int, log_level: str) -> bytes:
        """What it reads first."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a lane is to do: its settings, and all else that LaneOrder carries, by name."""

    settings: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return "verl_shipper.lane_process"

    @property
    def ends(self) -> bool:
        return False

    def line(self, name: str, state_dir: str, spool_dir: str, beat_fd: int, log_level: str) -> bytes:
        return LaneOrder(name, dict(self.settings), state_dir, spool_dir, beat_fd, log_level, **self.more).to_line()


@dataclass(slots=True)
class Child:
    """A process, or the time until its next start. `ending_s`: when it was told to end, 0 when it was not. `said`: what
    it wrote last instead of a mere beat. `done`: it came to its own end."""

    backend: str
    orders: ChildOrders
    process: subprocess.Popen[bytes] | None = None
    beat_fd: int = -1
    beat_at_s: float = 0.0
    started_s: float = 0.0
    start_at_s: float = 0.0
    deaths: int = 0
    trouble: str = ""  # how it ended the last time, until it has lived long enough to be forgiven
    ending_s: float = 0.0
    is_wanted: bool = True  # whether another process follows
    said: bytes = b""
    done: bool = False


@dataclass(slots=True)
class Supervisor:
    """Keeps the lanes of a daemon alive."""

    state_dir: str
    spool_dir: str
    log_level: str
    children: dict[str, Child] = field(default_factory=dict)
    role: str = "lane"  # for people

    def apply(self, wanted: Mapping[str, ChildOrders], log_level: str, now_s: float) -> None:
        """From now on these lanes and no others: the rest ends, those with other orders are replaced."""
        is_louder = log_level != self.log_level
        self.log_level = log_level
        for backend, orders in wanted.items():
            child = self.children.get(backend)
            if child is None:
                self.children[backend] = Child(backend, orders)
                continue
            child.is_wanted = True
            if orders != child.orders or is_louder:
                child.orders, child.done, child.said = orders, False, b""
                _tell_to_end(child, now_s)
        for backend, child in list(self.children.items()):
            if backend not in wanted:
                child.is_wanted = False
                _tell_to_end(child, now_s)
                if child.process is None:
                    del self.children[backend]

    def watch(self, now_s: float) -> None:
        """Start what is due, hear beats, replace the dead and the silent."""
        for child in list(self.children.values()):
            if child.process is None:
                if now_s >= child.start_at_s and not child.done:
                    self._start(child, now_s)
                continue
            if child.ending_s:
                self._see_off(child, now_s)
                continue
            self._hear(child, now_s)
            code = child.process.poll()
            if code == 0 and child.orders.ends:
                _let_go(child)
                child.done = True
            elif code is not None:
                self._bury(child, now_s, f"ended with code {code}")
            elif child.trouble and now_s - child.started_s > HEALTHY_S:
                child.trouble = ""
            elif now_s - child.beat_at_s > SILENT_S:
                log.warning("%s did not answer for %g s and is killed", self._called(child), SILENT_S)
                child.process.kill()  # buried when it is gone: a process inside a dead disk may take its time
                child.beat_at_s = now_s

    def pids(self) -> dict[str, int]:
        return {name: child.process.pid for name, child in self.children.items() if child.process is not None}

    def troubles(self) -> list[str]:
        """Lanes that do not stay alive, for `status`."""
        return [child.trouble for child in self.children.values() if child.trouble]

    def tell_to_stop(self) -> None:
        """Ask all to end, and wait for none."""
        for child in self.children.values():
            _close_orders(child)

    def stop(self, within_s: float | None = None) -> None:
        """Ask all to end; kill what does not within STOP_S."""
        self.tell_to_stop()
        deadline_s = time.monotonic() + (STOP_S if within_s is None else within_s)
        for child in self.children.values():
            if child.process is None:
                continue
            try:
                child.process.wait(max(deadline_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                _end(child.process)
            os.close(child.beat_fd)
            child.process = None

    def _start(self, child: Child, now_s: float) -> None:
        try:
            read_fd, write_fd = os.pipe()
        except OSError as error:
            self._wait(child, now_s, f"cannot start: {error}")
            return
        os.set_blocking(read_fd, False)
        process = None
        line = child.orders.line(child.backend, self.state_dir, self.spool_dir, write_fd, self.log_level)
        try:
            # A session of its own: a Ctrl-C at the terminal reaches the daemon, which stops its lanes in order.
            process = subprocess.Popen(
                [sys.executable, "-m", child.orders.module],
                stdin=subprocess.PIPE,
                pass_fds=[write_fd],
                start_new_session=True,
            )
            assert process.stdin is not None, "asked for a pipe"
            process.stdin.write(line)
            process.stdin.flush()
        except OSError as error:
            os.close(read_fd)
            if process is not None:
                _end(process)
            self._wait(child, now_s, f"cannot start: {error}")
            return
        finally:
            os.close(write_fd)
        child.process = process
        child.beat_fd = read_fd
        child.beat_at_s = child.started_s = now_s

    def _hear(self, child: Child, now_s: float) -> None:
        try:
            words = os.read(child.beat_fd, SAID_BYTES_MAX)
            if words:
                child.beat_at_s = now_s
            child.said = words.splitlines()[-1] if words.endswith(b"\n") else child.said
        except BlockingIOError:
            return

    def _see_off(self, child: Child, now_s: float) -> None:
        """A lane that was told to end: it is gone, or has had its time."""
        assert child.process is not None, "nobody to see off"
        if child.process.poll() is not None:
            _let_go(child)
            child.ending_s = 0.0
            if child.is_wanted:
                self._start(child, now_s)
            else:
                del self.children[child.backend]
        elif now_s - child.ending_s > STOP_S:
            child.process.kill()

    def _bury(self, child: Child, now_s: float, how: str) -> None:
        _let_go(child)
        if now_s - child.started_s > HEALTHY_S:
            child.deaths = 0
        self._wait(child, now_s, how)

    def _wait(self, child: Child, now_s: float, how: str) -> None:
        child.deaths += 1
        pause_s = delay_s(child.deaths, random.random())  # noqa: S311 - jitter
        child.start_at_s = now_s + pause_s
        child.trouble = f"{self._called(child)} {how}, {child.deaths} times"
        log.warning("%s %s; starting it again in %.1f s", self._called(child), how, pause_s)

    def _called(self, child: Child) -> str:
        return f"{self.role} {child.backend}" if self.role else child.backend


def _tell_to_end(child: Child, now_s: float) -> None:
    """Other orders may be what a lane needs that does not stay alive: what was, is forgotten."""
    child.deaths, child.start_at_s, child.trouble = 0, 0.0, ""
    if child.process is not None and not child.ending_s:
        child.ending_s = now_s
        _close_orders(child)


def _close_orders(child: Child) -> None:
    """End of file is the order to stop."""
    if child.process is not None and child.process.stdin is not None:
        try:
            child.process.stdin.close()
        except OSError as error:
            log.debug("%s: %s", child.backend, error)


def _let_go(child: Child) -> None:
    """Of a process that has ended."""
    _close_orders(child)
    os.close(child.beat_fd)
    child.process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and do not wait for ever for one that even that does not end."""
    process.kill()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
