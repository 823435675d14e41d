"""A tracker in memory whose answers a test writes down, and a lane that is turned by hand.

    Tracker          what the tracker holds and was asked; its `answer` decides about every batch
    ScriptedBackend  the backend of that tracker
    Bench            node spool, lane and clock in one place; `crash` leaves only what is on disk

Promises: time is what the test says; uploads that do not hang have ended when `tick` returns.
Must not know: sockets, processes. On failure: AssertionError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from support.streams import frame, make_header
from verl_shipper import status
from verl_shipper.backends.base import Backend, Batch, Delivered, Limits, Outcome
from verl_shipper.ingest import Ingest
from verl_shipper.lane import Lane
from verl_shipper.lane_intake import Order
from verl_shipper.lane_process import store_path
from verl_shipper.lane_store import LaneStore
from verl_shipper_spool.frame import encode
from verl_shipper_spool.header import StreamHeader

BACKEND = "scripted"
RELEASE_S = 20.0  # a hung upload whose test forgot it ends at last


def deliver(_batch: Batch) -> Outcome:
    return Delivered()


@dataclass
class Tracker:
    """All that a tracker knows. `answer` is called in upload threads; what it lets through is kept once."""

    answer: Callable[[Batch], Outcome] = deliver
    open_answer: Callable[[], Outcome | None] = lambda: None
    requests: list[Batch] = field(default_factory=list)
    kept: dict[tuple[str, int], bytes] = field(default_factory=dict)
    arrivals: list[tuple[str, int]] = field(default_factory=list)
    holds: Mapping[str, int] = field(default_factory=dict)  # its watermark
    opened: int = 0
    closed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def upload(self, batch: Batch) -> Outcome:
        with self._lock:
            self.requests.append(batch)
        outcome = self.answer(batch)
        if isinstance(outcome, Delivered):
            self.keep(batch)
        return outcome

    def keep(self, batch: Batch) -> None:
        """The items are at the tracker, whatever the sender is told."""
        with self._lock:
            for item in batch.items:
                key = (item.stream_id, item.ordinal)
                assert self.kept.setdefault(key, item.payload) == item.payload, "one key, two contents"
                self.arrivals.append(key)

    def numbers(self, stream_id: str) -> list[int]:
        """Ordinals of a stream in the order of their first arrival."""
        return [ordinal for stream, ordinal in dict.fromkeys(self.arrivals) if stream == stream_id]


class ScriptedBackend(Backend):
    """Passes everything on to the tracker in its settings."""

    name: ClassVar[str] = BACKEND
    limits: ClassVar[Limits] = Limits(items_max=10, bytes_max=64 * 1024, age_s_max=0.2, runs_at_once_max=3)

    def open(self) -> Outcome | None:
        tracker: Tracker = self.settings["tracker"]
        tracker.opened += 1
        return tracker.open_answer()

    def upload(self, batch: Batch) -> Outcome:
        tracker: Tracker = self.settings["tracker"]
        return tracker.upload(batch)

    def watermark(self) -> Mapping[str, int]:
        tracker: Tracker = self.settings["tracker"]
        return tracker.holds

    def close(self) -> None:
        self.settings["tracker"].closed += 1


def with_limits(**changes: Any) -> type[ScriptedBackend]:
    """The same backend with other limits."""
    values = {name: getattr(ScriptedBackend.limits, name) for name in Limits.__dataclass_fields__} | changes

    class Limited(ScriptedBackend):
        limits: ClassVar[Limits] = Limits(**values)

    return Limited


class Bench:
    """A node spool filled by hand and one lane over it."""

    def __init__(
        self,
        root: Path,
        tracker: Tracker | None = None,
        backend: type[ScriptedBackend] = ScriptedBackend,
        order: Order | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings = dict(settings or {})
        self.order = order  # how the lane samples; a change counts from the next `crash` on
        self.tracker = tracker or Tracker()
        self.now_s = 1000.0
        self.root = root
        self.ingest = Ingest(str(root), 10**9)
        self.ingest.open()
        self._backend = backend
        self._next: dict[str, int] = {}
        self.lane = self._new_lane()

    @property
    def store_path(self) -> str:
        return store_path(str(self.root), BACKEND)

    def stream(self, **changes: Any) -> str:
        """Make a stream known; returns its id."""
        header: StreamHeader = make_header(**changes)
        self.ingest.greet(header)
        self._next[header.stream_id] = 0
        return header.stream_id

    def log(self, stream_id: str, count: int = 1, size_bytes: int = 0) -> None:
        """Append records that carry their ordinals."""
        first = self._next[stream_id]
        self.put(stream_id, b"".join(frame(number, size_bytes) for number in range(first, first + count)))
        self._next[stream_id] = first + count

    def log_payload(self, stream_id: str, payload: bytes) -> None:
        self.put(stream_id, encode(payload, self._next[stream_id]))
        self._next[stream_id] += 1

    def put(self, stream_id: str, content: bytes, *, gap_bytes: int = 0) -> None:
        """Append raw bytes, behind a gap if told."""
        end = self.ingest.end(stream_id) + gap_bytes
        assert self.ingest.take(stream_id, end, content, gap=gap_bytes > 0)
        self.ingest.settle()

    def tick(self, times: int = 1, by_s: float = 0.3) -> None:
        """Let time pass and turn the lane; uploads that end at once are collected at the next tick."""
        for _ in range(times):
            self.now_s += by_s
            self.lane.tick(self.now_s)
            self.rest()
            self.assert_law()

    def start_upload(self) -> None:
        """Turn until an upload is under way, and do not wait for its end."""
        while not any(run.future and run.sealed for run in self.lane.runs.values()):
            self.rest()
            self.now_s += 0.3
            self.lane.tick(self.now_s)

    def rest(self, timeout_s: float = 0.5) -> None:
        """Wait for the uploads under way, but not for those that hang."""
        wait([run.future for run in self.lane.runs.values() if run.future is not None], timeout_s)

    def until_quiet(self, by_s: float = 0.3, ticks_max: int = 400) -> None:
        """Turn until nothing is pending."""
        for _ in range(ticks_max):
            self.tick(by_s=by_s)
            if self.account().pending == 0:
                return
        raise AssertionError(f"still pending: {self.account()}")

    def crash(self) -> None:
        """The lane's process is gone; a new one starts from what is on disk."""
        self.rest()
        self.lane._pool.shutdown(wait=False)
        self.lane._store.close()
        self.lane = self._new_lane()

    def account(self, run_id: str | None = None) -> status.Account:
        """The account as `status` tells it."""
        found = status.report(str(self.root), [BACKEND])
        return found.backends[BACKEND][run_id] if run_id else found.total(BACKEND)

    def assert_law(self) -> None:
        found = status.report(str(self.root), [BACKEND])
        for run_id, account in found.backends[BACKEND].items():
            assert account.balanced, f"{run_id}: {account}"
            assert min(account.delivered, account.dead_lettered, account.pending) >= 0, f"{run_id}: {account}"

    def close(self) -> None:
        self.rest()
        self.lane.close(0.0)
        self.ingest.close()

    def _new_lane(self) -> Lane:
        settings = {"tracker": self.tracker, **self._settings}
        store = LaneStore(self.store_path)
        return Lane(self._backend, settings, self.ingest.spool_dir, store, self.order, jitter=lambda: 0.5)
