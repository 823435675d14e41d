"""One stream in the node spool: the daemon's own copy of a client's stream, byte for byte at the same offsets.

    append(offset, bytes)   before the end: have it; at the end: append; behind the end: refused unless a gap is told
    sync()                  fsync; afterwards everything below `end` is durable and may be acknowledged
    recover()               after a restart: cut the last segment behind its last valid frame
    distrust()              after a failed fsync: go back to what was durable before it

Must not know: sockets, lanes. On failure: OSError to the caller, with the file cut back to its last good length;
`doubtful` says that an fsync failed, and that nothing but `distrust` helps.
"""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass, field
from itertools import pairwise

from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.files import RealFiles
from verl_shipper_spool.frame import LOSS_TAG, Kind, Walker, encode, scan
from verl_shipper_spool.header import HEADER_NAME, SCALARS, StreamHeader, encode_header
from verl_shipper_spool.reader import Frame, StreamReader
from verl_shipper_spool.record import Loss, Record, RecordKind, decode_record, encode_loss, encode_record
from verl_shipper_spool.segment import SEGMENT_BYTES_MAX, Segment, list_segments, segment_name

log = logging.getLogger(__name__)

SEALED_NAME = "sealed"
RECLAIMED_NAME = "reclaimed"  # present once segments were removed because every lane had delivered them


@dataclass(slots=True)
class NodeStream:
    """The node's copy of one stream. `end`: bytes written; `durable`: bytes fsynced."""

    header: StreamHeader
    folder: str
    end: int = 0
    durable: int = 0
    sealed: bool = False
    doubtful: bool = False
    walker: Walker = field(default_factory=Walker)
    files: RealFiles = field(default_factory=RealFiles)
    _fd: int = -1
    _segment_first: int = 0
    _new_names: bool = False

    @property
    def dirty(self) -> bool:
        return self.end > self.durable

    def size_bytes(self) -> int:
        """What the stream's segments take on the disk."""
        return sum(self.files.size(segment.path) for segment in list_segments(self.files, self.folder))

    def create(self) -> None:
        """Make the folder and its header, durably."""
        self.files.make_folder(self.folder)
        self.files.replace(os.path.join(self.folder, HEADER_NAME), encode_header(self.header))
        self.files.sync_folder(os.path.dirname(self.folder))

    def append(self, offset: int, content: bytes, *, gap: bool) -> bool:
        """Take bytes of the stream. False when they begin behind our end and no gap was told."""
        if self.sealed or offset + len(content) <= self.end:
            return True
        if offset > self.end and not gap:
            return False
        full = self.end - self._segment_first >= SEGMENT_BYTES_MAX and self.walker.at_boundary
        content = content[max(self.end - offset, 0) :]
        if offset > self.end or self._fd < 0 or full:
            self._begin_segment(max(offset, self.end))
        self._write(content)
        self.walker.feed(content)
        return True

    def sync(self) -> None:
        """Make everything below `end` durable."""
        if self._new_names:
            self.files.sync_folder(self.folder)
            self._new_names = False
        if self.dirty:
            self._sync_content()
        self.durable = self.end

    def close(self) -> None:
        if self._fd >= 0:
            self.files.close(self._fd)
            self._fd = -1

    def recover(self) -> None:
        """Find the end again after a restart; what lies behind the last valid frame is cut off."""
        self.sealed = os.path.exists(os.path.join(self.folder, SEALED_NAME))
        segments = self._usable_segments()
        if not segments:
            return
        last = segments[-1]
        size = self.files.size(last.path)
        content = self.files.read(last.path, 0, size)
        found, understood = scan(content)
        counted = [item.ordinal + (item.kind is Kind.RECORD) for item in found if item.kind is not Kind.DAMAGE]
        self.walker = Walker(max([last.first_ordinal, *counted]))
        self._segment_first = last.first_offset
        self._fd = self.files.open_append(last.path)
        if understood < size and not self.sealed:
            log.warning(
                "%s: cut %d torn bytes at offset %d", last.path, size - understood, last.first_offset + understood
            )
            self.files.truncate(self._fd, understood)
            size = understood
        self.end = last.first_offset + size
        self.files.sync(self._fd)
        self.durable = self.end

    def distrust(self) -> None:
        """After a failed fsync the page cache may hold bytes that the disk never got: only what was durable counts."""
        self.close()
        segments = list_segments(self.files, self.folder)
        for segment in reversed(segments):
            keep = max(self.durable - segment.first_offset, 0)
            if self.files.size(segment.path) > keep:
                fd = self.files.open_append(segment.path)
                try:
                    self.files.truncate(fd, keep)
                finally:
                    self.files.close(fd)
            if keep or segment == segments[0]:
                break
            self.files.remove(segment.path)
        self.end = self.durable = 0
        self.walker = Walker()
        self.recover()
        self.doubtful = False

    def seal(self, losses: list[Loss]) -> None:
        """The writer is gone and everything it left is here: declare its last losses and, if need be, its end."""
        if self.sealed:
            return
        if not self.walker.at_boundary:
            self.close()
            self.recover()  # cuts the half frame whose rest never comes
        if losses:
            ordinal = max(self.walker.ordinal_next, *(loss.end for loss in losses))
            self._write_frames(b"".join(encode(encode_loss(loss), ordinal, LOSS_TAG) for loss in losses))
        if self.header.stream_class == SCALARS and not self.header.forked:
            last = self._last_record()
            if last is None or last.kind is not RecordKind.RUN_FINISH:
                self._write_frames(encode(encode_record(_unknown_finish(last)), self.walker.ordinal_next))
        self.sync()
        self.files.replace(os.path.join(self.folder, SEALED_NAME), b"")
        self.sealed = True

    def reclaim(self, below: int, open_bytes_min: int = 0) -> int:
        """Remove segments that end at or below `below`. Returns bytes freed.

        The last one stays, unless it is all delivered and has `open_bytes_min` (0: never): then the stream goes on in
        a new one, so that a stream that grows slowly does not keep what nobody needs.
        """
        if 0 < open_bytes_min <= self.end - self._segment_first and below >= self.end and self._may_leave():
            self._begin_segment(self.end)
            self.sync()
        segments = list_segments(self.files, self.folder)
        freed = 0
        for segment, behind in pairwise(segments):
            if behind.first_offset > below:
                break
            self.files.replace(os.path.join(self.folder, RECLAIMED_NAME), str(behind.first_offset).encode())
            freed += self.files.size(segment.path)
            self.files.remove(segment.path)
        return freed

    def _may_leave(self) -> bool:
        """Whether the last segment can go. The end of a run stays until the seal, which looks for it."""
        if self.sealed or self._fd < 0 or self.dirty or not self.walker.at_boundary:
            return False
        last = self._last_record()
        return last is None or last.kind is not RecordKind.RUN_FINISH

    def _write_frames(self, frames: bytes) -> None:
        if self._fd < 0:
            self._begin_segment(self.end)
        self._write(frames)
        self.walker.feed(frames)

    def _last_record(self) -> Record | None:
        """The last record in the last segment: a run that has ended ends with its finish."""
        segments = list_segments(self.files, self.folder)
        last = None
        if segments:
            found, _ = StreamReader(self.folder).read(segments[-1].first_offset, bytes_max=2 * SEGMENT_BYTES_MAX)
            for finding in found:
                record = _decoded(finding) if isinstance(finding, Frame) else None
                if record is not None and (last is None or last.kind is not RecordKind.RUN_FINISH):
                    last = record
        return last

    def _begin_segment(self, offset: int) -> None:
        path = os.path.join(self.folder, segment_name(offset, self.walker.ordinal_next))
        if os.path.lexists(path):
            _set_aside(path)
        if self._fd >= 0:
            self._sync_content()
        fd = self.files.create(path)
        self.close()
        if offset > self.end:
            self.walker = Walker(self.walker.ordinal_next)
        self._fd = fd
        self._segment_first = offset
        self.end = offset
        self._new_names = True

    def _write(self, content: bytes) -> None:
        written = 0
        try:
            while written < len(content):
                written += self.files.write(self._fd, content[written:])
        except OSError:
            try:
                self.files.truncate(self._fd, self.end - self._segment_first)
            except OSError as error:
                log.warning("%s: cannot cut back (%s); going on in a new segment", self.folder, error.strerror)
                self.close()
            raise
        self.end += len(content)

    def _sync_content(self) -> None:
        try:
            if self._fd >= 0:
                self.files.sync(self._fd)
        except OSError:
            self.doubtful = True
            raise

    def _usable_segments(self) -> list[Segment]:
        """Segments, after what is no readable file at the end was set aside."""
        segments = list_segments(self.files, self.folder)
        while segments:
            path = segments[-1].path
            if stat.S_ISREG(os.lstat(path).st_mode) and os.access(path, os.R_OK | os.W_OK):
                return segments
            _set_aside(path)
            segments.pop()
        return segments


def _decoded(finding: Frame) -> Record | None:
    try:
        return decode_record(finding.payload)
    except CorruptionError:
        return None


def _unknown_finish(last: Record | None) -> Record:
    seq = last.seq + 1 if last else 0
    time_ns = last.time_ns if last else 0
    return Record(RecordKind.RUN_FINISH, seq, None, time_ns, {"exit_code": None, "reason": "the writer is gone"})


def _set_aside(path: str) -> None:
    log.warning("%s is not a readable segment; kept as %s.bad", path, os.path.basename(path))
    os.rename(path, path + ".bad")
