"""What the server has answered about every point that the SDK was given, kept in the SDK's process.

A point is known by (kind, key, index), as the server knows it. It waits until a POST that held it was answered with
2xx, or until the server refused it for good.

    Trouble       the lane
    key           is told to park: the key is refused
    gone          is told to park: run deleted, or a server that takes nothing
    rate          is told to come again later; nothing is sent until then
    road          is told to park: proxy or certificate, see road.py
    down          is told why nothing moves

Must not know: HTTP, the SDK. Never raises.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Point = tuple[str, str, int]
PARKS = frozenset({"key", "gone", "road"})  # troubles that only an operator can end


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why the server does not take what it is sent. `until_s`: monotonic time before which nothing is sent."""

    kind: str
    reason: str
    until_s: float = 0.0


class Ledger:
    """Used by the threads of the gateway and by the child's main thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times_ns: dict[Point, int] = {}  # of those that wait: when they were captured
        self._refused: dict[Point, str] = {}
        self._trouble: Trouble | None = None
        self.config_state = ""  # "", waiting, taken, refused
        self.end_state = ""  # the state that the server has taken

    def expect(self, points: Iterable[Point], time_ns: int) -> None:
        with self._lock:
            self._times_ns.update(dict.fromkeys(points, time_ns))

    def time_ns(self, point: Point) -> int | None:
        """When a waiting point was captured."""
        return self._times_ns.get(point)

    def took(self, points: Iterable[Point]) -> None:
        """The server has them."""
        with self._lock:
            for point in points:
                self._times_ns.pop(point, None)

    def refuse(self, points: Iterable[Point], reason: str) -> None:
        """The server will never take them."""
        with self._lock:
            for point in points:
                self._times_ns.pop(point, None)
                self._refused[point] = reason

    def trouble(self, kind: str, reason: str, hold_s: float = 0.0) -> None:
        """Note a trouble; one that parks stays until the process ends."""
        with self._lock:
            if self._trouble is None or self._trouble.kind not in PARKS:
                self._trouble = Trouble(kind, reason, time.monotonic() + hold_s)

    def well(self) -> None:
        """The server takes data."""
        with self._lock:
            if self._trouble is not None and self._trouble.kind not in PARKS:
                self._trouble = None

    def hold_s(self) -> float:
        """For how long nothing may be sent; infinite when the process has to end first."""
        trouble = self._trouble
        if trouble is None:
            return 0.0
        return math.inf if trouble.kind in PARKS else max(trouble.until_s - time.monotonic(), 0.0)

    def told(self, *, with_waiting: bool) -> dict[str, Any]:
        """Everything the lane wants to know. Refused points are told once."""
        with self._lock:
            refused, self._refused = self._refused, {}
            trouble = self._trouble
            return {
                "waiting": len(self._times_ns),
                "points": [list(point) for point in self._times_ns] if with_waiting else [],
                "refused": [[*point, reason] for point, reason in refused.items()],
                "config": self.config_state,
                "ended": self.end_state,
                "trouble": trouble
                and {
                    "kind": trouble.kind,
                    "reason": trouble.reason,
                    "after_s": max(trouble.until_s - time.monotonic(), 0.0),
                },
            }
