"""Locks are the kernel's: they die with their holder, whatever a file contains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_shipper.errors import HeldError
from verl_shipper.lock import Lock


def test_a_lock_is_held_once_and_names_its_holder(tmp_path: Path) -> None:
    path = str(tmp_path / "a" / "lock")
    lock = Lock.take(path, "this place")

    with pytest.raises(HeldError) as raised:
        Lock.take(path, "this place")

    assert f"pid {os.getpid()}" in raised.value.line()
    assert raised.value.exit_code == 3
    lock.release()
    Lock.take(path, "this place").release()


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    script = f"from verl_shipper.lock import Lock; import os; Lock.take({path!r}, 'x'); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", script], check=False)

    Lock.take(path, "x").release()


@pytest.mark.parametrize("content", [b"", b"999999999", b"\0" * 100, b"no number"])
def test_a_stale_file_is_no_obstacle(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock").write_bytes(content)
    lock = Lock.take(str(tmp_path / "lock"), "x")

    assert (tmp_path / "lock").read_text() == str(os.getpid())
    lock.release()


def test_a_removed_file_is_held_again(tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "lock")
    lock = Lock.take(path, "x")
    os.unlink(path)
    os.rmdir(tmp_path / "run")

    lock.renew()

    with pytest.raises(HeldError):
        Lock.take(path, "x")
    lock.release()


def test_a_renewal_that_fails_leaves_no_descriptor_of_somebody_else(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    lock = Lock.take(path, "x")
    os.unlink(path)
    other = Lock.take(path, "x")
    with pytest.raises(HeldError):
        lock.renew()
    with (tmp_path / "mine").open("w") as mine:
        lock.release()
        lock.release()
        mine.write("still open")
    other.release()

    lock.renew()
    lock.release()


def test_a_place_where_no_file_can_be_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        Lock.take(str(tmp_path / "file" / "lock"), "x")
