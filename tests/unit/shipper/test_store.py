"""State files: opened, or set aside and begun anew. A full disk is no damage, and no name is too odd."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from verl_shipper.store import open_store, open_store_read_only, transaction

SCHEMA = "CREATE TABLE IF NOT EXISTS things (name TEXT PRIMARY KEY)"


def _fill(path: str) -> None:
    db = open_store(path, SCHEMA)
    db.execute("INSERT INTO things VALUES ('kept')")
    db.close()


def _names(path: str) -> list[str]:
    db = open_store(path, SCHEMA)
    try:
        return [row[0] for row in db.execute("SELECT name FROM things")]
    finally:
        db.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "x.sqlite3")


def test_a_store_keeps_what_was_put_and_is_private(path: str) -> None:
    _fill(path)

    assert _names(path) == ["kept"]
    assert os.stat(path).st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "damage",
    [b"", b"\0" * 8192, b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000],
    ids=["empty", "NULs", "text", "torn"],
)
def test_a_damaged_file_is_set_aside_and_begun_anew(path: str, damage: bytes) -> None:
    _fill(path)
    Path(path).write_bytes(damage)

    assert _names(path) == []
    _fill(path)
    assert _names(path) == ["kept"]
    kept = [name for name in os.listdir(os.path.dirname(path)) if ".bad-" in name]
    assert bool(kept) is bool(damage), "an empty file is a new one"


def test_damage_in_the_middle_is_found_at_the_start(path: str) -> None:
    db = open_store(path, SCHEMA)
    db.executemany("INSERT INTO things VALUES (?)", [(f"{number:0200}",) for number in range(500)])
    db.close()
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xaa" * 8192)

    assert _names(path) == []


def test_a_folder_in_place_of_the_file_is_set_aside(path: str) -> None:
    os.makedirs(path)

    assert _names(path) == []


def test_a_full_disk_at_the_start_is_no_damage(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(path)
    connect = sqlite3.connect

    class Full(sqlite3.Connection):
        def execute(self, *arguments: object) -> sqlite3.Cursor:
            if "journal_mode" in str(arguments[0]):
                raise sqlite3.OperationalError("database or disk is full")
            return super().execute(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("verl_shipper.store.sqlite3.connect", lambda *a, **k: connect(*a, factory=Full, **k))
    with pytest.raises(sqlite3.OperationalError, match="full"):
        open_store(path, SCHEMA)
    monkeypatch.undo()

    assert _names(path) == ["kept"]


def test_a_store_that_another_process_holds_is_no_damage(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_shipper.store.BUSY_TIMEOUT_S", 0.05)
    _fill(path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError):
        open_store(path, SCHEMA)
    holder.execute("ROLLBACK")
    holder.close()

    assert _names(path) == ["kept"]


@pytest.mark.parametrize("folder", ["a#b", "a?b=c", "50%20off", "ü b"])
def test_looking_works_below_folders_of_any_name(tmp_path: Path, folder: str) -> None:
    path = str(tmp_path / folder / "x.sqlite3")
    _fill(path)

    db = open_store_read_only(path)

    assert db is not None
    assert db.execute("SELECT name FROM things").fetchall() == [("kept",)]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        db.execute("DELETE FROM things")
    db.close()


@pytest.mark.parametrize("content", [None, b"\0" * 4096, b"text" * 500], ids=["absent", "NULs", "text"])
def test_looking_at_what_is_no_store_shows_nothing_and_changes_nothing(path: str, content: bytes | None) -> None:
    os.makedirs(os.path.dirname(path))
    if content is not None:
        Path(path).write_bytes(content)

    db = open_store_read_only(path)

    assert db is None
    assert os.path.exists(path) is (content is not None)


def test_a_transaction_is_all_or_nothing_and_leaves_none_open(path: str) -> None:
    db = open_store(path, SCHEMA)
    with pytest.raises(sqlite3.IntegrityError), transaction(db):
        db.executemany("INSERT INTO things VALUES (?)", [("a",), ("a",)])
    with transaction(db):
        db.execute("INSERT INTO things VALUES ('b')")
    db.close()

    assert _names(path) == ["b"]


def test_a_commit_that_fails_leaves_no_transaction_open(path: str) -> None:
    db = open_store(
        path,
        SCHEMA + "; PRAGMA foreign_keys=ON; CREATE TABLE IF NOT EXISTS refs"
        " (name TEXT REFERENCES things DEFERRABLE INITIALLY DEFERRED)",
    )
    with pytest.raises(sqlite3.IntegrityError), transaction(db):
        db.execute("INSERT INTO refs VALUES ('nowhere')")
    with transaction(db):
        db.execute("INSERT INTO things VALUES ('b')")
    db.close()

    assert _names(path) == ["b"]
