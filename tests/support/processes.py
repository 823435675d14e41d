"""Looking at processes through /proc: who is whose child, who still lives, how much memory.

Promises: a zombie counts as gone. Must not know: daemons, trainers. A process that vanishes while we look is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def wait_for(condition: Callable[[], object], timeout_s: float, what: str, pause_s: float = 0.05) -> None:
    """Poll until `condition()` is true; an AssertionError says what did not come within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(pause_s)


def is_alive(pid: int) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def children(pid: int) -> list[int]:
    """Direct children that still live."""
    return [child for child in _all_children(pid) if _stat(child)[:1] not in ([], ["Z"], ["X"])]


def zombies(pid: int) -> list[int]:
    """Direct children that ended and were not waited for."""
    return [child for child in _all_children(pid) if _stat(child)[:1] == ["Z"]]


def descendants(pid: int) -> list[int]:
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def rss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to one process; one that is gone already is what we wanted."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_gone(pids: Iterable[int], timeout_s: float) -> None:
    """Wait until none of `pids` lives."""
    watched = list(pids)

    def left() -> list[int]:
        return [pid for pid in watched if is_alive(pid)]

    try:
        wait_for(lambda: not left(), timeout_s, "processes end")
    except AssertionError:
        lines = [f"{pid}: {command_line(pid)}" for pid in left()]
        if lines:
            raise AssertionError(f"still alive after {timeout_s} s: {lines}") from None


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on: [state, parent, ...]; empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _all_children(pid: int) -> list[int]:
    """Children of all threads of a process, zombies too."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return sorted(found)
