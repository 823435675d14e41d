"""The only door to the disk. Everything that opens, writes, syncs, renames or lists goes through a `Files`.

Promises: `replace` leaves either the old or the new content, never a mixture and, unless asked to be quick, never an
empty file, even after power loss (temp, fsync, rename, fsync of the folder). Files are created 0600 and folders 0700,
parents too: a spool holds other people's prompts.

Must not know: frames, records, streams. On failure: OSError, as the kernel said it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import Protocol

FILE_MODE = 0o600
FOLDER_MODE = 0o700


class Files(Protocol):
    """What the spool asks of a file system. `RealFiles` is the real one, `testing.FaultyFiles` the malicious one."""

    def create(self, path: str) -> int:
        """Open a new file for appending; FileExistsError when it exists. Returns a descriptor."""

    def reserve(self, path: str, size_bytes: int) -> int:
        """Open a file, new or not, that owns blocks for `size_bytes`: overwriting them needs no space."""

    @property
    def write(self) -> Callable[[int, bytes], int]:
        """Append. May be short. A property, so that the hot path can bind the bare system call."""

    def overwrite(self, fd: int, data: bytes) -> None:
        """Write at the front of a reserved file."""

    def truncate(self, fd: int, size_bytes: int) -> None: ...

    def sync(self, fd: int) -> None:
        """Make content and size durable."""

    def sync_file(self, path: str) -> None:
        """The same for a file that somebody else may hold open."""

    def sync_folder(self, path: str) -> None: ...

    def close(self, fd: int) -> None: ...

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        """At most `size_bytes` from `offset`; fewer at the end of the file."""

    def size(self, file: str | int) -> int:
        """Size of the file at a path or behind a descriptor. IsADirectoryError for a folder."""

    def names(self, path: str) -> list[str]: ...

    def remove(self, path: str) -> None: ...

    def make_folder(self, path: str) -> None: ...

    def replace(self, path: str, content: bytes, *, durable: bool = True) -> None:
        """Atomically set the content of a small file. Not `durable`: no fsync, a power loss may leave it empty."""


class RealFiles:
    """The operating system, nothing else."""

    write: Callable[[int, bytes], int] = staticmethod(os.write)
    close = staticmethod(os.close)
    truncate = staticmethod(os.ftruncate)

    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)

    def open_append(self, path: str) -> int:
        """Open an existing file of our own for appending (the daemon after a restart)."""
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def reserve(self, path: str, size_bytes: int) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            os.close(fd)
            raise
        return fd

    def overwrite(self, fd: int, data: bytes) -> None:
        os.pwrite(fd, data, 0)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_file(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def sync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            while size_bytes > 0:
                part = os.pread(fd, size_bytes, offset)
                if not part:
                    break
                parts.append(part)
                offset += len(part)
                size_bytes -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            os.close(fd)

    def size(self, file: str | int) -> int:
        found = os.stat(file)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
        return found.st_size

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def make_folder(self, path: str) -> None:
        parent = os.path.dirname(path)
        if parent and not os.path.isdir(parent):
            self.make_folder(parent)
        try:
            os.mkdir(path, FOLDER_MODE)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def replace(self, path: str, content: bytes, *, durable: bool = True) -> None:
        temporary = f"{path}.tmp{os.getpid()}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
            try:
                written = 0
                while written < len(content):
                    written += os.write(fd, content[written:])
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if durable:
            self.sync_folder(os.path.dirname(path) or ".")
