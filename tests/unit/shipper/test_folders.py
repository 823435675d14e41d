"""Folders and disks, tried for real: modes, owners, read-only mounts, full disks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.disk import require_disks, small_disk
from verl_shipper.checks import Finding, Level
from verl_shipper.folders import cleaned_finding, disk_findings, file_system, folder_findings


def only(path: Path, *, private: bool = True) -> Finding:
    (finding,) = folder_findings(str(path), private=private)
    assert finding.hint or finding.level is Level.OK
    return finding


def private_folder(path: Path, mode: int = 0o700) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def test_a_private_folder_is_fine_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "spool")

    assert only(folder) == Finding(Level.OK, f"{folder} is private and writable")
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_missing_can_be_made_or_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert only(tmp_path / "a/b/c") == Finding(Level.OK, f"{tmp_path}/a/b/c does not exist yet and can be made")
    assert not (tmp_path / "a").exists()
    assert "is no folder" in only(tmp_path / "file/spool").what


@pytest.mark.parametrize(
    ("mode", "private", "level", "hint"),
    [
        (0o755, True, Level.WARN, "chmod 700"),
        (0o770, True, Level.WARN, "chmod 700"),
        (0o777, True, Level.FAIL, "chmod go-w"),
        (0o1777, True, Level.FAIL, "chmod go-w"),
        (0o777, False, Level.FAIL, "chmod go-w"),
        (0o755, False, Level.OK, ""),
    ],
)
def test_a_wrong_mode_is_told_with_the_command(
    tmp_path: Path, mode: int, level: Level, hint: str, *, private: bool
) -> None:
    folder = private_folder(tmp_path / "spool", mode)

    finding = only(folder, private=private)

    assert finding.level is level
    assert finding.hint.startswith(hint)
    assert f"{mode:04o}" in finding.what or level is Level.OK


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_folder_of_somebody_else_is_told_with_its_owner(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "spool")
    os.chown(folder, 65534, 65534)

    finding = only(folder)

    assert finding.level is Level.WARN
    assert "belongs to nobody, and you are root" in finding.what
    assert "sudo -u nobody" in finding.hint


def test_a_read_only_folder_fails(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        assert "cannot be written" in only(private_folder(tmp_path / "spool", 0o500)).what
        return
    require_disks()
    with small_disk(tmp_path) as disk:
        disk.chmod(0o700)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        here, below = only(disk), only(disk / "spool")

    assert (here.level, below.level) == (Level.FAIL, Level.FAIL)
    assert "Read-only file system" in here.what
    assert "cannot be made" in below.what


def test_a_full_disk_fails_and_says_how_full(tmp_path: Path) -> None:
    require_disks()
    with small_disk(tmp_path, size_mib=4, inodes=50) as disk:
        findings = list(disk_findings(str(disk / "spool"), "spool"))

    levels = [finding.level for finding in findings]
    assert levels == [Level.FAIL, Level.FAIL, Level.WARN]
    assert "4.0 MiB free" in findings[0].what
    assert "inodes" in findings[1].what
    assert "a reboot loses it" in findings[2].what


def test_a_disk_with_less_than_wanted_is_a_warning(tmp_path: Path) -> None:
    enough, *_ = disk_findings(str(tmp_path), "spool", 1)
    short, *_ = disk_findings(str(tmp_path), "spool", 1 << 60)

    assert (enough.level, short.level) == (Level.OK, Level.WARN)
    assert f"on {file_system(str(tmp_path))}" in enough.what
    assert "du -xh" in short.hint


@pytest.mark.parametrize(
    ("path", "dangerous"), [("/tmp/spool", True), ("/var/tmp/a/b", True), ("/tmpfs/spool", False), ("/srv/x", False)]
)
def test_paths_that_cleaners_visit_are_told(path: str, *, dangerous: bool) -> None:
    assert (cleaned_finding(path) is not None) is dangerous


def test_file_systems_are_named_as_the_kernel_does() -> None:
    assert file_system("/proc/self") == "proc"
