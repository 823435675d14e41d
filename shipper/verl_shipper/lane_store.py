"""The durable state of one lane: cursors, outbox, dead letters, counters, notes of backends. One SQLite file.

    cursor    a stream: bytes and records taken into batches (`offset`, `ordinal`), and `safe_offset`, below which
              nothing is needed again
    outbox    sealed batches of a run in order, exact bytes, written before the first attempt
    tally     what became of a run's records

One transaction per change of hands, so that at any moment, for each run:

    sum of ordinals = delivered + sampled_out + dead_lettered + dropped + items in the outbox

Must not know: trackers, files of the spool. On failure: sqlite3.Error; the lane's process ends and starts again.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from verl_shipper.backends.base import Item
from verl_shipper.store import open_store, transaction
from verl_shipper_spool.reader import Ledger
from verl_shipper_spool.record import decode_record
from verl_shipper_spool.redact import scrub

LETTERS_BYTES_MAX = 256 * 1024 * 1024  # of one lane; what an operator could not look through anyway

SAMPLED_NOTE = "lane.sampled"  # records sampled out, by reason; their sum is the tally's
SAMPLED_OUT = "sampled_out"  # values left out of records that are delivered

SCHEMA = """
CREATE TABLE IF NOT EXISTS cursors (
    stream_id   TEXT PRIMARY KEY,
    run_id      TEXT NOT NULL,
    offset      INTEGER NOT NULL,
    safe_offset INTEGER NOT NULL,
    ordinal     INTEGER NOT NULL,
    seen        INTEGER NOT NULL,
    damaged     INTEGER NOT NULL,
    dropped     BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS outbox (
    run_id   TEXT NOT NULL,
    position REAL NOT NULL,
    batch_id TEXT NOT NULL,
    items    BLOB NOT NULL,
    count    INTEGER NOT NULL,
    PRIMARY KEY (run_id, position)
);
CREATE TABLE IF NOT EXISTS dead_letters (
    letter_id INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id    TEXT NOT NULL,
    stream_id TEXT NOT NULL,
    ordinal   INTEGER NOT NULL,
    item      BLOB NOT NULL,
    reason    TEXT NOT NULL,
    time_ns   INTEGER NOT NULL,
    wanted    TEXT                     -- NULL | retry | discard: what an operator asked for
);
CREATE INDEX IF NOT EXISTS letters_wanted ON dead_letters (letter_id) WHERE wanted IS NOT NULL;
CREATE TABLE IF NOT EXISTS tallies (
    run_id        TEXT PRIMARY KEY,
    delivered     INTEGER NOT NULL DEFAULT 0,
    sampled_out   INTEGER NOT NULL DEFAULT 0,
    dead_lettered INTEGER NOT NULL DEFAULT 0,
    discarded     INTEGER NOT NULL DEFAULT 0,
    unreadable    INTEGER NOT NULL DEFAULT 0,
    letters_full  INTEGER NOT NULL DEFAULT 0,
    retries       INTEGER NOT NULL DEFAULT 0,
    ignored       BLOB NOT NULL DEFAULT x'80',
    parked        TEXT NOT NULL DEFAULT '',
    last_error    TEXT NOT NULL DEFAULT '',
    delivered_ns  INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS samplers (
    stream_id TEXT PRIMARY KEY,
    state     BLOB NOT NULL            -- of the stream up to its cursor, see policy/stream_sampler.py
);
CREATE TABLE IF NOT EXISTS notes (
    run_id TEXT NOT NULL,
    key    TEXT NOT NULL,
    value  BLOB NOT NULL,
    PRIMARY KEY (run_id, key)
);
"""


@dataclass(slots=True)
class Cursor:
    """Where a lane stands in one stream."""

    stream_id: str
    run_id: str
    offset: int = 0
    safe_offset: int = 0
    ledger: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A batch in the outbox."""

    run_id: str
    position: float
    batch_id: str
    items: tuple[Item, ...]


@dataclass(slots=True)
class Taken:
    """What one look at a run's streams brought."""

    items: list[Item] = field(default_factory=list)
    size_bytes: int = 0
    scanned: int = 0  # findings that were looked at
    already: int = 0  # records that the tracker has, by its own watermark
    unreadable: int = 0  # frames whose payload is no record
    sampled: dict[str, int] = field(default_factory=dict)  # records left out, by reason
    thinned: int = 0  # values left out of records that are delivered
    cursors: list[Cursor] = field(default_factory=list)  # those that moved
    samplers: dict[str, Any] = field(default_factory=dict)  # states of their samplers
    notes: dict[str, Any] = field(default_factory=dict)


class LaneStore:
    """Owner of a lane's SQLite file. Used by the lane's main thread, and by backends' threads for their notes."""

    def __init__(self, path: str) -> None:
        self._db = open_store(path, SCHEMA)
        self._lock = threading.RLock()  # one connection, and the notes come from other threads
        self._letters_bytes = self._count_letters()

    def close(self) -> None:
        self._db.close()

    def cursors(self) -> dict[str, Cursor]:
        found = {}
        for row in self._db.execute("SELECT * FROM cursors"):
            stream_id, run_id, offset, safe_offset, ordinal, seen, damaged, dropped = row
            ledger = Ledger(ordinal, seen, msgpack.unpackb(dropped), bool(damaged))
            found[stream_id] = Cursor(stream_id, run_id, offset, safe_offset, ledger)
        return found

    def sealed_runs(self) -> set[str]:
        """Runs that have something in the outbox."""
        return {row[0] for row in self._db.execute("SELECT DISTINCT run_id FROM outbox")}

    def first_sealed(self, run_id: str) -> Sealed | None:
        row = self._db.execute(
            "SELECT position, batch_id, items FROM outbox WHERE run_id = ? ORDER BY position LIMIT 1", (run_id,)
        ).fetchone()
        return Sealed(run_id, row[0], row[1], _unpack_items(row[2])) if row else None

    def seal(self, run_id: str, batch_id: str, taken: Taken) -> Sealed | None:
        """Take items from the streams into the outbox: the batch and the cursors behind it, together. Returns the
        batch."""
        if not (taken.items or taken.cursors or taken.notes):
            return None
        position = None
        with self._transaction():
            if taken.items:
                position = self._append(run_id, batch_id, taken.items)
            for cursor in taken.cursors:
                self._save_cursor(cursor)
            for stream_id, state in taken.samplers.items():
                self._db.execute("INSERT OR REPLACE INTO samplers VALUES (?, ?)", (stream_id, msgpack.packb(state)))
            sampled_out = sum(taken.sampled.values())
            self._tally(run_id, unreadable=taken.unreadable, delivered=taken.already, sampled_out=sampled_out)
            for key, value in taken.notes.items():
                self._note(run_id, key, value)
            if sampled_out:
                self._count_sampled(run_id, taken.sampled)
            if taken.thinned:
                self._add_ignored(run_id, {SAMPLED_OUT: taken.thinned})
            self._free_safe(run_id)
        return None if position is None else Sealed(run_id, position, batch_id, tuple(taken.items))

    def sampler_state(self, stream_id: str) -> dict[str, Any]:
        """The state of a stream's sampler at its cursor; empty when there is none."""
        row = self._db.execute("SELECT state FROM samplers WHERE stream_id = ?", (stream_id,)).fetchone()
        return msgpack.unpackb(row[0], strict_map_key=False) if row else {}

    def delivered(self, sealed: Sealed, count: int, remember: Mapping[str, Any], ignored: Mapping[str, int]) -> None:
        """The tracker has the batch. `count` of its items are counted delivered (all but dead letters)."""
        with self._transaction():
            self._remove(sealed)
            for key, value in remember.items():
                self._note(sealed.run_id, key, value)
            self._tally(sealed.run_id, delivered=count)
            self._db.execute(
                "UPDATE tallies SET delivered_ns = ?, parked = '' WHERE run_id = ?", (time.time_ns(), sealed.run_id)
            )
            if ignored:
                self._add_ignored(sealed.run_id, ignored)
            self._free_safe(sealed.run_id)

    def split(self, sealed: Sealed, groups: Iterable[list[Item]]) -> None:
        """Replace a batch by smaller ones with the same items in the same order."""
        with self._transaction():
            self._remove(sealed)
            later = self._db.execute(
                "SELECT min(position) FROM outbox WHERE run_id = ? AND position > ?", (sealed.run_id, sealed.position)
            ).fetchone()[0]
            parts = [items for items in groups if items]
            room = (later - sealed.position if later is not None else 1.0) / (len(parts) + 1)
            for index, items in enumerate(parts):
                self._insert(sealed.run_id, sealed.position + room * index, f"{sealed.batch_id}.{index}", items)

    def bury(self, sealed: Sealed, reasons: Mapping[int, str]) -> None:
        """Move items of a batch, by index, to the dead letters; what is left of the batch stays, under a new id."""
        indices = reasons.keys()
        added = 0
        with self._transaction():
            self._remove(sealed)
            rest = [item for index, item in enumerate(sealed.items) if index not in indices]
            if rest:
                self._insert(sealed.run_id, sealed.position, f"{sealed.batch_id}.r", rest)
            for index in sorted(indices):
                item = sealed.items[index]
                packed = _pack_items([item])
                added += len(packed)
                self._db.execute(
                    "INSERT INTO dead_letters (run_id, stream_id, ordinal, item, reason, time_ns) VALUES (?,?,?,?,?,?)",
                    (sealed.run_id, item.stream_id, item.ordinal, packed, scrub(reasons[index])[:1000], time.time_ns()),
                )
            self._tally(sealed.run_id, dead_lettered=len(indices))
            self._free_safe(sealed.run_id)
        self._letters_bytes += added
        if self._letters_bytes > LETTERS_BYTES_MAX:
            self._shed_letters()

    def trouble(self, run_id: str, text: str, *, parked: bool, retried: bool = True) -> None:
        """Note the latest error of a run."""
        text = scrub(text)
        with self._transaction():
            self._tally(run_id, retries=int(retried))
            self._db.execute(
                "UPDATE tallies SET last_error = ?, parked = ? WHERE run_id = ?",
                (text[:1000], text[:1000] if parked else "", run_id),
            )

    def answer_operator(self) -> set[str]:
        """Do what `dead-letters retry|discard` asked for. Returns the runs that have new work."""
        wanted = self._db.execute(
            "SELECT letter_id, run_id, item, wanted FROM dead_letters WHERE wanted IS NOT NULL ORDER BY letter_id"
        ).fetchall()
        if not wanted:
            return set()
        with self._transaction():
            for letter_id, run_id, item, what in wanted:
                self._db.execute("DELETE FROM dead_letters WHERE letter_id = ?", (letter_id,))
                retry = what == "retry"
                self._tally(run_id, dead_lettered=-1, discarded=0 if retry else 1)
                if retry:
                    self._append(run_id, f"letter-{letter_id}", list(_unpack_items(item)))
        self._letters_bytes = self._count_letters()
        return {run_id for _, run_id, _, what in wanted if what == "retry"}

    def _count_letters(self) -> int:
        return int(self._db.execute("SELECT coalesce(sum(length(item)), 0) FROM dead_letters").fetchone()[0])

    def _shed_letters(self) -> None:
        """A tracker that refuses everything must not fill the disk: the oldest letters go, counted."""
        left = self._count_letters()
        with self._transaction():
            for letter_id, run_id, size in self._db.execute(
                "SELECT letter_id, run_id, length(item) FROM dead_letters ORDER BY letter_id"
            ).fetchall():
                if left <= LETTERS_BYTES_MAX * 3 // 4:
                    break
                self._db.execute("DELETE FROM dead_letters WHERE letter_id = ?", (letter_id,))
                self._tally(run_id, dead_lettered=-1, letters_full=1)
                left -= size
        self._letters_bytes = left

    def get_note(self, run_id: str, key: str) -> Any:
        with self._lock:
            row = self._db.execute("SELECT value FROM notes WHERE run_id = ? AND key = ?", (run_id, key)).fetchone()
        return msgpack.unpackb(row[0]) if row else None

    def put_note(self, run_id: str, key: str, value: Any) -> None:
        with self._transaction():
            self._note(run_id, key, value)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, transaction(self._db):
            yield

    def _append(self, run_id: str, batch_id: str, items: list[Item]) -> float:
        last = self._db.execute("SELECT max(position) FROM outbox WHERE run_id = ?", (run_id,)).fetchone()[0]
        # Small whole numbers: between two of them there is room to halve a batch down to its last item.
        position = math.floor(last or 0.0) + 1.0
        self._insert(run_id, position, batch_id, items)
        return position

    def _insert(self, run_id: str, position: float, batch_id: str, items: list[Item]) -> None:
        self._db.execute(
            "INSERT INTO outbox VALUES (?, ?, ?, ?, ?)",
            (run_id, position, batch_id, _pack_items(items), len(items)),
        )

    def _remove(self, sealed: Sealed) -> None:
        self._db.execute("DELETE FROM outbox WHERE run_id = ? AND position = ?", (sealed.run_id, sealed.position))

    def _free_safe(self, run_id: str) -> None:
        """With an empty outbox nothing below the cursors is needed again."""
        self._db.execute(
            "UPDATE cursors SET safe_offset = offset WHERE run_id = ? "
            "AND NOT EXISTS (SELECT 1 FROM outbox WHERE outbox.run_id = cursors.run_id)",
            (run_id,),
        )

    def _save_cursor(self, cursor: Cursor) -> None:
        ledger = cursor.ledger
        packed = msgpack.packb(ledger.dropped)
        self._db.execute(
            "INSERT INTO cursors VALUES (?,?,?,?,?,?,?,?) ON CONFLICT (stream_id) DO UPDATE SET"
            " offset = excluded.offset, ordinal = excluded.ordinal, seen = excluded.seen,"
            " damaged = excluded.damaged, dropped = excluded.dropped",
            (
                cursor.stream_id,
                cursor.run_id,
                cursor.offset,
                cursor.safe_offset,
                ledger.ordinal,
                ledger.seen,
                ledger.damaged,
                packed,
            ),
        )

    def _tally(self, run_id: str, **more: int) -> None:
        self._db.execute("INSERT OR IGNORE INTO tallies (run_id) VALUES (?)", (run_id,))
        for column, count in more.items():
            if count:
                self._db.execute(
                    f"UPDATE tallies SET {column} = {column} + ? WHERE run_id = ?",  # noqa: S608 - our own names
                    (count, run_id),
                )

    def _add_ignored(self, run_id: str, ignored: Mapping[str, int]) -> None:
        row = self._db.execute("SELECT ignored FROM tallies WHERE run_id = ?", (run_id,)).fetchone()
        total: dict[str, int] = msgpack.unpackb(row[0])
        for reason, count in ignored.items():
            if count:
                total[reason] = total.get(reason, 0) + count
        self._db.execute("UPDATE tallies SET ignored = ? WHERE run_id = ?", (msgpack.packb(total), run_id))

    def _count_sampled(self, run_id: str, more: Mapping[str, int]) -> None:
        counts = Counter(self.get_note(run_id, SAMPLED_NOTE) or {})
        counts.update(more)
        self._note(run_id, SAMPLED_NOTE, dict(counts))

    def _note(self, run_id: str, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", (run_id, key, msgpack.packb(value)))


def _pack_items(items: Iterable[Item]) -> bytes:
    packed: bytes = msgpack.packb([[item.stream_id, item.ordinal, item.rank, item.payload] for item in items])
    return packed


def _unpack_items(packed: bytes) -> tuple[Item, ...]:
    return tuple(
        Item(stream_id, ordinal, rank, decode_record(payload), payload)
        for stream_id, ordinal, rank, payload in msgpack.unpackb(packed)
    )
