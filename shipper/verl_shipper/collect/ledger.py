"""What was taken of which file: SQLite, one transaction per change of hands. What makes a record come exactly once.

    intent   before records are appended: "ordinals [first, first + count) of stream S are this of file F", with what is
             true of F after each of them
    settle   afterwards, or after a restart with the number of ordinals that S really got: F is as far as they tell

A file is a row as long as its inode lives: renamed, it keeps its row; another file at its path gets another one.
Content that was taken whole is known by a digest, whatever its name is by then.

A ledger that was damaged is quarantined (store.py) and begun anew: what lies in the folders is then taken once more.

Must not know: how files are read, streams. On failure: sqlite3.Error, with nothing changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from verl_shipper.policy.watching import Known, Seen
from verl_shipper.store import open_store, transaction

FILES_REMEMBERED_MAX = 1_000_000  # about 300 bytes each; beyond, those that are gone are forgotten, new ones refused
DIGESTS_REMEMBERED_MAX = 1_000_000  # of content that was taken whole; the oldest go
FORGET_AT_ONCE = 10_000

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again: who takes a file may outlive its row
    path     BLOB,                  -- NULL: another file has its name now, and nobody knows under which it lives
    place    TEXT NOT NULL,         -- key of the entry
    kind     TEXT NOT NULL,
    identity TEXT NOT NULL,         -- device and inode
    size     INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    state    TEXT NOT NULL,         -- waiting | taken | torn | gone
    more     BLOB NOT NULL          -- what only its kind knows: offset and digests, or the plan of a table
);
CREATE UNIQUE INDEX IF NOT EXISTS files_by_path ON files (path);
CREATE INDEX IF NOT EXISTS files_by_identity ON files (identity);
CREATE INDEX IF NOT EXISTS files_by_state ON files (place, state);
CREATE TABLE IF NOT EXISTS digests (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS calls (table_key BLOB PRIMARY KEY, call INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS intents (
    stream_id TEXT NOT NULL, first INTEGER NOT NULL, count INTEGER NOT NULL, file_id INTEGER NOT NULL,
    after BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS places (place TEXT PRIMARY KEY, began_ns INTEGER NOT NULL, is_whole INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS counts (place TEXT, what TEXT, count INTEGER NOT NULL, PRIMARY KEY (place, what));
CREATE TABLE IF NOT EXISTS notes (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""

WAITING, TAKEN, TORN_END, GONE = "waiting", "taken", "torn", "gone"


@dataclass(slots=True)
class File:
    """A file as the ledger knows it.

    offset, head_bytes, head, mark, is_inside   of one that grows: how far it is read, how it is recognised, and whether
                                                we are in the midst of a line that is too long
    plan, part                                  of a table: its cut, and the next part; of one that grows: 1, once it
                                                counts as taken
    run                                         [run_id, project, experiment, rank]; empty until it is decided
    """

    id: int
    path: str | None
    place: str
    kind: str
    seen: Seen
    state: str = WAITING
    offset: int = 0
    head_bytes: int = 0
    head: bytes = b""
    mark: bytes = b""
    is_inside: bool = False
    run: list[Any] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    part: int = 0

    @property
    def known(self) -> Known:
        return Known(self.seen.identity, self.offset, self.head_bytes, self.head, self.mark)


_MORE = ("offset", "head_bytes", "head", "mark", "is_inside", "run", "plan", "part")


@dataclass(frozen=True, slots=True)
class Mark:
    """What is true of a file after one record of an intent: changed fields, counts, content that is now taken whole."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    digest: bytes = b""


class Ledger:
    """Owner of collect.sqlite3. `is_new`: nothing was in it."""

    def __init__(self, path: str) -> None:
        before = os.path.exists(path) and os.path.getsize(path) > 0
        self._db = open_store(path, SCHEMA)
        self.is_new = self._db.execute("SELECT count(*) FROM places").fetchone()[0] == 0
        self.was_lost = before and self._db.execute("SELECT value FROM notes WHERE key = 'made'").fetchone() is None
        with self.batch():
            self._db.execute("INSERT OR IGNORE INTO notes VALUES ('made', '1')")
        self._files = self._db.execute("SELECT count(*) FROM files").fetchone()[0]

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Everything inside is one transaction."""
        if self._db.in_transaction:
            yield
            return
        with transaction(self._db):
            yield

    # --- places ---------------------------------------------------------------------------------------------------

    def begin_place(self, place: str, now_ns: int) -> tuple[int, bool]:
        """When the entry was first looked at, and whether a whole look was made since."""
        with self.batch():
            self._db.execute("INSERT OR IGNORE INTO places VALUES (?, ?, 0)", (place, now_ns))
        row = self._db.execute("SELECT began_ns, is_whole FROM places WHERE place = ?", (place,)).fetchone()
        return int(row[0]), bool(row[1])

    def place_is_whole(self, place: str) -> None:
        with self.batch():
            self._db.execute("UPDATE places SET is_whole = 1 WHERE place = ?", (place,))

    def count(self, place: str, counts: Mapping[str, int]) -> None:
        with self.batch():
            self._count(place, counts)

    # --- files ----------------------------------------------------------------------------------------------------

    def at(self, path: str) -> File | None:
        return self._one("path = ?", os.fsencode(path))

    def of_identity(self, identity: str) -> File | None:
        return self._one("identity = ? ORDER BY (path IS NULL) DESC, id DESC", identity)

    def waiting(self, place: str) -> Iterator[File]:
        rows = self._db.execute(f"SELECT {_COLUMNS} FROM files WHERE place = ? AND state = 'waiting'", (place,))  # noqa: S608 - our own names
        yield from map(_file, rows.fetchall())

    def adrift(self, place: str) -> list[File]:
        """Files whose name another one has now."""
        rows = self._db.execute(f"SELECT {_COLUMNS} FROM files WHERE place = ? AND path IS NULL", (place,))  # noqa: S608 - same
        return [_file(row) for row in rows.fetchall()]

    def add(self, path: str, place: str, kind: str, seen: Seen, **fields: Any) -> File | None:
        """A row for a file that nobody knew; None when there are too many."""
        if self._files >= FILES_REMEMBERED_MAX and not self._forget_gone():
            return None
        file = replace(File(0, path, place, kind, seen), **fields)
        with self.batch():
            self._db.execute("UPDATE files SET path = NULL WHERE path = ?", (os.fsencode(path),))
            made = self._db.execute(
                "INSERT INTO files (path, place, kind, identity, size, mtime_ns, state, more) VALUES (?,?,?,?,?,?,?,?)",
                _values(file),
            )
        file.id = made.lastrowid or 0
        self._files += 1
        return file

    def move(self, file: File, path: str, place: str) -> None:
        """The file has another name now."""
        file.path, file.place = path, place
        with self.batch():
            self._db.execute("UPDATE files SET path = NULL WHERE path = ? AND id != ?", (os.fsencode(path), file.id))
            self._db.execute("UPDATE files SET path = ?, place = ? WHERE id = ?", (os.fsencode(path), place, file.id))

    def put(self, file: File, mark: Mark) -> None:
        """What became of a file without any record of it."""
        with self.batch():
            self._apply(file, mark)

    def remove(self, file: File, counts: Mapping[str, int]) -> None:
        with self.batch():
            self._db.execute("DELETE FROM files WHERE id = ?", (file.id,))
            self._count(file.place, counts)
        self._files -= 1

    # --- content --------------------------------------------------------------------------------------------------

    def knows(self, digest: bytes) -> bool:
        return self._db.execute("SELECT 1 FROM digests WHERE digest = ?", (digest,)).fetchone() is not None

    def next_call(self, table_key: bytes) -> int:
        """Number of the next table of a step: a second one does not replace the first."""
        row = self._db.execute("SELECT call FROM calls WHERE table_key = ?", (table_key,)).fetchone()
        return 0 if row is None else int(row[0]) + 1

    def put_plan(self, file: File, table_key: bytes, call: int) -> None:
        with self.batch():
            self._db.execute("INSERT OR REPLACE INTO calls VALUES (?, ?)", (table_key, call))
            self._put(file)

    # --- intents --------------------------------------------------------------------------------------------------

    def intend(self, file: File, stream_id: str, first: int, marks: list[Mark]) -> None:
        """Durable before the first of these records is appended."""
        after = msgpack.packb([[mark.fields, mark.counts, mark.digest] for mark in marks])
        with self.batch():
            self._db.execute(
                "INSERT INTO intents VALUES (?, ?, ?, ?, ?)", (stream_id, first, len(marks), file.id, after)
            )

    def intents(self) -> list[tuple[str, int, int, int, list[Mark]]]:
        """(stream, first ordinal, count, file, marks) of what may have been interrupted."""
        rows = self._db.execute("SELECT stream_id, first, count, file_id, after FROM intents").fetchall()
        return [(*row[:4], [Mark(*each) for each in msgpack.unpackb(row[4])]) for row in rows]

    def settle(self, file_id: int, marks: list[Mark], file: File | None = None) -> None:
        """These records are kept; the intent is over."""
        with self.batch():
            self._db.execute("DELETE FROM intents WHERE file_id = ?", (file_id,))
            file = file or self._one("id = ?", file_id)
            if file is not None and marks:
                fields = {key: value for mark in marks for key, value in mark.fields.items()}
                counts: dict[str, int] = {}
                for mark in marks:
                    for what, count in mark.counts.items():
                        counts[what] = counts.get(what, 0) + count
                self._apply(file, Mark(fields, counts, marks[-1].digest))

    # --- for people -----------------------------------------------------------------------------------------------

    def figures(self, place: str) -> dict[str, int]:
        found = dict(self._db.execute("SELECT what, count FROM counts WHERE place = ?", (place,)).fetchall())
        states = "SELECT state, count(*) FROM files WHERE place = ? AND state IN ('waiting', 'torn') GROUP BY state"
        return found | {f"now_{state}": count for state, count in self._db.execute(states, (place,))}

    def note(self, key: str, value: str) -> None:
        with self.batch():
            self._db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, value))

    # --- inside a transaction -------------------------------------------------------------------------------------

    def _apply(self, file: File, mark: Mark) -> None:
        for name, value in mark.fields.items():
            setattr(file, name, Seen(*value) if name == "seen" else value)
        self._put(file)
        self._count(file.place, mark.counts)
        if mark.digest:
            made = self._db.execute("INSERT OR IGNORE INTO digests (digest) VALUES (?)", (mark.digest,))
            self._db.execute("DELETE FROM digests WHERE id <= ?", ((made.lastrowid or 0) - DIGESTS_REMEMBERED_MAX,))

    def _put(self, file: File) -> None:
        """All but its name and place: who takes a file for a while need not hear that it was renamed."""
        self._db.execute(
            "UPDATE files SET kind = ?, identity = ?, size = ?, mtime_ns = ?, state = ?, more = ? WHERE id = ?",
            (*_values(file)[2:], file.id),
        )

    def _count(self, place: str, counts: Mapping[str, int]) -> None:
        for what, count in counts.items():
            self._db.execute(
                "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT (place, what) DO UPDATE SET count = count + ?",
                (place, what, count, count),
            )

    def _one(self, where: str, value: object) -> File | None:
        row = self._db.execute(f"SELECT {_COLUMNS} FROM files WHERE {where} LIMIT 1", (value,)).fetchone()  # noqa: S608 - same
        return None if row is None else _file(row)

    def _forget_gone(self) -> int:
        """Make room: what was taken and is not there any more. Returns how many rows went."""
        rows = self._db.execute(
            "SELECT id, path FROM files WHERE state IN ('taken', 'torn') ORDER BY mtime_ns LIMIT ?", (FORGET_AT_ONCE,)
        ).fetchall()
        gone = [(row[0],) for row in rows if row[1] is None or not os.path.lexists(os.fsdecode(row[1]))]
        with contextlib.suppress(sqlite3.Error), self.batch():
            self._db.executemany("DELETE FROM files WHERE id = ?", gone)
            self._files -= len(gone)
        return len(gone)


def key_of(*parts: object) -> bytes:
    """A digest of some values, for tables and contents."""
    packed = msgpack.packb([part if isinstance(part, bytes) else str(part) for part in parts], unicode_errors="replace")
    return hashlib.sha256(packed).digest()[:20]


_COLUMNS = "id, path, place, kind, identity, size, mtime_ns, state, more"


def _values(file: File) -> tuple[Any, ...]:
    path = None if file.path is None else os.fsencode(file.path)
    more = msgpack.packb({name: value for name in _MORE if (value := getattr(file, name))}, unicode_errors="replace")
    return path, file.place, file.kind, file.seen.identity, file.seen.size, file.seen.mtime_ns, file.state, more


def _file(row: tuple[Any, ...]) -> File:
    device, _, inode = row[4].partition(":")
    seen = Seen(int(device, 16), int(inode, 16), row[5], row[6])
    path = None if row[1] is None else os.fsdecode(row[1])
    return File(row[0], path, row[2], row[3], seen, row[7], **msgpack.unpackb(row[8], strict_map_key=False))
