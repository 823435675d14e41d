"""The daemon's side of the collector: whether there is one, what it has collected, what it says.

    wanted    while folders are watched, or a run lives here whose node's facts are to be shown; else no process
    turn      start and stop it, take its streams through the same ingest as any client's
    finish    it takes what is still there and ends: before a command's end, or in a flush

Must not know: what is collected. On failure: as supervisor and adopt have it; a collector that does not stay alive is a
problem that `status` shows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from verl_shipper.adopt import Adopt
from verl_shipper.collect.order import NAME, CollectOrder, collected_dir
from verl_shipper.config import Config
from verl_shipper.ingest import Ingest
from verl_shipper.liveness import Life, judge
from verl_shipper.supervisor import Child, ChildOrders, Supervisor
from verl_shipper_spool.header import Process, this_process

LIVE_LOOK_S = 2.0
LINGER_S = 30.0  # after the last run here: a job often begins another one
LOOK_S = 0.5  # at what it has collected
STOP_S = 3.0  # behind the lanes' own time: together less than the ten seconds that a stop may take


class Collecting:
    """The collector of a daemon. `works`: False for a daemon that reads other people's folders."""

    def __init__(self, state_dir: str, ingest: Ingest, config: Config, *, works: bool, ends: bool) -> None:
        self.adopt = Adopt(ingest, [collected_dir(state_dir)], patient=False, ended=True)
        self._ingest = ingest
        self._supervisor = Supervisor(state_dir, ingest.spool_dir, config.log_level, role="")
        self._config = config
        self._works = works
        self._ends = ends
        self._here: Process = this_process()
        self._live_look_s = self._look_s = 0.0
        self._live_s = float("-inf")  # when a run was last seen to live here
        self._wanted: CollectOrder | None = None
        self._was_done = False
        self._heard_ns = 0

    def apply(self, config: Config) -> None:
        """From now on this configuration."""
        self._config = config
        self._live_look_s = 0.0

    def turn(self, now_s: float) -> None:
        """Everything that is due."""
        if now_s >= self._live_look_s:
            self._live_look_s = now_s + LIVE_LOOK_S
            self._decide(now_s)
        if self._supervisor.children:
            self._supervisor.watch(now_s)
        child = self._child
        is_done = child is not None and child.done
        if now_s >= self._look_s or is_done != self._was_done:
            self._look_s = now_s + LOOK_S
            # What it says counts once we have looked behind it: its last streams may be new to us.
            self._was_done = is_done
            self._heard_ns = time.monotonic_ns() if is_done else int(self._said().get("settled_ns", 0))
            if self.adopt.look(now_s):
                self._look_s = now_s

    def finish(self) -> None:
        """From now on it only takes what is there."""
        self._ends = True
        self._live_look_s = self._look_s = 0.0

    def settled(self) -> bool:
        """Whether nothing is left on disk that will become a record, as far as the collector was told to finish."""
        if self._live_look_s == 0.0 and self._works:
            return False  # it was not even decided whether there is one
        child = self._child
        if self._ends and child is not None and not (child.done and self._was_done):
            return False
        return self.adopt.settled()

    def settled_ns(self) -> int | None:
        """Up to here, by the clock that all processes of a machine share, what is watched is taken; 0 while something
        waits. None: nothing is watched."""
        if self._wanted is None or not self._wanted.watch:
            return None
        child = self._child
        if child is None or not self.adopt.settled():  # not started yet, or its last bytes are under way
            return 0
        return self._heard_ns

    def problems(self) -> set[str]:
        found = {*self.adopt.problems.values(), *self._supervisor.troubles()}
        return found | {str(problem) for problem in self._said().get("problems", ())}

    def pid(self) -> int | None:
        return self._supervisor.pids().get(NAME)

    def tell_to_stop(self) -> None:
        self._supervisor.tell_to_stop()

    def stop(self) -> None:
        self._supervisor.stop(STOP_S)

    @property
    def _child(self) -> Child | None:
        return self._supervisor.children.get(NAME)

    def _said(self) -> dict[str, Any]:
        child = self._child
        try:
            said = json.loads(child.said) if child is not None and child.said else {}
        except ValueError:
            return {}
        return said if isinstance(said, dict) else {}

    def _decide(self, now_s: float) -> None:
        config = self._config
        samples = config.system_metrics and not self._ends and self._works
        if samples and self._a_run_lives():
            self._live_s = now_s
        is_live = samples and now_s - self._live_s < LINGER_S
        wanted = None
        if self._works and (config.watch or is_live):
            wanted = CollectOrder(
                watch=config.watch,
                system_interval_s=config.system_interval_s if samples else 0.0,
                project=config.project or "",
                experiment=config.experiment or "",
                ends=self._ends,
            )
        self._wanted = wanted
        orders: dict[str, ChildOrders] = {} if wanted is None else {NAME: wanted}
        if orders or self._supervisor.children:
            self._supervisor.apply(orders, config.log_level, now_s)

    def _a_run_lives(self) -> bool:
        return any(judge(process, self._here, 0.0) is Life.ALIVE for process in dict.fromkeys(self._writers()))

    def _writers(self) -> Iterator[Process]:
        """Processes of streams that are not sealed, the collector's own left out."""
        for stream_id, stream in self._ingest.streams.items():
            if not stream.sealed and stream_id not in self.adopt.sources:
                yield stream.header.process
