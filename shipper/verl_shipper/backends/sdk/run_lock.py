"""One writer per run of a tracker on this machine, and what the next writer must know of the last one.

A lock file in a private folder of this user, shared by all daemons whatever their state folder is. The kernel frees
it when the last process that holds its descriptor is gone: the writing child is one of them, so nobody begins while a
killed lane's child could still write. The note in the file survives its holder:

    rows      rows that the tracker is known to have
    is_clean  nothing was under way when this was written

Whoever waits for a lock marks it as wanted; a holder that has nothing under way gives way.

Must not know: trackers. On failure: no lock (None); a file that cannot be read is a note of nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import final

from verl_shipper_spool.location import is_private

WAIT_PAUSE_S = 0.1
WATCH_PAUSE_S = 0.5
WANTED_S = 30.0  # a mark older than this is of somebody who has gone away


@dataclass(frozen=True, slots=True)
class Note:
    """What a holder leaves behind."""

    rows: int = 0
    is_clean: bool = False


@final
class RunLock:
    """A held lock. `fd` may be passed on to a child."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def take(cls, path: str, wait_s: float = 0.0) -> RunLock | None:
        """The lock, or None when somebody has it for longer than `wait_s`. Raises OSError without a place for it."""
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        deadline_s = time.monotonic() + wait_s
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file_of(fd, path):
                    _unmark(path)
                    return cls(path, fd)
            except BlockingIOError:
                _mark(path)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(WAIT_PAUSE_S)

    def read(self) -> Note:
        """The note of the last holder."""
        try:
            values = json.loads(os.pread(self.fd, 4096, 0) or b"{}")
            return Note(int(values["rows"]), values["is_clean"] is True)
        except (ValueError, TypeError, KeyError):
            return Note()

    def write(self, note: Note) -> None:
        content = json.dumps(asdict(note)).encode()
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, content, 0)

    def is_wanted(self) -> bool:
        """Whether somebody waits for it."""
        try:
            return time.time() - os.stat(_wanted(self.path)).st_mtime < WANTED_S
        except OSError:
            return False

    def watch(self, give_way: Callable[[RunLock], None]) -> None:
        """From now on and until it is released: call `give_way`, in a thread, whenever somebody waits for it."""
        threading.Thread(target=self._watch, args=(give_way,), name="give-way", daemon=True).start()

    def _watch(self, give_way: Callable[[RunLock], None]) -> None:
        while self.fd >= 0:
            time.sleep(WATCH_PAUSE_S)
            if self.fd >= 0 and self.is_wanted():
                give_way(self)

    def release(self, *, forget: bool = False) -> None:
        """Let go. With `forget` the run is over and the file goes, too."""
        if self.fd < 0:
            return
        if forget:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        os.close(self.fd)
        self.fd = -1


def lock_path(fallback_dir: str | None, *identity: str) -> str:
    """Where the lock of a run stands: `identity` names tracker, account, project and run."""
    folder = f"/dev/shm/verl-shipper-{os.getuid()}/runs"  # noqa: S108 - private, checked right here
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(folder), 0o700, exist_ok=True)
    if fallback_dir and not (is_private(folder) and os.access(os.path.dirname(folder), os.W_OK)):
        folder = fallback_dir
    digest = hashlib.sha256("\0".join(identity).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return os.path.join(folder, f"{digest}.lock")


def _is_file_of(fd: int, path: str) -> bool:
    """Whether the locked file is still the one with that name."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)


def _wanted(path: str) -> str:
    return f"{path}.wanted"


def _mark(path: str) -> None:
    fd = os.open(_wanted(path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.utime(fd)
    finally:
        os.close(fd)


def _unmark(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_wanted(path))
