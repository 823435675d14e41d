"""The loss journal: counts of records that could not be written, kept where a full disk cannot stop them.

One preallocated file `losses` per stream. Rewriting blocks that a file already owns needs no space, so exact numbers
survive a kill even while the disk is full; behind the journal lies ballast that is given back to the file system for
the last record of a run.

    offset size  field
    0      4     magic  "vsLJ"
    4      4     crc32  over the next 4 + length bytes
    8      4     length little endian, as crc32
    12     n     MessagePack [[first ordinal, ordinal behind the last, class, reason], …]; [] = nothing pending
    4096   …     ballast (scalars stream only)

Promises: ranges are in order and never overlap; at most RANGES_MAX, and never more bytes than the journal has: when
more pile up the oldest are joined, so that counts stay exact only for the sum.
Must not know: segments. On failure: an OSError of writing is swallowed, the losses stay in memory.
"""

from __future__ import annotations

import os
from struct import Struct
from zlib import crc32

import msgpack

from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.files import Files, RealFiles
from verl_shipper_spool.record import Loss, loss_of

JOURNAL_NAME = "losses"
JOURNAL_BYTES = 4096
BALLAST_BYTES = 64 * 1024  # room for one run_finish and its loss frames
RANGES_MAX = 40  # 40 ranges of ≤ 90 bytes fit the journal

_HEADER = Struct("<4sII")
_LENGTH = Struct("<I")
_MAGIC = b"vsLJ"


class LossJournal:
    """Losses of one stream that no loss frame declares yet. One owner: the stream's writer."""

    def __init__(self, folder: str, *, files: Files | None = None, ballast_bytes: int = 0) -> None:
        self.pending: list[Loss] = []
        self._files: Files = files or RealFiles()
        self._path = os.path.join(folder, JOURNAL_NAME)
        self._ballast_bytes = ballast_bytes
        self._fd = -1

    def open(self) -> None:
        """Create and preallocate, without ballast if there is no room for it. Raises OSError: no journal then."""
        self.close()
        try:
            self._fd = self._files.reserve(self._path, JOURNAL_BYTES + self._ballast_bytes)
        except OSError:
            self._fd = self._files.reserve(self._path, JOURNAL_BYTES)
        self._save()

    def add(self, loss: Loss) -> None:
        """Note records that were lost; those that are pending already keep their reason."""
        last = self.pending[-1] if self.pending else None
        if last is not None and last.end == loss.first and _same(last, loss):
            self.pending[-1] = Loss(last.first, loss.end, loss.record_class, loss.reason)
        else:
            self.pending = _joined([*self.pending, *_without(loss, self.pending)], RANGES_MAX)
        self._save()

    def take(self) -> list[Loss]:
        """The pending losses, to be declared; `settle` says how that went."""
        taken, self.pending = self.pending, []
        return taken

    def settle(self, taken: list[Loss], *, declared: bool) -> None:
        """What `take` gave stands in the stream now, or has to wait on. Losses added in between stay pending."""
        if not declared:
            self.pending = _joined([*taken, *self.pending], RANGES_MAX)
        self._save()

    def drop_ballast(self) -> None:
        """Give the ballast's space back to the file system. Raises OSError."""
        if self._fd >= 0:
            self._files.truncate(self._fd, JOURNAL_BYTES)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)

    def _save(self) -> None:
        if self._fd < 0:
            return
        packed = _pack(self.pending)
        while len(packed) > JOURNAL_BYTES - _HEADER.size and len(self.pending) > 1:
            self.pending = _joined(self.pending, len(self.pending) // 2)
            packed = _pack(self.pending)
        try:
            crc = crc32(packed, crc32(_LENGTH.pack(len(packed))))
            self._files.overwrite(self._fd, _HEADER.pack(_MAGIC, crc, len(packed)) + packed)
        except OSError:
            return  # the numbers stay in memory; only a kill right now would make them inexact


def read_losses(folder: str, *, files: Files | None = None) -> list[Loss]:
    """Pending losses of a stream whose writer is gone; empty when the journal is absent or damaged."""
    try:
        content = (files or RealFiles()).read(os.path.join(folder, JOURNAL_NAME), 0, JOURNAL_BYTES)
    except OSError:
        return []
    if len(content) < _HEADER.size:
        return []
    magic, crc, length = _HEADER.unpack_from(content)
    end = _HEADER.size + length
    if magic != _MAGIC or end > len(content) or crc32(content[_HEADER.size - _LENGTH.size : end]) != crc:
        return []
    try:
        return [loss_of(fields) for fields in msgpack.unpackb(content[_HEADER.size : end])]
    except (CorruptionError, ValueError, TypeError):
        return []


def _pack(losses: list[Loss]) -> bytes:
    packed: bytes = msgpack.packb([[loss.first, loss.end, loss.record_class, loss.reason] for loss in losses])
    return packed


def _without(loss: Loss, others: list[Loss]) -> list[Loss]:
    """The parts of a range that none of the `others`, which are in order, covers."""
    parts = []
    first = loss.first
    for other in others:
        if other.end <= first or other.first >= loss.end:
            continue
        if first < other.first:
            parts.append(Loss(first, other.first, loss.record_class, loss.reason))
        first = other.end
    if first < loss.end:
        parts.append(Loss(first, loss.end, loss.record_class, loss.reason))
    return parts


def _joined(losses: list[Loss], ranges_max: int) -> list[Loss]:
    """The same losses in order, in at most `ranges_max` ranges (but one)."""
    ordered: list[Loss] = []
    for loss in sorted(losses, key=lambda each: each.first):
        last = ordered[-1] if ordered else None
        if last is not None and last.end == loss.first and _same(last, loss):
            ordered[-1] = Loss(last.first, loss.end, loss.record_class, loss.reason)
        else:
            ordered.append(loss)
    while len(ordered) > max(ranges_max, 1):
        first, second, *rest = ordered
        # The range in between was not lost: keep the sum exact by moving the first next to the second.
        ordered = [Loss(second.first - first.count, second.end, second.record_class, second.reason), *rest]
    return ordered


def _same(one: Loss, other: Loss) -> bool:
    return (one.record_class, one.reason) == (other.record_class, other.reason)
