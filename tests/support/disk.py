"""Disks that fail on command: an ext4 image that loses its unsynced pages, a tmpfs that is too small. Needs root.

The power failure is EXT4_IOC_SHUTDOWN without flushing the log: from then on every write fails, and the next mount
replays the journal. What was not fsynced is gone or NUL, a file renamed without fsync is empty, as after a real one.

Promises: what was mounted is unmounted, even when the test failed. On failure: CalledProcessError with what was said.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

import pytest

EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
IN_CI = os.environ.get("CI", "").lower() in ("1", "true")


@final
class PowerLossDisk:
    """An ext4 file system on a loop device, mounted at `path`."""

    def __init__(self, folder: Path, size_mib: int = 128) -> None:
        self.path = folder / "disk"
        self._image = folder / "disk.img"
        self.path.mkdir(parents=True)
        _call("truncate", "-s", f"{size_mib}M", str(self._image))
        _call("mkfs.ext4", "-F", "-q", "-E", "lazy_itable_init=0", str(self._image))
        self._device = _call("losetup", "-f", "--show", str(self._image))
        self._is_mounted = False
        try:
            self.mount()
        except BaseException:
            self.close()
            raise

    def mount(self) -> None:
        _call("mount", "-o", "commit=300", self._device, str(self.path))  # the journal never syncs on its own
        self._is_mounted = True

    def fail_power(self) -> None:
        """From here on nothing reaches the disk any more."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(folder)

    def unmount(self, timeout_s: float = 15.0) -> None:
        """Unmount, waiting for processes that are just ending to let go."""
        deadline_s = time.monotonic() + timeout_s
        while self._is_mounted:
            try:
                _call("umount", str(self.path))
                self._is_mounted = False
            except subprocess.CalledProcessError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        try:
            self.unmount()
        except subprocess.CalledProcessError:
            _call("umount", "--lazy", str(self.path))
        _call("losetup", "-d", self._device)
        self._image.unlink()

    def __enter__(self) -> PowerLossDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int = 4, inodes: int = 0) -> Iterator[Path]:
    """A tmpfs of `size_mib` (and of `inodes` files at most, when given), mounted below `folder`."""
    path = folder / "small"
    path.mkdir(parents=True)
    options = f"size={size_mib}m" + (f",nr_inodes={inodes}" if inodes else "")
    _call("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path))
    try:
        yield path
    finally:
        for _ in range(100):
            if subprocess.run(["umount", str(path)], capture_output=True, check=False).returncode == 0:
                break
            time.sleep(0.05)
        else:
            _call("umount", "--lazy", str(path))


def require_disks() -> None:
    """Skip where disks cannot be made, with the reason; in CI that is a failure, never a silent gap."""
    reason = _why_not()
    if reason and IN_CI:
        pytest.fail(f"CI must be able to make disks: {reason}")
    if reason:
        pytest.skip(reason)


def _why_not() -> str:
    if os.geteuid() != 0:
        return "needs root to mount"
    try:
        with tempfile.TemporaryDirectory() as folder, PowerLossDisk(Path(folder), size_mib=8) as disk:
            disk.fail_power()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no loop device or ext4: {error}"
    return ""


def _call(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise subprocess.CalledProcessError(result.returncode, command, result.stdout, result.stderr)
    return result.stdout.strip()
