"""The node's own facts, sampled in a thread: a driver that hangs holds up the thread, not the collector.

Must not know: runs, records. On failure: `problem` says it; there are no facts then.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from typing import Any

log = logging.getLogger("verl_shipper.collector")

HUNG_S = 60.0
FACTS = "verl_shipper.node_facts"  # loaded when there is a run to sample for


class Sampler:
    """`due(now_s)` asks for a sample every `interval_s`, `take()` gives the one that came meanwhile."""

    def __init__(self, interval_s: float) -> None:
        self.problem = ""
        self._interval_s = interval_s
        self._next_s = 0.0
        self._asked_s = 0.0
        self._wanted = threading.Event()
        self._values: dict[str, float] | None = None
        self._thread: threading.Thread | None = None
        self._ended = False

    def due(self, now_s: float) -> None:
        if now_s < self._next_s:
            return
        if self._wanted.is_set():
            if now_s - self._asked_s > HUNG_S:
                self.problem = f"this node's facts do not come: no answer for {now_s - self._asked_s:.0f} s"
            return
        self._next_s = now_s + self._interval_s
        self._asked_s = now_s
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._turn, name="node facts", daemon=True)
            self._thread.start()

    def take(self) -> dict[str, float] | None:
        values, self._values = self._values, None
        return values

    def stop(self) -> None:
        self._ended = True
        self._wanted.set()

    def _turn(self) -> None:
        facts = self._facts()
        while facts is not None:
            self._wanted.wait()
            if self._ended:
                break
            try:
                self._values = facts.sample() or None
                self.problem = ""
            except Exception as error:
                log.exception("cannot sample this node")
                self.problem = f"this node's facts: {type(error).__name__}: {error}"
            self._wanted.clear()
        with contextlib.suppress(Exception):
            facts.close()

    def _facts(self) -> Any:
        try:
            return importlib.import_module(FACTS).NodeFacts()
        except Exception as error:  # noqa: BLE001 - a driver's library fails in its own ways
            self.problem = f"this node's facts cannot be had: {error}"
            return None
