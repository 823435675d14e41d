"""SQLite files of the daemon and its lanes: open, or quarantine and begin anew.

Promises: a state file that is empty, torn or full of NULs (all seen after power loss) never stops a start and never
loses records: it is renamed to `*.bad-<time>` and rebuilt by its owner from the spool and the trackers' own
watermarks. One transaction per commit, durable when the call returns.

Must not know: tables. On failure: sqlite3.Error for a disk that does not take a transaction.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from urllib.parse import quote

from verl_shipper_spool.files import FILE_MODE

log = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 10.0


def open_store(path: str, schema: str) -> sqlite3.Connection:
    """A connection in autocommit mode with `schema` applied. A damaged file is quarantined first."""
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    if os.path.lexists(path) and not os.path.isfile(path):
        quarantine(path, "it is no file")
    try:
        return _open(path, schema)
    except sqlite3.DatabaseError as error:
        if not _is_damage(error):
            raise
        quarantine(path, str(error))
        return _open(path, schema)


def open_store_read_only(path: str) -> sqlite3.Connection | None:
    """A connection for looking only; None when there is no usable file."""
    if not os.path.exists(path):
        return None
    connection = None
    try:
        connection = sqlite3.connect(
            f"file:{quote(path)}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None
        )
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        if connection is not None:
            connection.close()
        return None
    return connection


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """BEGIN IMMEDIATE … COMMIT; ROLLBACK when anything is raised, by a COMMIT that finds no room too."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # some failures roll back by themselves
            db.execute("ROLLBACK")
        raise


def quarantine(path: str, why: str) -> None:
    """Move a damaged file and its companions out of the way."""
    stamp = time.strftime("%Y%m%dT%H%M%S")
    for suffix in ("", "-wal", "-shm"):
        if os.path.lexists(path + suffix):
            os.rename(path + suffix, f"{path}{suffix}.bad-{stamp}-{os.getpid()}")
    log.warning("state file %s was damaged (%s); kept as *.bad-%s, rebuilding from the spool", path, why, stamp)


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file is at fault. A full disk, a lock or a lack of descriptors is no reason to give up good state."""
    return not isinstance(error, sqlite3.OperationalError) or "unsupported file format" in str(error)


def _open(path: str, schema: str) -> sqlite3.Connection:
    # SQLite gives its companions (-wal, -shm) the mode of the file, so that must be private before anything is in it.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    os.chmod(path, FILE_MODE)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        check = connection.execute("PRAGMA quick_check(1)").fetchone()
        if check is None or check[0] != "ok":
            raise sqlite3.DatabaseError(f"quick_check: {check}")
        connection.executescript(schema)
    except sqlite3.Error:
        connection.close()
        raise
    return connection
