"""One entry of `watch` at work: what lies there, what of it may be taken now, what waits and why.

    look     a few files of the present pass; at its end: which are ready, which are gone, when the next one begins
    ready    paths, in the order of their steps; those of logs apart

A pass costs at most COST_SHARE of a core: the longer it took, the longer the pause behind it.

Must not know: how files are taken. On failure: `problems` by path.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.collect.ledger import TAKEN, TORN_END, WAITING, File, Ledger, Mark
from verl_shipper.collect.logs import skip_log
from verl_shipper.collect.walk import Found, walk
from verl_shipper.collect.work import NotNowError, RefusedError
from verl_shipper.config_watch import SKIP, WatchEntry
from verl_shipper.policy.file_names import GENERATIONS, METRICS, dump_step
from verl_shipper.policy.watching import Seen, Sighting, is_followed, sight, stands_still

FILES_PER_LOOK = 5000  # looked at in one go, about 50 ms; the next look goes on from there
WAITING_MAX = 10_000  # files of an entry that are looked after at a time; the others come when these are taken
COST_SHARE = 0.01  # of a core, for looking at what does not change
PAUSE_S_MAX = 300.0
REFUSED_PAUSE_S = 30.0
HASTE_S = 0.25  # after an event, so soon at the earliest
GONE, MANY = "gone", "too_many_files"
SUCCESSORS_MAX = 10_000  # folders of which the latest step is remembered during a pass


@dataclass(slots=True)
class Place:
    """`others`: keys of all entries, so that a file that two of them name is taken by the first."""

    entry: WatchEntry
    ledger: Ledger
    others: frozenset[str]
    ends: bool = False
    sightings: dict[str, Sighting] = field(default_factory=dict)
    founds: dict[str, Found] = field(default_factory=dict)
    refused: dict[str, tuple[str, float]] = field(default_factory=dict)  # reason, and when to try again
    problems: dict[str, str] = field(default_factory=dict)
    ready: deque[str] = field(default_factory=deque)
    ready_logs: deque[str] = field(default_factory=deque)
    settled_ns: int = 0  # up to here, by the clock that all processes of a machine share, everything is taken
    next_look_s: float = 0.0
    passes: int = 0
    _walk: Iterator[Found | None] | None = None
    _passed: set[str] = field(default_factory=set)
    _latest: dict[str, tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=dict)
    _adrift: set[int] = field(default_factory=set)
    _new_problems: dict[str, str] = field(default_factory=dict)
    _began_s: float = 0.0
    _began_ns: int = 0
    _cost_s: float = 0.0
    _has_more: bool = False
    _skips_before_ns: int = 0

    def __post_init__(self) -> None:
        began_ns, is_whole = self.ledger.begin_place(self.entry.key, time.time_ns())
        self._skips_before_ns = began_ns if self.entry.existing == SKIP and not is_whole else 0
        now_s = time.monotonic()
        for file in self.ledger.waiting(self.entry.key):
            if file.path is not None and len(self.sightings) < WAITING_MAX:
                self.sightings[file.path] = Sighting(file.seen, now_s, is_first=True)

    def hasten(self, now_s: float) -> None:
        """Something happened: look soon."""
        self.next_look_s = min(self.next_look_s, max(self._began_s + HASTE_S, now_s))

    def look(self, now_s: float) -> bool:
        """Some of a pass, if it is time. True when it did anything."""
        if self._walk is None:
            if now_s < self.next_look_s:
                return False
            self._begin(now_s)
        assert self._walk is not None, "begun"
        began_s = time.thread_time()
        is_over = False
        with self.ledger.batch():
            for _ in range(FILES_PER_LOOK):
                found = next(self._walk, ...)
                if found is ...:
                    is_over = True
                    break
                if found is not None:
                    self._consider(found, now_s)
        self._cost_s += time.thread_time() - began_s
        if is_over:
            self._end(now_s)
        else:
            self.next_look_s = now_s
        return True

    def pause_s(self, cost_s: float) -> float:
        return min(max(self.entry.poll_s, cost_s / COST_SHARE), max(PAUSE_S_MAX, self.entry.poll_s))

    def done(self, path: str, file: File) -> None:
        """A file was dealt with; it may wait for more."""
        self.refused.pop(path, None)
        if file.state != WAITING:
            self._forget(path)

    def refuse(self, path: str, reason: str, now_s: float) -> None:
        """It cannot be taken now; it is tried again after a pause."""
        self.refused[path] = (reason, now_s + REFUSED_PAUSE_S)

    def is_still(self, path: str, now_s: float) -> bool:
        sighting = self.sightings.get(path)
        return sighting is not None and stands_still(
            sighting, now_s, time.time_ns(), self.entry.stable_s, by_age=self.ends
        )

    @property
    def waiting(self) -> int:
        return len(self.sightings.keys() - self.refused.keys())

    def _tell(self, path: str, error: OSError) -> None:
        self._new_problems[path] = f"cannot read {path!r}: {error.strerror or error}"

    def _begin(self, now_s: float) -> None:
        self._walk = walk(self.entry, self._tell)
        self._passed, self._latest, self._new_problems = set(), {}, {}
        self._adrift = {file.id for file in self.ledger.adrift(self.entry.key)}
        self._began_s, self._began_ns, self._cost_s, self._has_more = now_s, time.monotonic_ns(), 0.0, False

    def _consider(self, found: Found, now_s: float) -> None:
        if found.kind == GENERATIONS:
            self._note_step(found)
        file = self._file_of(found)
        if file is None or (file.seen == found.seen and file.state in (TAKEN, TORN_END)):
            self._forget(found.path)
            return
        if len(self.sightings) >= WAITING_MAX and found.path not in self.sightings:
            self._has_more = True
            return
        if file.state != WAITING:
            self.ledger.put(file, Mark({"state": WAITING}))
        before = self.sightings.get(found.path)
        self.sightings[found.path] = sight(before, found.seen, now_s, is_first=self.passes == 0)
        self.founds[found.path] = found
        self._passed.add(found.path)

    def _file_of(self, found: Found) -> File | None:
        """The row of a file; None when it is none of our business."""
        file = self.ledger.at(found.path)
        if file is not None and (file.seen.identity != found.seen.identity or file.kind != found.kind):
            file = None
        if file is not None:
            if file.place != self.entry.key:
                if file.place in self.others:
                    return None  # two entries name it: the first one took it
                self.ledger.move(file, found.path, self.entry.key)
            return file
        return self._renamed(found) or self._new(found)

    def _renamed(self, found: Found) -> File | None:
        """The row of a file that had another name: told by its inode, and by what cannot have changed meanwhile."""
        file = self.ledger.of_identity(found.seen.identity)
        if file is None or file.kind != found.kind or (file.path is not None and _is_at(file.path, found.seen)):
            return None
        same = found.seen.size >= file.offset if found.kind == METRICS else found.seen == file.seen
        if not same:
            return None
        if file.path is not None:
            self._forget(file.path)
        self.ledger.move(file, found.path, self.entry.key)
        self._adrift.discard(file.id)
        return file

    def _new(self, found: Found) -> File | None:
        fields: dict[str, Any] = {}
        if self._skips_before_ns and found.seen.mtime_ns <= self._skips_before_ns:
            fields = {"state": TAKEN}
            if found.kind == METRICS:
                try:
                    fields |= skip_log(found)
                except (NotNowError, RefusedError):
                    fields |= {"offset": found.seen.size}
        file = self.ledger.add(found.path, self.entry.key, found.kind, found.seen, **fields)
        if file is None:
            self._new_problems[MANY] = "more files than can be remembered; new ones are not taken"
        elif fields:
            self.ledger.count(self.entry.key, {"skipped": 1})
        return file

    def _note_step(self, found: Found) -> None:
        folder, _, name = found.path.rpartition("/")
        step = dump_step(name)
        if step is None or (folder not in self._latest and len(self._latest) >= SUCCESSORS_MAX):
            return
        here = (step, found.seen.mtime_ns)
        by_step, by_time = self._latest.get(folder, (here, here))
        self._latest[folder] = (max(by_step, here), max(by_time, here, key=lambda each: each[1]))

    def _end(self, now_s: float) -> None:
        """The pass is over: who is ready, who is gone."""
        self._walk = None
        self.passes += 1
        self.problems = self._new_problems
        for path in [path for path in self.sightings if path not in self._passed]:
            self._miss(path)
        for file in self.ledger.adrift(self.entry.key):
            if file.id in self._adrift:  # for a whole pass nobody had it under any name
                self.ledger.remove(file, {GONE: 1} if file.state == WAITING else {})
        if self.passes == 1:
            self.ledger.place_is_whole(self.entry.key)
            self._skips_before_ns = 0
        wall_ns = time.time_ns()
        ready = [path for path in self.sightings if self._is_ready(path, now_s, wall_ns)]
        is_log = {path: self.founds[path].kind == METRICS for path in ready}
        self.ready = deque(sorted((path for path in ready if not is_log[path]), key=_order))
        self.ready_logs = deque(sorted(path for path in ready if is_log[path]))
        self.next_look_s = now_s + self.pause_s(self._cost_s)
        # What cannot be taken now, nobody waits for.
        self.settled_ns = self._began_ns if not (self._has_more or self.waiting) else 0

    def _is_ready(self, path: str, now_s: float, wall_ns: int) -> bool:
        if now_s < self.refused.get(path, ("", 0.0))[1]:
            return False
        sighting, found = self.sightings[path], self.founds[path]
        if found.kind == METRICS or stands_still(sighting, now_s, wall_ns, self.entry.stable_s, by_age=self.ends):
            return True
        folder, _, name = path.rpartition("/")
        return is_followed(dump_step(name), found.seen, self._latest.get(folder, ()))

    def _miss(self, path: str) -> None:
        """A file that waited was not in this pass."""
        if os.path.lexists(path) and not self.problems:
            self._forget(path)  # no such file any more: a folder, or another entry's
            return
        if os.path.lexists(path):
            return
        file = self.ledger.at(path)
        self._forget(path)
        if file is not None and file.place == self.entry.key and file.state == WAITING:
            self.ledger.remove(file, {GONE: 1})

    def _forget(self, path: str) -> None:
        self.sightings.pop(path, None)
        self.founds.pop(path, None)
        self.refused.pop(path, None)


def _is_at(path: str, seen: Seen) -> bool:
    """Whether a file has this name, too."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (seen.device, seen.inode)


def _order(path: str) -> tuple[str, int, str]:
    folder, _, name = path.rpartition("/")
    return folder, dump_step(name) or 0, name
