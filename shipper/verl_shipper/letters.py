"""Dead letters for operators: list them, ask for a retry, throw them away.

The lane owns them; this only marks what is wanted, and the lane acts on it within a second (or at its next start).
Must not know: trackers. On failure: ShipperError.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgpack

from verl_shipper.errors import ShipperError
from verl_shipper.store import BUSY_TIMEOUT_S
from verl_shipper_spool.record import KIND_NAME, decode_record


@dataclass(frozen=True, slots=True)
class Letter:
    """A record that a tracker refused for good."""

    backend: str
    letter_id: int
    run_id: str
    kind: str
    step: int | None
    reason: str
    time_ns: int
    wanted: str | None


def letters(state_dir: str) -> list[Letter]:
    """All dead letters of all lanes, oldest first."""
    found = []
    for backend, path in _lanes(state_dir):
        with _opened(path) as db:
            rows = db.execute("SELECT letter_id, run_id, item, reason, time_ns, wanted FROM dead_letters").fetchall()
        for letter_id, run_id, item, reason, time_ns, wanted in rows:
            kind, step = _described(item)
            found.append(Letter(backend, letter_id, run_id, kind, step, reason, time_ns, wanted))
    return sorted(found, key=lambda letter: letter.time_ns)


def want(state_dir: str, what: str, backend: str | None, letter_ids: Sequence[int], run_id: str | None) -> int:
    """Mark letters for `retry` or `discard`; returns how many. No ids and no run: all of the backend, or of all."""
    assert what in ("retry", "discard"), what
    count = 0
    for name, path in _lanes(state_dir):
        if backend is not None and name != backend:
            continue
        conditions, values = ["1"], []
        if letter_ids:
            conditions.append(f"letter_id IN ({', '.join('?' * len(letter_ids))})")
            values += [str(letter_id) for letter_id in letter_ids]
        if run_id is not None:
            conditions.append("run_id = ?")
            values.append(run_id)
        sql = f"UPDATE dead_letters SET wanted = ? WHERE {' AND '.join(conditions)}"  # noqa: S608 - values are bound
        with _opened(path) as db:
            count += db.execute(sql, [what, *values]).rowcount
    return count


def _described(item: bytes) -> tuple[str, int | None]:
    """Kind and step of a kept record; one that cannot be read is listed all the same."""
    try:
        record = decode_record(msgpack.unpackb(item)[0][3])
    except Exception:  # noqa: BLE001 - damage may look like anything
        return "unreadable", None
    return KIND_NAME[record.kind], record.step


def _lanes(state_dir: str) -> list[tuple[str, str]]:
    folder = os.path.join(state_dir, "lanes")
    suffix = ".sqlite3"
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [(name[: -len(suffix)], os.path.join(folder, name)) for name in names if name.endswith(suffix)]


@contextlib.contextmanager
def _opened(path: str) -> Iterator[sqlite3.Connection]:
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as db:
            yield db
    except sqlite3.Error as error:
        raise ShipperError(
            f"cannot read dead letters: {error}", where=path, hint="is the lane's state intact?"
        ) from error
