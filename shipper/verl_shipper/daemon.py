"""The daemon: composition root. Builds ingest, listener, adopt and supervisor, and turns them in one loop.

    loop: socket → (every SETTLE_S) fsync + ACK → adopt → a new configuration → lanes → collector → reclaim → notes

The only file that knows everyone. One thread; file events come from watchdog's thread as a flag. Ends on `stop()` or
when `until` says so, within STOP seconds whatever a tracker does.

On failure: HeldError when another daemon is at work, ConfigError for places that cannot work; both before anything
starts. Once it runs, a chore that fails costs that chore its turn and is told; the daemon goes on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl_shipper import status
from verl_shipper.adopt import Adopt
from verl_shipper.backends import load_backend
from verl_shipper.collecting import Collecting
from verl_shipper.config import ADOPT_POLL_S, PLACES, RECLAIM_S, SETTLE_S, STATUS_S, Config
from verl_shipper.errors import ConfigError, HeldError
from verl_shipper.ingest import Ingest
from verl_shipper.lane_process import store_path
from verl_shipper.listener import Listener
from verl_shipper.lock import Lock
from verl_shipper.reload import Reload
from verl_shipper.store import open_store_read_only
from verl_shipper.supervisor import Orders, Supervisor
from verl_shipper.watch import Watch
from verl_shipper_spool.errors import UsageError
from verl_shipper_spool.location import (
    SOCKET_BELOW_SPOOL,
    SOCKET_VARIABLE,
    SPOOL_VARIABLE,
    socket_address,
    spool_dir,
    state_dir,
)

log = logging.getLogger(__name__)

TURN_S = 0.1
MEND_S = 5.0
FLUSH_IDLE_S = 2.0
QUIET_STATUS_S = 10.0  # notes that say nothing new are written so often, to show that we live
# A folder that answers so can be read all the same.
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
FAIR_S = 0.5  # a flood at the socket keeps the lanes' supervision waiting at most so long


@dataclass(frozen=True, slots=True)
class Places:
    """Where this daemon works. `listen`: addresses; empty for a daemon that only reads folders. The first one must
    work when somebody asked for it (`must_listen`); the others are offered where their folders allow."""

    state_dir: str
    spool_dir: str
    adopt: tuple[str, ...]
    listen: tuple[str, ...]
    keep_sources: bool = False
    must_listen: bool = False


def places_of(config: Config) -> Places:
    """Places of a configuration, defaults filled in. Raises ConfigError for an address that cannot work."""
    spool = spool_dir(config.spool_dir)
    roots = tuple(os.path.abspath(root) for root in config.adopt) or (spool,)
    spool = spool if spool in roots or config.spool_dir else roots[0]
    try:
        addresses = [socket_address(spool, config.socket)]
        # A trainer that knows nothing but its spool folder finds the socket from there.
        addresses += [address for root in roots if (address := _derived_address(root)) not in addresses]
    except UsageError as error:
        raise ConfigError(error.what, where=error.where, hint=error.hint) from error
    state = state_dir(spool, config.state_dir)
    asked = bool(config.socket or os.environ.get(SOCKET_VARIABLE))
    return Places(state, spool, roots, tuple(addresses), must_listen=asked)


def _derived_address(root: str) -> str:
    return socket_address(root, os.path.join(root, *SOCKET_BELOW_SPOOL))


class Daemon:
    """A running daemon. `open`, `run`, `close`."""

    def __init__(self, config: Config, places: Places, reload: Reload | None = None) -> None:
        self.config = config
        self.places = places
        self.reload = reload
        self.ingest = Ingest(places.state_dir, config.node_quota_bytes)
        self.adopt = Adopt(self.ingest, list(places.adopt), keep=places.keep_sources, patient=bool(places.listen))
        self.listener = Listener(self.ingest, list(places.listen), must_listen=places.must_listen)
        self.supervisor = Supervisor(places.state_dir, self.ingest.spool_dir, config.log_level)
        # What lies in somebody's archive has its own state; what is watched belongs to ours.
        works, ends = not places.keep_sources, not places.listen
        self.collecting = Collecting(places.state_dir, self.ingest, config, works=works, ends=ends)
        self._locks: list[Lock] = []
        self._unheld: set[str] = set()  # folders read without a lock, since nothing can be written there
        self._watch = Watch(list(places.adopt))
        if reload is not None:
            self._watch = Watch(list(places.adopt), reload.request.path, reload.hasten)
        self._pinned = ""  # what a new configuration wants and only a new daemon can do
        self._stopping = False
        self._troubles: dict[str, str] = {}  # chores that failed the last time, and how
        self._notes: dict[str, str] = {}
        self._settle_s = self._adopt_s = self._reclaim_s = self._status_s = self._mend_s = self._fair_s = 0.0

    def open(self) -> None:
        """Take the locks, recover the spool, listen, start the lanes."""
        try:
            with _at_place(self.places.state_dir, "--state-dir"):
                self._locks.append(Lock.take(os.path.join(self.places.state_dir, "daemon.lock"), "this state folder"))
            for root in self.places.adopt:
                with _at_place(root, f"--adopt or {SPOOL_VARIABLE}"):
                    self._hold_root(root)
            with _at_place(self.places.state_dir, "--state-dir"):
                self.ingest.open()
        except (HeldError, ConfigError):
            self._release()
            raise
        try:
            self.listener.open()
        except (ConfigError, HeldError):
            self.listener.close()
            self.ingest.close()
            self._release()
            raise
        self._watch.start()
        now_s = time.monotonic()
        self.supervisor.apply(self._orders(), self.config.log_level, now_s)
        self.supervisor.watch(now_s)
        if self.reload is not None:
            self.reload.start()
        self._write_status(state="running")

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Turn until `stop` was called or `until` is true."""
        while not self._stopping and not until():
            self.turn()

    def stop(self) -> None:
        """Ask the loop to end; safe in a signal handler."""
        self._stopping = True

    def turn(self) -> None:
        """One round of everything that is due."""
        more = False

        def listen() -> None:
            nonlocal more
            more = self.listener.poll(SETTLE_S / 4 if self.ingest.unsettled else TURN_S)

        if not self._safely("listen", listen):
            time.sleep(TURN_S)
        now_s = time.monotonic()
        if self.ingest.unsettled and now_s >= self._settle_s:
            self._safely("settle", self._settle)
            self._settle_s = time.monotonic() + SETTLE_S
        if now_s >= self._adopt_s or self._watch.take_news():
            self._adopt_s = now_s + ADOPT_POLL_S
            self._safely("adopt", lambda: self._adopt(now_s))
        if more and now_s < self._fair_s:
            return  # the socket first; everything below can wait, but not for ever
        self._fair_s = now_s + FAIR_S
        self._safely("configuration", lambda: self._take_over(now_s))
        self._safely("lanes", lambda: self.supervisor.watch(now_s))
        self._safely("collector", lambda: self.collecting.turn(now_s))
        if now_s >= self._reclaim_s:
            self._reclaim_s = now_s + RECLAIM_S
            self._safely("reclaim", self._reclaim)
        if now_s >= self._mend_s:
            self._mend_s = now_s + MEND_S
            self._safely("mend", self._mend)
        if now_s >= self._status_s:
            self._status_s = now_s + STATUS_S
            self._safely("status", lambda: self._write_status(state="running"))

    def drained(self) -> bool:
        """Whether folders, node spool and lanes hold nothing that is still to be delivered."""
        if self.ingest.unsettled or self.ingest.trouble or not self.adopt.settled():
            return False
        if not self.collecting.settled():
            return False
        return status.report(self.places.state_dir, self.config.backends).pending == 0

    def close(self) -> None:
        """Stop the lanes, settle, tell the writers, let go."""
        if self.reload is not None:
            self._safely("configuration", self.reload.stop)
        self._safely("collector", self.collecting.tell_to_stop)
        self._safely("lanes", self.supervisor.stop)
        self._safely("collector", self.collecting.stop)
        self._safely("settle", self._settle)
        self._safely("watch", self._watch.stop)
        self._safely("status", lambda: self._write_status(state="stopped"))
        self._safely("listen", self.listener.close)
        self._safely("ingest", self.ingest.close)
        self._release()

    def _safely(self, chore: str, act: Callable[[], None]) -> bool:
        """Do a chore. A failure that nobody thought of is told, once until it changes; False then."""
        try:
            act()
        except Exception as error:
            how = f"{chore}: {type(error).__name__}: {error}"
            if self._troubles.get(chore) != how:
                log.exception("%s failed; going on", chore)
            self._troubles[chore] = how
            return False
        self._troubles.pop(chore, None)
        return True

    def _settle(self) -> None:
        self.listener.acknowledge(self.ingest.settle())

    def _adopt(self, now_s: float) -> None:
        if self.adopt.look(now_s):
            self._adopt_s = now_s  # there is more: again at once

    def _take_over(self, now_s: float) -> None:
        """What a new configuration changes. Places stay what they are: locks, socket and spool hang on them."""
        new = self.reload.take() if self.reload is not None else None
        if new is None:
            return
        moved = [name for name in PLACES if getattr(new, name) != getattr(self.config, name)]
        pinned = f"configuration: {', '.join(moved)} changed; that takes a restart of the daemon" if moved else ""
        if pinned and pinned != self._pinned:
            log.warning("%s", pinned)
        self._pinned = pinned
        before, self.config = self.config, replace(new, **{name: getattr(self.config, name) for name in PLACES})
        self.ingest.quota_bytes = self.config.node_quota_bytes
        logging.getLogger().setLevel(self.config.log_level)
        self.supervisor.apply(self._orders(), self.config.log_level, now_s)
        self.collecting.apply(self.config)
        if self.config != before:
            log.warning("configuration: %s taken over; delivering to %s", new.source, ", ".join(self.config.backends))

    def _orders(self) -> dict[str, Orders]:
        """What every lane is to do."""
        config = self.config
        shared: dict[str, Any] = {
            "run_may_choose": list(config.run_may_choose),
            "backends": list(config.backends),
            "project": config.project,
            "experiment": config.experiment,
            # Nobody writes to what is flushed: a run that ended without a word shall not keep its last step.
            "release_idle_s": None if self.places.listen else FLUSH_IDLE_S,
        }
        return {
            name: Orders(self._settings(name, settings), shared | {"sampling": dict(config.sampling.get(name, {}))})
            for name, settings in config.backends.items()
        }

    def _settings(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A lane's settings; a backend that needs places of its own gets them below our state."""
        places = {"lock_dir": "locks", "work_dir": os.path.join("sdk", name)}
        known = load_backend(name).setting_names()
        given = {key: os.path.join(self.places.state_dir, below) for key, below in places.items() if key in known}
        decided = load_backend(name).decide({**given, **settings})
        for note in decided.notes:
            log.warning("%s: %s", name, note)
        return dict(decided.settings)

    def _hold_root(self, root: str) -> None:
        """One daemon per spool folder. A folder we cannot write in can still be read; it is held once it can be."""
        try:
            os.makedirs(root, 0o700, exist_ok=True)
            self._locks.append(Lock.take(os.path.join(root, "daemon.lock"), f"spool {root}"))
            self._unheld.discard(root)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            if root not in self._unheld:
                log.warning("spool %s cannot be written (%s): it is only read", root, error.strerror)
            self._unheld.add(root)

    def _mend(self) -> None:
        """Bind sockets that went away, hold folders that could not be held."""
        self.listener.mend()
        self._watch.mend(time.monotonic())
        for root in sorted(self._unheld):
            try:
                self._hold_root(root)
            except HeldError as error:
                log.warning("%s; leaving that spool to it", error.what)
                self.adopt.roots.remove(root)
                self._unheld.discard(root)

    def _release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks.clear()

    def _reclaim(self) -> None:
        """Free node segments that every lane has behind it."""
        if self.places.keep_sources or not self.ingest.streams:
            return
        safe: dict[str, int] | None = None
        for name in {*self.config.backends, *self.supervisor.children}:  # a lane that is ending still reads
            offsets = _safe_offsets(store_path(self.places.state_dir, name))
            if safe is None:
                safe = offsets
            else:
                safe = {stream: min(offset, offsets.get(stream, 0)) for stream, offset in safe.items()}
        if safe:
            self.ingest.reclaim(safe)

    def _write_status(self, *, state: str) -> None:
        notes: dict[str, Any] = {
            "state": state,
            "pid": os.getpid(),
            "updated_ns": time.time_ns(),
            "socket": self.listener.bound,
            "adopt": list(self.places.adopt),
            "backends": list(self.config.backends),
            status.UNNAMED_NOTE: {"project": self.config.project, "experiment": self.config.experiment},
            "lane_pids": self.supervisor.pids(),
            "spool_bytes": self.ingest.size_bytes,
            "taken_bytes": self.ingest.taken_bytes,
            "open_streams": sum(not stream.sealed for stream in self.ingest.streams.values()),
            "torn_records": self.adopt.torn,
            "unheard_sources": self.adopt.unheard_count,
            "rejected_messages": self.listener.rejected_messages,
            "collector_pid": self.collecting.pid(),
            "collected_ns": self.collecting.settled_ns(),
            "settled": not self.ingest.unsettled and self.adopt.settled(),
            "problems": self._problems(),
        }
        lines = {key: json.dumps(value) for key, value in notes.items()}
        changed = {key: line for key, line in lines.items() if self._notes.get(key) != line}
        age_ns = notes["updated_ns"] - int(self._notes.get("updated_ns", 0))
        is_news = bool(changed.keys() - {"updated_ns", "collected_ns"})
        if is_news or age_ns > QUIET_STATUS_S * 1e9:  # an idle daemon leaves the disk alone
            self.ingest.write_notes(changed)
            self._notes = lines

    def _problems(self) -> list[str]:
        found = {*self.adopt.problems.values(), *self.ingest.broken.values(), *self._troubles.values()}
        found |= self.collecting.problems()
        found |= {self.ingest.trouble, self._pinned, self.reload.problem if self.reload is not None else ""}
        return sorted((found | {*self.supervisor.troubles()}) - {""})


@contextlib.contextmanager
def _at_place(path: str, option: str) -> Iterator[None]:
    """Says which folder cannot be used, and by what to choose another."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"cannot work in {path}: {why}", where=option, hint="choose a folder that you may write"
        ) from error


def _safe_offsets(path: str) -> dict[str, int]:
    """Below which offset a lane needs nothing again, by stream; nothing is safe when its state cannot be read."""
    db = open_store_read_only(path)
    if db is None:
        return {}
    try:
        with contextlib.closing(db):
            return dict(db.execute("SELECT stream_id, safe_offset FROM cursors"))
    except sqlite3.Error:
        return {}


@contextlib.contextmanager
def opened(config: Config, places: Places, reload: Reload | None = None) -> Iterator[Daemon]:
    """A daemon that is open inside the block and closed after it."""
    daemon = Daemon(config, places, reload)
    daemon.open()
    try:
        yield daemon
    finally:
        daemon.close()
