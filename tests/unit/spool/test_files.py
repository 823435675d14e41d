"""The door to the disk: atomic replacement, private modes, reserved blocks."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from support.streams import fill
from verl_shipper_spool.files import RealFiles


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_folders_are_private_parents_too(tmp_path: Path) -> None:
    files = RealFiles()
    folder = tmp_path / "a" / "b" / "c"

    files.make_folder(str(folder))
    os.close(files.create(str(folder / "segment")))
    os.close(files.reserve(str(folder / "reserved"), 100))
    files.replace(str(folder / "small"), b"x")

    assert [_mode(path) for path in (tmp_path / "a", tmp_path / "a" / "b", folder)] == [0o700] * 3
    assert {_mode(path) for path in folder.iterdir()} == {0o600}


def test_a_folder_may_exist_but_not_as_a_file(tmp_path: Path) -> None:
    files = RealFiles()
    files.make_folder(str(tmp_path / "folder"))
    (tmp_path / "file").write_bytes(b"")

    files.make_folder(str(tmp_path / "folder"))
    with pytest.raises(FileExistsError):
        files.make_folder(str(tmp_path / "file"))


def test_a_new_file_is_never_one_that_exists(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")

    with pytest.raises(FileExistsError):
        RealFiles().create(str(tmp_path / "x"))


def test_an_appended_file_goes_on_where_it_ended(tmp_path: Path) -> None:
    files = RealFiles()
    path = str(tmp_path / "x")
    for opened in (files.create, files.open_append):
        fd = opened(path)
        files.write(fd, b"ab")
        files.sync(fd)
        files.close(fd)

    files.sync_file(path)
    files.sync_folder(str(tmp_path))
    assert files.read(path, 1, 100) == b"bab"
    assert files.read(path, 9, 100) == b""
    assert files.size(path) == 4


def test_replace_leaves_the_new_content_and_nothing_else(tmp_path: Path) -> None:
    for durable in (True, False):
        RealFiles().replace(str(tmp_path / "state"), b"new", durable=durable)

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"state": b"new"}


def test_a_replacement_that_fails_leaves_the_old_content_and_nothing_else(tight_disk: Path) -> None:
    RealFiles().replace(str(tight_disk / "state"), b"old")

    with pytest.raises(OSError, match="No space left"):
        RealFiles().replace(str(tight_disk / "state"), bytes(2 * 1024 * 1024))

    assert {path.name: path.read_bytes() for path in tight_disk.iterdir()} == {"state": b"old"}


def test_reserved_blocks_can_be_overwritten_on_a_full_disk(tight_disk: Path) -> None:
    files = RealFiles()
    fd = files.reserve(str(tight_disk / "reserved"), 8192)
    fill(tight_disk / "filling")

    files.overwrite(fd, b"y" * 8192)

    assert files.size(fd) == 8192
    with pytest.raises(OSError, match="No space left"):
        files.reserve(str(tight_disk / "more"), 8192)
    files.close(fd)


def test_a_folder_has_no_size_and_no_bytes(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        RealFiles().size(str(tmp_path))
    with pytest.raises(IsADirectoryError):
        RealFiles().read(str(tmp_path), 0, 10)


def test_a_removed_file_is_gone(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")

    RealFiles().remove(str(tmp_path / "x"))

    assert RealFiles().names(str(tmp_path)) == []
