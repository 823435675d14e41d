"""The malicious file system does what its tests count on."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from verl_shipper_spool.testing import FaultyFiles


def _write(files: FaultyFiles, path: Path, content: bytes) -> int:
    fd = files.create(str(path))
    files.write(fd, content)
    return fd


def test_a_full_disk_takes_nothing_new_but_what_was_reserved(tmp_path: Path) -> None:
    files = FaultyFiles(seed=1)
    fd = _write(files, tmp_path / "a", b"x")
    reserved = files.reserve(str(tmp_path / "r"), 100)
    files.full = True

    for attempt in (
        lambda: files.write(fd, b"y"),
        lambda: files.create(str(tmp_path / "b")),
        lambda: files.reserve(str(tmp_path / "s"), 1),
        lambda: files.replace(str(tmp_path / "c"), b"z"),
    ):
        with pytest.raises(OSError, match="No space left") as caught:
            attempt()
        assert caught.value.errno == errno.ENOSPC
    files.overwrite(reserved, b"n")
    files.full = False
    files.write(fd, b"y")

    assert (tmp_path / "a").read_bytes() == b"xy"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "r"]
    files.close(fd)
    files.close(reserved)


def test_a_short_write_puts_down_less_than_was_given(tmp_path: Path) -> None:
    files = FaultyFiles(seed=1)
    fd = files.create(str(tmp_path / "a"))
    files.short_writes_next = 2

    written = [files.write(fd, b"0123456789") for _ in range(3)]

    assert written[0] < 10
    assert written[1] < 10
    assert written[2] == 10
    assert files.size(fd) == sum(written)
    files.close(fd)


def test_faults_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    sizes = []
    for name in ("a", "b"):
        files = FaultyFiles(seed=5)
        fd = files.create(str(tmp_path / name))
        files.short_writes_next = 50
        sizes.append([files.write(fd, b"0123456789") for _ in range(50)])
        files.close(fd)

    assert sizes[0] == sizes[1]


def test_a_hot_path_may_bind_the_write_once(tmp_path: Path) -> None:
    files = FaultyFiles(seed=1)
    write = files.write
    fd = files.create(str(tmp_path / "a"))
    write(fd, b"x")
    files.full = True

    with pytest.raises(OSError, match="No space left"):
        write(fd, b"y")
    files.close(fd)


def test_after_a_power_cut_only_what_was_synced_is_there(tmp_path: Path) -> None:
    files = FaultyFiles(seed=1)
    synced = _write(files, tmp_path / "synced", b"old")
    files.sync(synced)
    by_path = _write(files, tmp_path / "by path", b"old")
    files.sync_file(str(tmp_path / "by path"))
    never = _write(files, tmp_path / "never", b"x")
    for fd in (synced, by_path, never):
        files.write(fd, b"unsynced")
        files.close(fd)
    files.replace(str(tmp_path / "state"), b"durable")
    files.replace(str(tmp_path / "quick"), b"not durable", durable=False)

    files.power_cut(str(tmp_path), nul_tail=False)

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "synced": b"old",
        "by path": b"old",
        "state": b"durable",
        "quick": b"",
    }


def test_a_power_cut_may_leave_nuls_in_place_of_what_was_not_synced(tmp_path: Path) -> None:
    tails = set()
    for seed in range(20):
        files = FaultyFiles(seed)
        path = tmp_path / str(seed)
        fd = _write(files, path, b"old")
        files.sync(fd)
        files.write(fd, b"unsynced")
        files.close(fd)
        files.power_cut(str(tmp_path), nul_tail=True)
        assert path.read_bytes().rstrip(b"\0") == b"old"
        tails.add(path.stat().st_size - 3)
        path.unlink()

    assert min(tails) >= 0
    assert len(tails) > 1
    assert max(tails) <= len(b"unsynced")


def test_a_file_that_was_removed_stays_removed(tmp_path: Path) -> None:
    files = FaultyFiles(seed=1)
    fd = _write(files, tmp_path / "a", b"x")
    files.sync(fd)
    files.close(fd)
    files.remove(str(tmp_path / "a"))

    files.power_cut(str(tmp_path), nul_tail=True)

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_opened_again_is_known_by_its_path(tmp_path: Path) -> None:
    files = FaultyFiles(seed=1)
    files.close(_write(files, tmp_path / "a", b"x"))
    fd = files.open_append(str(tmp_path / "a"))
    files.write(fd, b"y")
    files.sync(fd)
    files.close(fd)

    files.power_cut(str(tmp_path), nul_tail=False)

    assert (tmp_path / "a").read_bytes() == b"xy"


def test_errors_of_reading_and_cutting_come_when_asked_for(tmp_path: Path) -> None:
    files = FaultyFiles(seed=1)
    fd = _write(files, tmp_path / "a", b"xyz")
    files.read_errors[str(tmp_path / "a")] = errno.EIO
    files.truncate_fails = True

    with pytest.raises(OSError, match="Input/output error"):
        files.read(str(tmp_path / "a"), 0, 1)
    with pytest.raises(OSError, match="Input/output error"):
        files.truncate(fd, 1)
    files.read_errors.clear()
    files.truncate_fails = False
    files.truncate(fd, 1)

    assert files.read(str(tmp_path / "a"), 0, 9) == b"x"
    files.close(fd)
