"""What became of every record: the law of accounting, read from the state files, daemon alive or not.

    logged = delivered + sampled_out + dead_lettered + sum(dropped) + pending

per backend, in total and per run. `logged` comes from ingest, `pending` from cursors and outbox, the rest from tallies:
three independent counts, so `balanced` can be false, and says then that something is wrong with us.

Must not know: live objects of the daemon. On failure: a state file that is missing or damaged counts as empty.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from verl_shipper.lane_store import SAMPLED_NOTE
from verl_shipper.store import open_store_read_only
from verl_shipper_spool.header import decode_header
from verl_shipper_spool.location import UNNAMED

DISCARDED = "discarded"  # dead letters an operator threw away
UNREADABLE = "unreadable"  # frames whose payload is no record
RECLAIMED = "reclaimed"  # gone before this backend had read them: it was not there, or not configured
LETTERS_FULL = "letters_full"  # dead letters that had to make room for younger ones
UNNAMED_NOTE = "unnamed"  # the daemon's note of the project and experiment of runs that have none
NAMES_NOTE = "metric_names"  # a backend's note of the names it gave to metrics: {original: shown}


@dataclass(slots=True)
class Account:
    """The account of one run at one backend, or of all its runs."""

    logged: int = 0
    delivered: int = 0
    sampled_out: int = 0
    sampled: Counter[str] = field(default_factory=Counter)  # the same by reason
    dead_lettered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    pending: int = 0
    parked: int = 0
    last_error: str = ""
    retries: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    lag_s: float = 0.0
    renamed: dict[str, str] = field(default_factory=dict)  # metrics that the tracker shows under another name

    @property
    def balanced(self) -> bool:
        gone = self.delivered + self.sampled_out + self.dead_lettered + sum(self.dropped.values())
        return self.logged == gone + self.pending

    def add(self, other: Account) -> None:
        for name in ("logged", "delivered", "sampled_out", "dead_lettered", "pending", "parked", "retries"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.sampled += other.sampled
        self.dropped += other.dropped
        self.ignored += other.ignored
        self.renamed |= other.renamed
        self.last_error = other.last_error or self.last_error
        self.lag_s = max(self.lag_s, other.lag_s)

    def to_json(self) -> dict[str, Any]:
        return {
            "logged": self.logged,
            "delivered": self.delivered,
            "sampled_out": self.sampled_out,
            "sampled_by": dict(self.sampled),
            "dead_lettered": self.dead_lettered,
            "dropped": dict(self.dropped),
            "pending": self.pending,
            "parked": self.parked,
            "last_error": self.last_error,
            "retries": self.retries,
            "ignored_values": dict(self.ignored),
            "lag_s": round(self.lag_s, 1),
            "balanced": self.balanced,
        }


@dataclass(slots=True)
class RunName:
    project: str
    experiment: str
    created_ns: int


@dataclass(slots=True)
class Report:
    """All of it. `daemon`: what the daemon wrote down about itself, empty when it never ran."""

    daemon: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, RunName] = field(default_factory=dict)
    backends: dict[str, dict[str, Account]] = field(default_factory=dict)
    watch: list[dict[str, Any]] = field(default_factory=list)  # what was taken of each watched folder

    def total(self, backend: str) -> Account:
        total = Account()
        for account in self.backends[backend].values():
            total.add(account)
        return total

    @property
    def pending(self) -> int:
        return sum(self.total(name).pending for name in self.backends)

    def to_json(self) -> dict[str, Any]:
        backends = {}
        for name, runs in self.backends.items():
            told = {run: account.to_json() | {"renamed": account.renamed} for run, account in runs.items()}
            backends[name] = self.total(name).to_json() | {"runs": told}
        runs_json = {
            run_id: {"project": run.project, "experiment": run.experiment} for run_id, run in self.runs.items()
        }
        return {"daemon": self.daemon, "runs": runs_json, "backends": backends, "watch": self.watch}


@dataclass(frozen=True, slots=True)
class _Logged:
    """What ingest knows of one stream."""

    run_id: str
    ordinal_next: int
    is_reclaimed: bool  # its bytes are gone: what a lane has not read it never will


def report(state_dir: str, backends: Iterable[str] | None = None) -> Report:
    """The present account. `backends`: only these (default: all that ever had a lane here)."""
    found = Report()
    logged = _read_daemon(os.path.join(state_dir, "daemon.sqlite3"), found)
    found.watch = _read_collector(os.path.join(state_dir, "collect.sqlite3"))
    lanes = os.path.join(state_dir, "lanes")
    names = sorted(name[: -len(".sqlite3")] for name in _listdir(lanes) if name.endswith(".sqlite3"))
    wanted = list(backends) if backends is not None else sorted({*names, *found.daemon.get("backends", [])})
    for name in wanted:
        found.backends[name] = _read_lane(os.path.join(lanes, f"{name}.sqlite3"), logged, found.runs)
    return found


def _read_daemon(path: str, found: Report) -> dict[str, _Logged]:
    """Records logged by stream; names and notes go into the report."""
    logged: dict[str, _Logged] = {}
    db = open_store_read_only(path)
    if db is None:
        return logged
    try:
        rows = db.execute("SELECT stream_id, run_id, header, ordinal_next, state FROM streams")
        for stream_id, run_id, header_bytes, ordinal_next, state in rows:
            logged[stream_id] = _Logged(run_id, ordinal_next, state == RECLAIMED)
            header = decode_header(header_bytes)
            known = found.runs.get(run_id)
            if known is None or header.created_ns < known.created_ns:
                found.runs[run_id] = RunName(header.project, header.experiment, header.created_ns)
        for key, value in db.execute("SELECT key, value FROM notes"):
            found.daemon[key] = json.loads(value)
        _name_unnamed(found)
    except Exception as error:  # noqa: BLE001 - damage may look like anything; what was read before it counts
        found.daemon["state_error"] = f"{type(error).__name__}: {error}"
    finally:
        db.close()
    return logged


def _read_collector(path: str) -> list[dict[str, Any]]:
    db = open_store_read_only(path)
    if db is None:
        return []
    try:
        row = db.execute("SELECT value FROM notes WHERE key = 'places'").fetchone()
        return list(json.loads(row[0])) if row else []
    except (sqlite3.Error, ValueError):
        return []
    finally:
        db.close()


def _name_unnamed(found: Report) -> None:
    """Runs that came without names have those of the daemon's configuration, as their lanes give them."""
    names = found.daemon.get(UNNAMED_NOTE) or {}
    for run in found.runs.values():
        run.project = run.project or names.get("project") or UNNAMED
        run.experiment = run.experiment or names.get("experiment") or UNNAMED


def _read_lane(path: str, logged: dict[str, _Logged], runs: dict[str, RunName]) -> dict[str, Account]:
    accounts: dict[str, Account] = {}
    for stream in logged.values():
        account = accounts.setdefault(stream.run_id, Account())
        account.logged += stream.ordinal_next
        account.pending += stream.ordinal_next
    now_ns = time.time_ns()
    for run_id, account in accounts.items():  # until something is delivered, the run itself is what waits
        account.lag_s = max(now_ns - runs[run_id].created_ns, 0) / 1e9 if run_id in runs else 0.0
    db = open_store_read_only(path)
    if db is None:
        return accounts
    try:
        db.execute("BEGIN")  # one snapshot of all tables
        _add_cursors(db, accounts, logged)
        _add_reclaimed(db, accounts, logged)
        _add_tallies(db, accounts)
        _add_names(db, accounts)
        _add_reasons(db, accounts)
    except Exception as error:  # noqa: BLE001 - damage may look like anything; what was read before it counts
        for account in accounts.values():
            account.last_error = f"lane state: {type(error).__name__}: {error}"
    finally:
        db.close()
    return accounts


def _add_cursors(db: sqlite3.Connection, accounts: dict[str, Account], logged: dict[str, _Logged]) -> None:
    for stream_id, run_id, ordinal, dropped in db.execute("SELECT stream_id, run_id, ordinal, dropped FROM cursors"):
        account = accounts.setdefault(run_id, Account())
        known = logged.get(stream_id)
        written_down = known.ordinal_next if known else 0
        # A lane may be a moment ahead of what ingest has written down.
        account.logged += max(ordinal - written_down, 0)
        account.pending -= min(ordinal, written_down)
        account.dropped.update(msgpack.unpackb(dropped))
    for run_id, count in db.execute("SELECT run_id, sum(count) FROM outbox GROUP BY run_id"):
        accounts.setdefault(run_id, Account()).pending += count


def _add_reclaimed(db: sqlite3.Connection, accounts: dict[str, Account], logged: dict[str, _Logged]) -> None:
    read = dict(db.execute("SELECT stream_id, ordinal FROM cursors"))
    for stream_id, known in logged.items():
        missed = known.ordinal_next - min(read.get(stream_id, 0), known.ordinal_next)
        if known.is_reclaimed and missed:
            accounts[known.run_id].pending -= missed
            accounts[known.run_id].dropped[RECLAIMED] += missed


def _add_tallies(db: sqlite3.Connection, accounts: dict[str, Account]) -> None:
    columns = (
        "run_id, delivered, sampled_out, dead_lettered, discarded, unreadable, letters_full, "
        "retries, ignored, parked, last_error"
    )
    now_ns = time.time_ns()
    for row in db.execute(f"SELECT {columns}, delivered_ns FROM tallies"):  # noqa: S608 - our own names
        run_id, delivered, sampled, dead, *gone, retries, ignored, parked, error, delivered_ns = row
        account = accounts.setdefault(run_id, Account())
        account.delivered, account.sampled_out, account.dead_lettered = delivered, sampled, dead
        account.retries, account.last_error, account.parked = retries, error, int(bool(parked))
        account.ignored.update(msgpack.unpackb(ignored))
        for reason, count in zip((DISCARDED, UNREADABLE, LETTERS_FULL), gone, strict=True):
            if count:
                account.dropped[reason] += count
        if delivered_ns:
            account.lag_s = max(now_ns - delivered_ns, 0) / 1e9 if account.pending else 0.0


def _add_names(db: sqlite3.Connection, accounts: dict[str, Account]) -> None:
    for run_id, packed in db.execute("SELECT run_id, value FROM notes WHERE key = ?", (NAMES_NOTE,)):
        names = msgpack.unpackb(packed)
        if isinstance(names, dict):
            changed = {original: shown for original, shown in names.items() if shown != original}
            accounts.setdefault(run_id, Account()).renamed = changed


def _add_reasons(db: sqlite3.Connection, accounts: dict[str, Account]) -> None:
    for run_id, packed in db.execute("SELECT run_id, value FROM notes WHERE key = ?", (SAMPLED_NOTE,)):
        accounts.setdefault(run_id, Account()).sampled.update(msgpack.unpackb(packed))


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
