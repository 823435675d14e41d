"""A malicious file system for tests: short writes, full disks, and the loss of what was never synced.

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
        self.full = False  # every write fails with ENOSPC
        self.short_writes_next = 0  # so many of the next writes are cut short, then ENOSPC
        self._paths: dict[int, str] = {}
        self._durable: dict[str, bytes] = {}  # path → content that survives a power cut

    write = None  # type: ignore[assignment]  # replaced per instance below

    def create(self, path: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        fd = super().create(path)
        self._paths[fd] = path
        return fd

    def open_append(self, path: str) -> int:
        fd = super().open_append(path)
        self._paths[fd] = path
        return fd

    def sync(self, fd: int) -> None:
        super().sync(fd)
        path = self._paths[fd]
        with open(path, "rb") as file:
            self._durable[path] = file.read()

    def replace(self, path: str, content: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        super().replace(path, content)
        self._durable[path] = content

    def remove(self, path: str) -> None:
        super().remove(path)
        self._durable.pop(path, None)

    def power_cut(self, folder: str, *, nul_tail: bool) -> None:
        """Leave below `folder` only what was synced; an unsynced tail is lost or becomes NULs."""
        for root, _folders, names in os.walk(folder):
            for name in names:
                path = os.path.join(root, name)
                size = os.path.getsize(path)
                content = self._durable.get(path)
                if content is None:
                    os.unlink(path)
                    continue
                tail = b"\0" * self.random.randint(0, size - len(content)) if nul_tail and size > len(content) else b""
                with open(path, "wb") as file:
                    file.write(content + tail)

    def _write(self, fd: int, data: bytes) -> int:
        if self.short_writes_next > 0:
            self.short_writes_next -= 1
            return os.write(fd, data[: self.random.randint(0, max(len(data) - 1, 0))])
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, data)

    def __getattribute__(self, name: str) -> object:
        return object.__getattribute__(self, "_write" if name == "write" else name)


