"""One writer per run on this machine, and what the next one learns from the last."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from verl_shipper.backends.sdk.run_lock import Note, RunLock, lock_path


def test_the_second_waits_marks_its_wish_and_gets_the_note(tmp_path: Path) -> None:
    path = str(tmp_path / "runs" / "one.lock")
    first = RunLock.take(path)
    assert first is not None
    assert first.read() == Note()
    assert not first.is_wanted()
    first.write(Note(17, is_clean=True))
    assert RunLock.take(path, wait_s=0.3) is None
    assert first.is_wanted()

    threading.Timer(0.5, first.release).start()
    second = RunLock.take(path, wait_s=20)
    assert second is not None
    assert second.read() == Note(17, is_clean=True)
    assert not second.is_wanted()
    second.release()
    second.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": "x", "is_clean": true}', "\0" * 50, '{"rows": 3}'])
def test_a_note_that_cannot_be_read_says_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "one.lock"
    path.write_text(content)
    lock = RunLock.take(str(path))
    assert lock is not None
    assert lock.read() == Note()
    lock.write(Note(1, is_clean=True))
    assert lock.read() == Note(1, is_clean=True)
    lock.release()


def test_a_shorter_note_leaves_nothing_of_the_longer_one(tmp_path: Path) -> None:
    lock = RunLock.take(str(tmp_path / "one.lock"))
    assert lock is not None
    lock.write(Note(1_000_000, is_clean=False))
    lock.write(Note(1, is_clean=True))
    assert lock.read() == Note(1, is_clean=True)
    lock.release()


def test_a_killed_holder_is_no_obstacle(tmp_path: Path) -> None:
    path = str(tmp_path / "one.lock")
    program = f"""
import os
from verl_shipper.backends.sdk.run_lock import Note, RunLock
lock = RunLock.take({path!r})
lock.write(Note(5, is_clean=False))
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], timeout=30, check=False)
    lock = RunLock.take(path)
    assert lock is not None
    assert lock.read() == Note(5, is_clean=False)
    lock.release()


def test_a_file_that_was_removed_under_the_holder_is_not_taken_for_the_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "one.lock")
    first = RunLock.take(path)
    assert first is not None
    os.unlink(path)
    second = RunLock.take(path)
    assert second is not None
    assert RunLock.take(path) is None
    first.release(forget=False)
    second.release(forget=True)
    assert not os.path.exists(path)


def test_an_old_wish_is_nobodys(tmp_path: Path) -> None:
    path = str(tmp_path / "one.lock")
    first = RunLock.take(path)
    assert first is not None
    assert RunLock.take(path) is None
    old_s = time.time() - 3600
    os.utime(f"{path}.wanted", (old_s, old_s))
    assert not first.is_wanted()
    first.release()


def test_every_run_has_a_lock_of_its_own(tmp_path: Path) -> None:
    names = [
        ("wandb", "a", "b"),
        ("wandb", "ab", ""),
        ("wandb", "a", "c"),
        ("swanlab", "a", "b"),
        ("wandb", "\ud83d", "b"),
    ]
    assert len({lock_path(str(tmp_path), *name) for name in names}) == len(names)
    assert lock_path(str(tmp_path), *names[0]) == lock_path(None, *names[0])
