"""The writer of a stream: one process appends frames to segments of its own.

    append(payload) = frame + ONE write(2)          no fsync, no file lock, no other process

When `append` has returned True the record survives the death of the process (the page cache holds it). A failed or
short write is cut back to the last good offset, the loss is counted in the journal, and declared in the stream by a
loss frame as soon as there is room again. Nobody ever appends to another process's file: a new process, a new stream.

Reentrant: a signal handler may call `append` while it interrupts another `append` of the same thread. Its frame goes
straight into the file, except while the interrupted call is off its fast path (opening, rolling, cutting back): then
that call writes it before it returns. Only the outermost call rolls, cuts and declares. A handler may also raise: the
writer then looks up what the file holds. Threads are kept apart by the caller (one lock per client); `sync` needs none.

Must not know: what is in a payload, who reads the stream. On failure: returns False, never raises OSError.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import length_hint
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
from verl_shipper_spool.segment import SEGMENT_BYTES_MAX, segment_bytes_for, segment_name

REOPEN_PAUSE_S = 1.0  # a spool that cannot be opened is tried again this often, not at every record
ROLL_RETRY_BYTES = 64 * 1024  # when no new segment can be made, the old one goes on for so long
ORDINALS_MAX = 2**62
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
    lost_records: int = 0  # of its ordinals, those that never reached it
    declared: list[Loss] = field(default_factory=list)  # losses of earlier segments that only this one tells

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
        self._journal = LossJournal(self.folder, files=self._files, ballast_bytes=ballast_bytes)
        self._ordinals = iter(range(ORDINALS_MAX))  # next() is atomic, length_hint() tells how far it is
        self._fd = -1
        self._segment_offset = 0  # where the segment behind _fd begins
        self._begun = ""  # path of a segment being made
        self._roll_at = 0
        self._record_class = ""
        self._opened = False
        self._reopen_at_s = 0.0
        self._busy = False  # an append is under way: who finds it set is a signal handler inside it
        self._slow = False  # …and it is off its fast path
        self._inside_ordinal = -1  # the last record that came from inside another append
        self._in_doubt = False  # an interruption left `end_offset` behind the file's true end
        self._waiting: list[tuple[int, bytes, str]] = []  # records of handlers that came while _slow
        self._unsynced: list[str] = []  # segments that may hold bytes no sync has seen; the last is written to
        self._synced_name = ""  # newest segment whose name is durable

    def append(self, payload: bytes, record_class: str) -> bool:
        """Append one record. True when it is kept, False when it was dropped and counted.

        `record_class` is "metrics", "generations", "span", …: what a quota may drop first, told in losses.
        """
        if self._busy:
            return self._append_inside(payload, record_class)
        self._busy = True
        try:
            ordinal = next(self._ordinals)
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
                self._cut_back(ordinal, written)
                return self._lose(ordinal, record_class, "disk_full")
            self.end_offset += size
            return True
        except BaseException:  # a signal handler raised in our midst, perhaps between the write and its count
            self._slow = False
            self._in_doubt = True
            self._roll_at = 0
            raise
        finally:
            self._busy = False

    @property
    def records(self) -> int:
        """Records that were offered so far, kept or lost."""
        return ORDINALS_MAX - length_hint(self._ordinals)

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
        self._remove(segment.path)

    def shed_oldest(self, record_class: str | None, reason: str) -> int:
        """Drop the oldest complete segment (of a class, if given); returns the number of records lost, 0 if none."""
        for segment in self.segments:
            if segment.end_ordinal is None or (record_class and segment.record_class != record_class):
                continue
            self.segments.remove(segment)
            self._remove(segment.path)
            self.lost_records += segment.end_ordinal - segment.first_ordinal - segment.lost_records
            # Loss frames in the segment went with it, so that what they told is declared anew.
            for loss in segment.declared:
                self._journal.add(loss)
            if segment.end_ordinal > segment.first_ordinal:
                self._journal.add(Loss(segment.first_ordinal, segment.end_ordinal, segment.record_class, reason))
            return segment.end_ordinal - segment.first_ordinal
        return 0

    def declare_losses(self) -> bool:
        """Write pending losses as loss frames. True when none is left."""
        if self._journal.pending and not self._busy:
            self._busy = True
            try:
                self._prepare(self.records, self._record_class)
            except BaseException:
                self._slow = False
                self._doubt()
                raise
            finally:
                self._busy = False
        return not self._journal.pending

    def sync(self) -> None:
        """Make appended bytes durable against power loss. Raises OSError. Called off the training thread."""
        paths = list(self._unsynced)
        if not paths:
            return
        for path in paths:
            try:
                self._files.sync_file(path)
            except FileNotFoundError:
                continue  # acknowledged or shed
        if paths[-1] != self._synced_name:
            if not self._synced_name:
                self._files.sync_file(os.path.join(self.folder, HEADER_NAME))
                self._files.sync_folder(os.path.dirname(self.folder))
            self._files.sync_folder(self.folder)
            self._synced_name = paths[-1]
        del self._unsynced[: len(paths) - 1]

    def close(self) -> None:
        """Close files; the stream stays as it is. An append afterwards goes on in a new segment."""
        if self._in_doubt:
            self._settle()
        self._roll_at = 0  # before the descriptor goes: a signal handler that logs right now opens its own
        fd, self._fd, self._roll_at = self._fd, -1, 0
        if fd >= 0:
            self._files.close(fd)
        self._journal.close()
        self._opened = False

    def abandon(self) -> None:
        """In a fork child: let go of the parent's descriptors without touching its files."""
        self.close()

    def _append_inside(self, payload: bytes, record_class: str) -> bool:
        """`append` in a signal handler that interrupted this writer."""
        ordinal = next(self._ordinals)
        if self._slow:
            self._waiting.append((ordinal, payload, record_class))
            return True
        self._inside_ordinal = ordinal
        return self._put(ordinal, payload, record_class)

    def _put(self, ordinal: int, payload: bytes, record_class: str) -> bool:
        """The bare append: no rolling, no cutting, no declaring."""
        if not 0 < len(payload) <= PAYLOAD_BYTES_MAX:
            return self._lose(ordinal, record_class, "too_large")
        frame = encode(payload, ordinal)
        try:
            written = self._write(self._fd, frame)
        except OSError as error:
            return self._lose(ordinal, record_class, self._reason(error))
        if written != len(frame):
            self._doubt()
            return self._lose(ordinal, record_class, "disk_full")
        self.end_offset += written
        return True

    def _prepare(self, ordinal: int, record_class: str) -> None:
        """The slow part of `append`: see what the file holds, open, roll, declare losses."""
        self._slow = True
        if not self._in_doubt or self._settle():
            switched = bool(self._record_class) and record_class != self._record_class
            if self._fd < 0 or switched or self.end_offset >= self._roll_at:
                self._roll(ordinal, record_class)
            self._record_class = record_class
            if self._journal.pending and self._fd >= 0:
                self._declare(ordinal)
        self._let_in()

    def _let_in(self) -> None:
        """Back on the fast path: write what signal handlers left meanwhile."""
        self._slow = False
        while self._waiting:
            self._put(*self._waiting[0])
            del self._waiting[0]  # not before: a raising handler may cause a frame twice, but never none

    def _roll(self, ordinal: int, record_class: str) -> None:
        if self._fd < 0 and time.monotonic() < self._reopen_at_s:
            return
        path = os.path.join(self.folder, segment_name(self.end_offset, ordinal))
        segment = OwnSegment(path, self.end_offset, ordinal, record_class)
        self._begun = path
        try:
            fd = self._create(path)
        except OSError as error:
            self._begun = ""
            self._note(error)
            self._reopen_at_s = time.monotonic() + REOPEN_PAUSE_S
            self._roll_at = self.end_offset + ROLL_RETRY_BYTES
            return
        # Plain assignments, up to the switch: no handler sees, or leaves behind, a half of it.
        old = self._fd
        if self.segments and self.segments[-1].end_offset is None:
            self.segments[-1].end_offset = self.end_offset
            self.segments[-1].end_ordinal = ordinal
        self.segments = [*self.segments, segment]
        self._segment_offset = self.end_offset
        self._roll_at = self.end_offset + self._segment_bytes_max
        self._fd = fd
        self._begun = ""
        self._unsynced.append(path)
        if old >= 0:
            self._files.close(old)
        if self._on_roll is not None:
            self._on_roll()

    def _create(self, path: str) -> int:
        if self._opened:
            try:
                return self._files.create(path)
            except FileNotFoundError:
                self._synced_name = ""  # somebody removed the folder: begin it again, with a gap
        self._files.make_folder(self.folder)
        if HEADER_NAME not in self._files.names(self.folder):
            # Not durable yet: `sync` sees to that, off the training thread.
            header_path = os.path.join(self.folder, HEADER_NAME)
            self._files.replace(header_path, encode_header(self.header), durable=False)
        try:
            self._journal.open()
        except OSError as error:
            self._note(error)
        fd = self._files.create(path)
        self._segment_bytes_max = segment_bytes_for(self.folder, self._segment_bytes_max)
        self._opened = True
        return fd

    def _declare(self, ordinal: int) -> None:
        """Write all pending losses in front of record `ordinal`."""
        losses = self._journal.take()
        declared = False
        try:
            data = b"".join(encode(encode_loss(loss), ordinal, LOSS_TAG) for loss in losses)
            written = self._write(self._fd, data)
            declared = written == len(data)
            if declared:
                self.end_offset += written
                segment = self.segments[-1]
                segment.declared += [loss for loss in losses if loss.first < segment.first_ordinal]
            else:
                self._truncate(written)
        except OSError as error:
            self._note(error)
        finally:
            self._journal.settle(losses, declared=declared)

    def _lose(self, ordinal: int, record_class: str, reason: str) -> bool:
        self.lost_records += 1
        if self.segments:
            self.segments[-1].lost_records += 1
        self._journal.add(Loss(ordinal, ordinal + 1, record_class, reason))
        return False

    def _reason(self, error: OSError) -> str:
        if self._fd < 0:
            return "spool_unavailable"
        self._note(error)
        return "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "disk_error"

    def _cut_back(self, ordinal: int, written: int) -> None:
        """Remove the part of a frame that did reach the file; with a handler's frame behind it, it stays as damage."""
        self._slow = True
        if self._inside_ordinal > ordinal:
            self._doubt()
        else:
            self._truncate(written)
        self._let_in()

    def _truncate(self, written: int) -> None:
        """Cut off the last `written` bytes, if there is nothing else behind the last good offset."""
        good = self.end_offset - self._segment_offset
        try:
            if self._files.size(self._fd) == good + written:
                self._files.truncate(self._fd, good)
                return
        except OSError as error:
            self._note(error)
        self._doubt()

    def _doubt(self) -> None:
        self._in_doubt = True
        self._roll_at = 0  # leads the next append to `_prepare`

    def _settle(self) -> bool:
        """After an interruption the file knows better than we do how long it is. False when it does not tell."""
        if self._begun:  # an empty segment at this offset would hide what the old one still gets
            self._remove(self._begun)
            self._begun = ""
        if self._fd >= 0:
            try:
                self.end_offset = self._segment_offset + self._files.size(self._fd)
            except OSError as error:
                self._note(error)
                return False
            self._roll_at = self._segment_offset + self._segment_bytes_max
        self._in_doubt = False
        return True

    def _note(self, error: OSError) -> None:
        self.last_error = f"{error.filename or self.folder}: {error.strerror or error}"

    def _remove(self, path: str) -> None:
        try:
            self._files.remove(path)
        except FileNotFoundError:
            return
        except OSError as error:
            self._note(error)
