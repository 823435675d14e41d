"""A malicious file system for tests: short writes, full disks, unreadable files, and the loss of what was never synced.

`FaultyFiles` works on a real folder and keeps, beside it, what would survive a power cut: for each file the content
at its last sync. `power_cut` puts the disk into that state, with a NUL-filled tail in place of unsynced bytes (as
ext4 leaves it) when asked.

Shipped with the package: whoever writes against the `Files` seam can test against the same malice.
"""

from __future__ import annotations

import errno
import os
import random

from verl_shipper_spool.files import RealFiles


class FaultyFiles(RealFiles):
    """`RealFiles` with faults. Deterministic for a given `seed`; print it when a test fails."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - not a secret
        self.full = False  # nothing takes more space: create, write, reserve and replace fail with ENOSPC
        self.short_writes_next = 0  # so many of the next writes put down only a part
        self.truncate_fails = False
        self.read_errors: dict[str, int] = {}  # path → errno of every read
        self._paths: dict[int, str] = {}
        self._durable: dict[str, bytes] = {}  # path → content that survives a power cut

    def create(self, path: str) -> int:
        self._need_space(path)
        fd = super().create(path)
        self._paths[fd] = path
        return fd

    def open_append(self, path: str) -> int:
        fd = super().open_append(path)
        self._paths[fd] = path
        return fd

    def reserve(self, path: str, size_bytes: int) -> int:
        self._need_space(path)
        return super().reserve(path, size_bytes)

    def write(self, fd: int, data: bytes) -> int:
        if self.short_writes_next > 0:
            self.short_writes_next -= 1
            return os.write(fd, data[: self.random.randint(0, max(len(data) - 1, 0))])
        self._need_space(self._paths.get(fd, ""))
        return os.write(fd, data)

    def truncate(self, fd: int, size_bytes: int) -> None:
        if self.truncate_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO), self._paths.get(fd, ""))
        os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._keep(self._paths[fd])

    def sync_file(self, path: str) -> None:
        super().sync_file(path)
        self._keep(path)

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        if path in self.read_errors:
            raise OSError(self.read_errors[path], os.strerror(self.read_errors[path]), path)
        return super().read(path, offset, size_bytes)

    def remove(self, path: str) -> None:
        super().remove(path)
        self._durable.pop(path, None)

    def replace(self, path: str, content: bytes, *, durable: bool = True) -> None:
        self._need_space(path)
        super().replace(path, content, durable=durable)
        self._durable[path] = content if durable else b""  # ext4: renamed without fsync is empty afterwards

    def power_cut(self, folder: str, *, nul_tail: bool) -> None:
        """Leave below `folder` only what was synced; an unsynced tail is lost or becomes NULs."""
        for root, _folders, names in os.walk(folder):
            for name in names:
                path = os.path.join(root, name)
                content = self._durable.get(path)
                if content is None:
                    os.unlink(path)
                    continue
                unsynced = max(os.path.getsize(path) - len(content), 0)
                tail = b"\0" * self.random.randint(0, unsynced) if nul_tail else b""
                with open(path, "wb") as file:
                    file.write(content + tail)

    def _keep(self, path: str) -> None:
        with open(path, "rb") as file:
            self._durable[path] = file.read()

    def _need_space(self, path: str) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
