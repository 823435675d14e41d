"""The loss journal: counts of records that could not be written, kept where a full disk cannot stop them.

One preallocated file `losses` per stream. Rewriting blocks that a file already owns needs no space, so exact numbers
survive a kill even while the disk is full; behind the journal lies ballast that is given back to the file system for
the last record of a run.

    offset size  field
    0      4     magic  "vsLJ"
    4      4     crc32  over the next 4 + length bytes
    8      4     length
    12     n     MessagePack [[first ordinal, ordinal behind the last, class, reason], …]; [] = nothing pending
    4096   …     ballast (scalars stream only)

Promises: at most JOURNAL_BYTES of losses; when more ranges pile up they are joined, counts stay exact only for the sum.
Must not know: segments. On failure: OSError is swallowed into `False`; the losses stay in memory.
"""

from __future__ import annotations

import os
from struct import Struct
from zlib import crc32

import msgpack

from verl_shipper_spool.record import Loss

JOURNAL_NAME = "losses"
JOURNAL_BYTES = 4096
BALLAST_BYTES = 64 * 1024  # room for one run_finish and its loss frames
RANGES_MAX = 40  # 40 ranges of ≤ 90 bytes fit the journal

_HEADER = Struct("<4sII")
_MAGIC = b"vsLJ"


class LossJournal:
    """Losses of one stream that no loss frame declares yet. One owner: the stream's writer."""

    def __init__(self, folder: str, *, ballast_bytes: int = 0) -> None:
        self.pending: list[Loss] = []
        self._path = os.path.join(folder, JOURNAL_NAME)
        self._ballast_bytes = ballast_bytes
        self._fd = -1

    def open(self) -> None:
        """Create and preallocate. Raises OSError; the writer then works without a journal."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, JOURNAL_BYTES + self._ballast_bytes)
        self._save()

    def add(self, ordinal: int, record_class: str, reason: str) -> None:
        """Record `ordinal` was lost."""
        last = self.pending[-1] if self.pending else None
        if last and last.end == ordinal and (last.record_class, last.reason) == (record_class, reason):
            self.pending[-1] = Loss(last.first, ordinal + 1, record_class, reason)
        else:
            self.pending.append(Loss(ordinal, ordinal + 1, record_class, reason))
        self._join()
        self._save()

    def add_range(self, loss: Loss) -> None:
        self.pending.append(loss)
        self._join()
        self._save()

    def clear(self) -> None:
        """All pending losses are declared in the stream."""
        self.pending = []
        self._save()

    def drop_ballast(self) -> None:
        """Give the ballast's space back to the file system."""
        if self._fd >= 0:
            os.ftruncate(self._fd, JOURNAL_BYTES)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _join(self) -> None:
        while len(self.pending) > RANGES_MAX:
            first, second, *rest = self.pending
            if first.end != second.first:  # apart: keep the sum exact by moving the first next to the second
                first = Loss(second.first - first.count, second.first, first.record_class, first.reason)
            self.pending = [Loss(first.first, second.end, second.record_class, second.reason), *rest]

    def _save(self) -> None:
        if self._fd < 0:
            return
        ranges = [[loss.first, loss.end, loss.record_class, loss.reason] for loss in self.pending]
        packed: bytes = msgpack.packb(ranges)
        try:
            os.pwrite(self._fd, _HEADER.pack(_MAGIC, crc32(packed), len(packed)) + packed, 0)
        except OSError:
            return  # the numbers stay in memory; only a kill right now would make them inexact


def read_losses(folder: str) -> list[Loss]:
    """Pending losses of a stream whose writer is gone; empty when the journal is absent or damaged."""
    try:
        with open(os.path.join(folder, JOURNAL_NAME), "rb") as file:
            content = file.read(JOURNAL_BYTES)
    except OSError:
        return []
    if len(content) < _HEADER.size:
        return []
    magic, crc, length = _HEADER.unpack_from(content)
    packed = content[_HEADER.size : _HEADER.size + length]
    if magic != _MAGIC or crc32(packed) != crc:
        return []
    return [Loss(*fields) for fields in msgpack.unpackb(packed)]
