"""The collector: looks at its places, takes what is ready, samples its node. One thread, a little at a time.

    turn:  look → take (for TURN_S; lines before files) → sample → every CHORES_S: trim, end idle streams, notes

Must not know: how it was started, when it ends. On failure: a file that fails costs itself a pause; sqlite3.Error ends
the process, which begins again from what is durable.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_shipper.collect.ledger import File, Ledger
from verl_shipper.collect.logs import take_log
from verl_shipper.collect.order import CollectOrder, collected_dir, ledger_path
from verl_shipper.collect.place import Place
from verl_shipper.collect.runs import Runs
from verl_shipper.collect.sampling import Sampler
from verl_shipper.collect.streams import Run, Streams
from verl_shipper.collect.tables import take_table
from verl_shipper.collect.wholes import take_whole
from verl_shipper.collect.work import NotNowError, RefusedError, Work
from verl_shipper.config_watch import base_of
from verl_shipper.policy.file_names import GENERATIONS, METRICS
from verl_shipper.watch import Watch
from verl_shipper_spool.record import RecordKind

log = logging.getLogger("verl_shipper.collector")

TURN_S = 0.2  # of work, until the daemon is told that we live
CHORES_S = 1.0
IDLE_S = 600.0  # a stream of a run that nobody here writes ends after so long without a record
ENDED_IDLE_S = 10.0  # the same when its writer here has ended
FOLDERS_WATCHED_MAX = 16  # with events: each takes one of the user's inotify instances, of which there are 128
PROBLEMS_MAX = 10
LOST = "what was taken before is not known any more (its state was damaged): files that are still there come again"


@dataclass(slots=True)
class _Job:
    place: Place
    path: str
    file: File
    steps: Iterator[int]


class Collector:
    """`settled_ns`: up to here, by the clock that never jumps, everything is taken; 0 while something waits."""

    def __init__(self, order: CollectOrder) -> None:
        self._order = order
        self._ledger = Ledger(ledger_path(order.state_dir))
        self._runs = Runs(order.state_dir, (order.project, order.experiment))
        self._streams = Streams(collected_dir(order.state_dir))
        self._work = Work(self._ledger, self._streams, self._runs)
        self._work.recover(order.state_dir)
        keys = [entry.key for entry in order.watch]
        self._places = [
            Place(entry, self._ledger, frozenset(keys) - {entry.key}, ends=order.ends) for entry in order.watch
        ]
        self._sampler = Sampler(order.system_interval_s) if order.system_interval_s else None
        self._jobs: dict[bool, _Job] = {}  # at most one of lines of metrics (True), and one of whole files
        self._chores_s = 0.0
        self._told: dict[str, str] = {}
        folders = [base for entry in order.watch if os.path.isdir(base := base_of(entry.path)[0])]
        self._watch = Watch(list(dict.fromkeys(folders))[:FOLDERS_WATCHED_MAX], appends=True)
        self._watch.start()
        if self._ledger.was_lost:
            log.warning("%s", LOST)

    def turn(self) -> bool:
        """One round. True when there is more to do at once."""
        now_s = time.monotonic()
        if self._watch.take_news():
            for place in self._places:
                place.hasten(now_s)
        for place in self._places:
            place.look(now_s)
        moved = self._take(now_s)
        self._sample(now_s)
        if now_s >= self._chores_s:
            self._chores_s = now_s + CHORES_S
            self._chores(now_s)
        return moved

    @property
    def settled_ns(self) -> int:
        if self._jobs or any(place.ready or place.ready_logs for place in self._places):
            return 0
        return min((place.settled_ns for place in self._places), default=time.monotonic_ns())

    def problems(self) -> list[str]:
        found = [problem for place in self._places for problem in place.problems.values()]
        found += [self._work.trouble, self._sampler.problem if self._sampler else ""]
        return [each for each in found if each][:PROBLEMS_MAX]

    def next_look_s(self) -> float:
        """When there is something to do again, by the clock that never jumps."""
        return min((place.next_look_s for place in self._places), default=self._chores_s)

    def close(self) -> None:
        """End all streams and write down how things are."""
        self._watch.stop()
        if self._sampler is not None:
            self._sampler.stop()
        self._streams.end_all()
        self._note_places()
        self._runs.close()
        self._ledger.close()

    def _take(self, now_s: float) -> bool:
        until_s = now_s + TURN_S
        while True:
            for is_log in (True, False):
                job = None if is_log in self._jobs else self._next_job(now_s, is_log=is_log)
                if job is not None:
                    self._jobs[is_log] = job
            if not self._jobs:
                return False
            if not self._go_on(max(self._jobs), now_s):  # a loss curve does not wait for a trace
                return False  # no room: the rest of the turn is for others
            if time.monotonic() >= until_s:
                return True

    def _go_on(self, slot: bool, now_s: float) -> bool:
        job = self._jobs[slot]
        place, path = job.place, job.path
        try:
            step = next(job.steps, None)
            if step is not None:
                return step > 0
            place.done(path, job.file)
            if self._order.ends:
                place.hasten(now_s)
        except NotNowError as error:
            log.debug("%r waits: %s", path, error)
        except RefusedError as error:
            place.refuse(path, str(error), now_s)
        except sqlite3.Error:
            raise
        except FileNotFoundError:
            log.debug("%r is gone", path)
        except Exception as error:
            log.exception("%r", path)
            place.refuse(path, type(error).__name__, now_s)
        del self._jobs[slot]
        return True

    def _next_job(self, now_s: float, *, is_log: bool) -> _Job | None:
        for place in self._places:
            ready = place.ready_logs if is_log else place.ready
            while ready:
                path = ready.popleft()
                file, found = self._ledger.at(path), place.founds.get(path)
                if file is None or found is None:
                    continue
                if found.kind == GENERATIONS:
                    steps = take_table(self._work, place.entry, file, found)
                elif found.kind == METRICS:
                    steps = take_log(self._work, place.entry, file, found, is_still=place.is_still(path, now_s))
                else:
                    steps = take_whole(self._work, place.entry, file, found)
                return _Job(place, path, file, steps)
        return None

    def _sample(self, now_s: float) -> None:
        if self._sampler is None:
            return
        live = self._runs.live(now_s)
        if live:
            self._sampler.due(now_s)
        values = self._sampler.take()
        if values is None or self._streams.room(0):
            return
        node = os.uname().nodename
        for run in live:
            body = {"node": node, "values": values}
            payload = self._streams.encode(run, RecordKind.SYSTEM, None, time.time_ns(), body)
            self._streams.next(run, RecordKind.SYSTEM, now_s)
            self._streams.append(run, RecordKind.SYSTEM, payload)

    def _chores(self, now_s: float) -> None:
        if self._streams.count:
            self._streams.trim(self._runs.durable)
            self._runs.live(now_s)
            if not self._jobs:
                self._streams.end_idle(self._idle_s, now_s)
        self._note_places()

    def _idle_s(self, run: Run) -> float:
        return ENDED_IDLE_S if self._runs.has_ended(run) else IDLE_S

    def _note_places(self) -> None:
        """For `status`; an idle collector leaves the disk alone."""
        places = [self._place_note(place) for place in self._places]
        line = json.dumps(places)
        if self._told.get("places") != line:
            self._told["places"] = line
            self._ledger.note("places", line)

    def _place_note(self, place: Place) -> dict[str, Any]:
        figures = self._ledger.figures(place.entry.key)
        figures["waiting"] = place.waiting
        refused = Counter(reason for reason, _ in place.refused.values())
        torn = figures.pop("now_torn", 0)
        figures.pop("now_waiting", None)
        if torn:
            figures["torn_line"] = figures.get("torn_line", 0) + torn
        shown = place.entry.path.encode("utf-8", "replace").decode()
        return {"path": shown, "kind": place.entry.kind, "figures": figures, "refused": dict(refused)}
