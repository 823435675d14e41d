"""A lock file: held by the kernel for as long as the process lives, whatever the file contains.

A stale, empty or foreign file is no obstacle (kernel locks die with their holder; pids in files are for people only).
Must not know: what is guarded. On failure: HeldError naming the holder; OSError for a place where no file can be.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

from verl_shipper.errors import HeldError


class Lock:
    """An exclusive lock. `take` returns at once."""

    def __init__(self, path: str, what: str, fd: int) -> None:
        self._path = path
        self._what = what
        self._fd = fd

    @classmethod
    def take(cls, path: str, what: str) -> Lock:
        """Hold `path`, or raise HeldError with the pid that does. `what` names the guarded thing for people."""
        return cls(path, what, _acquire(path, what))

    def renew(self) -> None:
        """Hold the path again after somebody removed the file."""
        self.release()
        self._fd = _acquire(self._path, self._what)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _acquire(path: str, what: str) -> int:
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 64, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            raise HeldError(
                f"another daemon (pid {holder}) holds {what}",
                where=path,
                hint=f"stop it with `kill {holder}`, or choose other places with --state-dir, --adopt and --socket",
            ) from error
        if error.errno in (errno.ENOLCK, errno.ENOTSUP):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)  # a file system without locks: nothing can be held there
        raise
    with contextlib.suppress(OSError):  # a full disk has no room for a number; the lock holds without
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd
