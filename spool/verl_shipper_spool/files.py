"""The only door to the disk. Everything that opens, writes, syncs, renames or lists goes through a `Files`.

Promises: `replace` leaves either the old or the new content, never a mixture and never an empty file, even after power
loss (temp, fsync, rename, fsync of the folder). Files are created 0600 and folders 0700: a spool holds other
people's prompts.

Must not know: frames, records, streams. On failure: OSError, as the kernel said it.
"""

from __future__ import annotations

import os
from typing import Protocol

FILE_MODE = 0o600
FOLDER_MODE = 0o700


class Files(Protocol):
    """What the spool asks of a file system. `RealFiles` is the real one, `testing.FaultyFiles` the malicious one."""

    def create(self, path: str) -> int:
        """Open a new file for appending; FileExistsError when it exists. Returns a descriptor."""

    def write(self, fd: int, data: bytes) -> int:
        """Append. May be short."""

    def truncate(self, fd: int, size_bytes: int) -> None: ...

    def sync(self, fd: int) -> None:
        """Make content and size durable."""

    def sync_folder(self, path: str) -> None: ...

    def close(self, fd: int) -> None: ...

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        """At most `size_bytes` from `offset`; fewer at the end of the file."""

    def size(self, path: str) -> int: ...

    def names(self, path: str) -> list[str]: ...

    def remove(self, path: str) -> None: ...

    def make_folder(self, path: str) -> None: ...

    def replace(self, path: str, content: bytes) -> None:
        """Atomically and durably set the content of a small file."""


class RealFiles:
    """The operating system, nothing else."""

    write = staticmethod(os.write)
    close = staticmethod(os.close)
    truncate = staticmethod(os.ftruncate)

    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)

    def open_append(self, path: str) -> int:
        """Open an existing file of our own for appending (the daemon after a restart)."""
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

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

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def make_folder(self, path: str) -> None:
        os.makedirs(path, FOLDER_MODE, exist_ok=True)

    def replace(self, path: str, content: bytes) -> None:
        temporary = f"{path}.tmp{os.getpid()}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            written = 0
            while written < len(content):
                written += os.write(fd, content[written:])
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        self.sync_folder(os.path.dirname(path) or ".")
