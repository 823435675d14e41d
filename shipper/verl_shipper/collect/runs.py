"""Runs of this node as the daemon knows them, and which of them a file belongs to.

    an entry's `run_id`
    else the newest run of the entry's (or the file's) project and experiment
    else, when neither is named, the only run that lives here
    else a run of its own: its id is made of names and path, the same on every node and after every restart

A run that began after a file's last change is never its run: old files lie beside new ones.

Must not know: files. On failure: a daemon's table that cannot be read knows no runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from dataclasses import dataclass, field

from verl_shipper.collect.streams import Run
from verl_shipper.config_watch import WatchEntry
from verl_shipper.liveness import Life, judge
from verl_shipper.policy.file_names import METRICS, names_in
from verl_shipper.store import open_store_read_only
from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.header import Process, decode_header, this_process
from verl_shipper_spool.location import UNNAMED

STREAMS_MAX = 20_000  # the newest ones; older runs have ended
CLOCKS_APART_NS = 60 * 10**9  # a file server's clock may be so far behind ours
LIVE_LOOK_S = 1.0


@dataclass(slots=True)
class _Known:
    """A run: when it began, and its writers."""

    run: Run
    created_ns: int
    writers: set[Process] = field(default_factory=set)


class Runs:
    """Reads the daemon's table of streams, new rows only. `unnamed`: names of runs that have none."""

    def __init__(self, state_dir: str, unnamed: tuple[str, str]) -> None:
        self._path = os.path.join(state_dir, "daemon.sqlite3")
        self._unnamed = (unnamed[0] or UNNAMED, unnamed[1] or UNNAMED)
        self._db: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._row = 0
        self._runs: dict[str, _Known] = {}
        self._here = this_process()
        self._live: list[Run] = []
        self._live_at_s = float("-inf")
        self._was_live: set[str] = set()

    def live(self, now_s: float) -> list[Run]:
        """Runs with a writer that lives on this node."""
        if now_s - self._live_at_s >= LIVE_LOOK_S:
            self._live_at_s = now_s
            self._read()
            self._live = [known.run for known in self._runs.values() if self._lives(known)]
            self._was_live.update(run.run_id for run in self._live)
        return self._live

    def has_ended(self, run: Run) -> bool:
        """Whether a run lived here, and does not any more."""
        return run.run_id in self._was_live and all(each.run_id != run.run_id for each in self._live)

    def of_file(self, entry: WatchEntry, path: str, kind: str, mtime_ns: int, now_s: float) -> Run:
        """The run of a file; decided once, the caller keeps it."""
        live = self.live(now_s)
        self._read()
        names = (entry.project, entry.experiment)
        if kind == METRICS and not any(names):
            names = names_in(path)
        if entry.run_id:
            known = self._runs.get(entry.run_id)
            of_it = (known.run.project, known.run.experiment) if known else names
            return Run(entry.run_id, *of_it, entry.rank)
        before_ns = mtime_ns + CLOCKS_APART_NS
        found = [known for known in self._runs.values() if known.created_ns <= before_ns and self._fits(known, names)]
        if any(names) and found:
            run = max(found, key=lambda each: each.created_ns).run
            return Run(run.run_id, run.project, run.experiment, entry.rank)
        started = {known.run.run_id for known in self._runs.values() if known.created_ns <= before_ns}
        if len(live) == 1 and live[0].run_id in started and (not any(names) or not live[0].project):
            return Run(live[0].run_id, live[0].project, live[0].experiment, entry.rank)
        return Run(own_run_id(*names, path if kind == METRICS else entry.path), *names, entry.rank)

    def durable(self, stream_id: str) -> int:
        """Bytes of a stream that the daemon has for good."""
        return self._column("durable", stream_id)

    def ordinals(self, stream_id: str) -> int:
        """Records of a stream that the daemon knows of."""
        return self._column("ordinal_next", stream_id)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _fits(self, known: _Known, names: tuple[str, str]) -> bool:
        project = known.run.project or self._unnamed[0]
        experiment = known.run.experiment or self._unnamed[1]
        return names[0] in ("", project) and names[1] in ("", experiment)

    def _lives(self, known: _Known) -> bool:
        for process in list(known.writers):
            life = judge(process, self._here, 0.0)
            if life is Life.ALIVE:
                return True
            if life is Life.GONE:
                known.writers.discard(process)
        return False

    def _read(self) -> None:
        db = self._connected()
        if db is None:
            return
        with contextlib.suppress(sqlite3.Error):
            # A row that changes gets a number behind all others, so that a new one is never overlooked.
            newest = db.execute("SELECT max(rowid) FROM streams").fetchone()[0] or 0
            first = max(self._row, newest - STREAMS_MAX)
            for row, header in db.execute("SELECT rowid, header FROM streams WHERE rowid > ? ORDER BY rowid", (first,)):
                self._row = row
                self._learn(header)

    def _learn(self, content: bytes) -> None:
        try:
            header = decode_header(content)
        except CorruptionError:
            return
        known = self._runs.get(header.run_id)
        if known is None:
            run = Run(header.run_id, header.project, header.experiment)
            known = self._runs[header.run_id] = _Known(run, header.created_ns)
        known.created_ns = min(known.created_ns, header.created_ns)
        if header.process != self._here:
            known.writers.add(header.process)

    def _column(self, name: str, stream_id: str) -> int:
        db = self._connected()
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                row = db.execute(f"SELECT {name} FROM streams WHERE stream_id = ?", (stream_id,)).fetchone()  # noqa: S608 - our own names
                return int(row[0]) if row else 0
        return 0

    def _connected(self) -> sqlite3.Connection | None:
        """A connection to the table that is there now: a damaged one is replaced while we look."""
        identity = None
        with contextlib.suppress(OSError):
            found = os.stat(self._path)
            identity = (found.st_dev, found.st_ino)
        if identity != self._identity:
            self.close()
            self._row, self._identity = 0, identity
        if self._db is None and identity is not None:
            self._db = open_store_read_only(self._path)
        return self._db


def own_run_id(project: str, experiment: str, path: str) -> str:
    """Id of a run that only files tell of."""
    text = f"{project}\0{experiment}\0{path}".encode("utf-8", "surrogateescape")
    return hashlib.sha256(text).hexdigest()[:16]


def of_values(values: list[object]) -> Run:
    """The run that a file keeps."""
    match values:
        case [str(run_id), str(project), str(experiment), int(rank)]:
            return Run(run_id, project, experiment, rank)
        case _:
            raise ValueError(f"not a run: {values!r:.80}")
