"""The writer of a stream: one process appends frames to segments of its own.

    append(payload) = frame + ONE write(2)          no fsync, no file lock, no other process

When `append` has returned True the record survives the death of the process (the page cache holds it). A failed or
short write is cut back to the last good offset, the loss is counted in the journal, and declared in the stream by a
loss frame as soon as there is room again. Nobody ever appends to another process's file: a new process, a new stream.

Reentrant: a signal handler may call `append` while it interrupts another `append` of the same thread. Threads are kept
apart by the caller (one lock per client). Only the outermost call rolls segments.

Must not know: what is in a payload, who reads the stream. On failure: returns False, never raises OSError.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from verl_shipper_spool.files import Files, RealFiles
from verl_shipper_spool.frame import (
    CHECKED,
    HEADER,
    HEADER_BYTES,
    LOSS_TAG,
    PAYLOAD_BYTES_MAX,
    RECORD_TAG,
    SEED,
    encode,
)
from verl_shipper_spool.header import HEADER_NAME, SCALARS, StreamHeader, encode_header
from verl_shipper_spool.loss_journal import BALLAST_BYTES, LossJournal
from verl_shipper_spool.record import Loss, encode_loss
from verl_shipper_spool.segment import SEGMENT_BYTES_MAX, segment_name

REOPEN_PAUSE_S = 1.0  # a spool that cannot be opened is tried again this often, not at every record
_RECORD_SEED = SEED[RECORD_TAG]


@dataclass(slots=True)
class OwnSegment:
    """A segment this writer made. `end_*` are open (None) while it is the one written to."""

    path: str
    first_offset: int
    first_ordinal: int
    record_class: str
    end_offset: int | None = None
    end_ordinal: int | None = None

    @property
    def size_bytes(self) -> int:
        return 0 if self.end_offset is None else self.end_offset - self.first_offset


class StreamWriter:
    """Appends to one stream. Opens its folder lazily, at the first record."""

    def __init__(
        self,
        spool_dir: str,
        header: StreamHeader,
        *,
        files: Files | None = None,
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
        on_roll: Callable[[], None] | None = None,
    ) -> None:
        self.header = header
        self.folder = os.path.join(spool_dir, header.stream_id)
        self.segments: list[OwnSegment] = []
        self.end_offset = 0  # bytes appended so far: what readers of this process may rely on
        self.lost_records = 0
        self.last_error = ""
        self._files: Files = files or RealFiles()
        self._write = self._files.write
        self._segment_bytes_max = segment_bytes_max
        self._on_roll = on_roll
        ballast_bytes = BALLAST_BYTES if header.stream_class == SCALARS else 0
        self._journal = LossJournal(self.folder, ballast_bytes=ballast_bytes)
        self._ordinals = itertools.count()
        self._next_ordinal = 0
        self._fd = -1
        self._roll_at = 0
        self._record_class = ""
        self._reopen_at_s = 0.0
        self._rolling = False

    def append(self, payload: bytes, record_class: str) -> bool:
        """Append one record. True when it is kept, False when it was dropped and counted.

        `record_class` is "metrics", "generations", "span", …: what a quota may drop first, told in losses.
        """
        ordinal = next(self._ordinals)
        self._next_ordinal = ordinal + 1
        if record_class is not self._record_class or self.end_offset >= self._roll_at or self._journal.pending:
            self._prepare(ordinal, record_class)
        length = len(payload)
        if not 0 < length <= PAYLOAD_BYTES_MAX:
            return self._lose(ordinal, record_class, "too_large")
        crc = crc32(payload, crc32(CHECKED.pack(length, ordinal), _RECORD_SEED))
        frame = HEADER.pack(RECORD_TAG, crc, length, ordinal) + payload
        size = length + HEADER_BYTES
        try:
            written = self._write(self._fd, frame)
        except OSError as error:
            return self._lose(ordinal, record_class, self._reason(error))
        if written != size:
            self._cut_back()
            return self._lose(ordinal, record_class, "disk_full")
        self.end_offset += size
        return True

    @property
    def records(self) -> int:
        """Records that were offered so far, kept or lost."""
        return self._next_ordinal

    @property
    def sealed_bytes(self) -> int:
        """Bytes in segments that are complete and not yet dropped."""
        return sum(segment.size_bytes for segment in self.segments)

    def use_reserve(self) -> None:
        """Free the ballast: the next append is the last one that matters."""
        try:
            self._journal.drop_ballast()
        except OSError as error:
            self.last_error = str(error)

    def forget(self, segment: OwnSegment) -> None:
        """Remove a complete segment whose records are safe elsewhere."""
        self.segments.remove(segment)
        self._remove(segment)

    def shed_oldest(self, record_class: str | None, reason: str) -> int:
        """Drop the oldest complete segment (of a class, if given); returns the number of records lost, 0 if none."""
        for segment in self.segments:
            if segment.end_ordinal is None or (record_class and segment.record_class != record_class):
                continue
            loss = Loss(segment.first_ordinal, segment.end_ordinal, segment.record_class, reason)
            self.segments.remove(segment)
            self._remove(segment)
            if loss.count:
                self.lost_records += loss.count
                self._journal.add_range(loss)
            return loss.count
        return 0

    def declare_losses(self) -> bool:
        """Write pending losses as loss frames. True when none is left."""
        return not self._journal.pending or self._declare(self._next_ordinal)

    def sync(self) -> None:
        """Make appended bytes durable against power loss. Raises OSError. Called off the training thread."""
        if self._fd >= 0:
            self._files.sync(self._fd)

    def close(self) -> None:
        """Close files; the stream stays as it is."""
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd = -1
        self._roll_at = 0
        self._journal.close()

    def abandon(self) -> None:
        """In a fork child: let go of the parent's descriptors without touching its files."""
        self.close()

    def _prepare(self, ordinal: int, record_class: str) -> None:
        """The slow part of `append`: open, roll, declare losses. At most one at a time."""
        if self._rolling:
            return
        self._rolling = True
        try:
            switched = bool(self._record_class) and record_class != self._record_class
            if self._fd < 0 or switched or self.end_offset >= self._roll_at:
                self._roll(ordinal, record_class)
            self._record_class = record_class
            if self._journal.pending and self._fd >= 0:
                self._declare(ordinal)
        finally:
            self._rolling = False

    def _roll(self, ordinal: int, record_class: str) -> None:
        if self._fd < 0 and time.monotonic() < self._reopen_at_s:
            return
        try:
            if not self.segments and self.end_offset == 0:
                self._make_folder()
            path = os.path.join(self.folder, segment_name(self.end_offset, ordinal))
            fd = self._files.create(path)
        except OSError as error:
            self.last_error = f"{self.folder}: {error.strerror or error}"
            self._reopen_at_s = time.monotonic() + REOPEN_PAUSE_S
            self._roll_at = self.end_offset + 64 * 1024  # go on in the old segment, look again soon
            return
        if self._fd >= 0:
            self._files.close(self._fd)
        if self.segments and self.segments[-1].end_offset is None:
            self.segments[-1].end_offset = self.end_offset
            self.segments[-1].end_ordinal = ordinal
        self.segments.append(OwnSegment(path, self.end_offset, ordinal, record_class))
        self._fd = fd
        self._roll_at = self.end_offset + self._segment_bytes_max
        if self._on_roll is not None:
            self._on_roll()

    def _make_folder(self) -> None:
        self._files.make_folder(self.folder)
        if HEADER_NAME not in self._files.names(self.folder):
            self._files.replace(os.path.join(self.folder, HEADER_NAME), encode_header(self.header))
            try:
                self._journal.open()
            except OSError as error:
                self.last_error = f"no loss journal: {error.strerror or error}"

    def _declare(self, ordinal: int) -> bool:
        """Write all pending losses in front of record `ordinal`."""
        frames = [encode(encode_loss(loss), ordinal, LOSS_TAG) for loss in self._journal.pending]
        data = b"".join(frames)
        try:
            written = self._write(self._fd, data)
        except OSError:
            return False
        if written != len(data):
            self._cut_back()
            return False
        self.end_offset += written
        self._journal.clear()
        return True

    def _lose(self, ordinal: int, record_class: str, reason: str) -> bool:
        self.lost_records += 1
        self._journal.add(ordinal, record_class, reason)
        return False

    def _reason(self, error: OSError) -> str:
        if self._fd < 0:
            return "spool_unavailable"
        self.last_error = f"{self.folder}: {error.strerror or error}"
        return "disk_full" if error.errno in (28, 122) else "disk_error"  # ENOSPC, EDQUOT

    def _cut_back(self) -> None:
        """Remove the part of a frame that did reach the file."""
        try:
            self._files.truncate(self._fd, self.end_offset - self.segments[-1].first_offset)
        except OSError as error:
            self.last_error = f"{self.folder}: {error.strerror or error}"

    def _remove(self, segment: OwnSegment) -> None:
        try:
            self._files.remove(segment.path)
        except OSError as error:
            self.last_error = f"{segment.path}: {error.strerror or error}"
