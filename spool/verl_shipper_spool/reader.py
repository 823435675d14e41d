"""Reading a stream from its folder: frames, gaps and damage, in order, from a cursor on.

A cursor is (offset, ordinal): the next byte to understand and the next record to expect. Both only grow.

    case at the cursor                                  what `read` returns
    valid frame                                         Frame
    damage in front of a valid frame                    Damage(bytes skipped), then the frame
    torn or unfinished bytes at the stream's end        nothing yet; Damage when the stream is `final`
    the same at a segment's end, and a next one exists  Damage
    next segment begins behind the end of this one      Gap(bytes missing)
    a segment that cannot be opened or is a directory   Gap over it, once the next segment exists or the stream is final
    zero-filled tail                                    like torn bytes

Losses are not judged here but by `account`, which turns a step from one ordinal to another into numbers: a jump is
records missing, a loss frame gives missing records their true reason.

Must not know: sockets, trackers, who wrote the stream. On failure: OSError of the folder itself, or of this process
when it is out of descriptors or memory; never of one segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.files import Files, RealFiles
from verl_shipper_spool.frame import HEADER_BYTES, PAYLOAD_BYTES_MAX, Found, Kind, scan
from verl_shipper_spool.record import Loss, decode_loss
from verl_shipper_spool.segment import Segment, is_our_own_trouble, list_segments, segment_at

READ_BYTES = 1024 * 1024
# A valid frame that begins at the cursor is complete within this many bytes.
FRAME_BYTES_MAX = HEADER_BYTES + PAYLOAD_BYTES_MAX

MISSING = "missing"  # records whose bytes never came
DAMAGED = "damaged"  # records whose bytes came broken


@dataclass(frozen=True, slots=True)
class Frame:
    """A valid frame. `end` is the offset behind it."""

    kind: Kind
    ordinal: int
    payload: bytes
    end: int


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not frames, skipped."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes that are not there."""

    start: int
    end: int


Finding: TypeAlias = Frame | Damage | Gap


@dataclass(slots=True)
class Ledger:
    """Running account of one stream at one reader: every ordinal below `ordinal` is seen or dropped with a reason.

    Sums are exact. Reasons are as exact as the order of the stream: a loss frame that comes long after the jump it
    explains may give its reason to other records that are missing.
    """

    ordinal: int = 0
    seen: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    damaged: bool = False

    def account(self, finding: Finding) -> bool:
        """Take one finding into account; True when it is a record that was not seen before.

        Damage is remembered until the next frame tells how many records it cost.
        """
        if isinstance(finding, Damage):
            self.damaged = True
        if not isinstance(finding, Frame):
            return False
        if finding.ordinal > self.ordinal:
            self.add(DAMAGED if self.damaged else MISSING, finding.ordinal - self.ordinal)
            self.ordinal = finding.ordinal
        self.damaged = False
        if finding.kind is Kind.LOSS:
            try:
                self.name(decode_loss(finding.payload))
            except CorruptionError:
                return False  # its records stay missing, without a better reason
            return False
        if finding.ordinal == self.ordinal:
            self.ordinal += 1
        elif not self.move(MISSING, None, 1) and not self.move(DAMAGED, None, 1):
            return False  # the same bytes twice
        # else written by a signal handler in front of the record it interrupted, which was taken for missing
        self.seen += 1
        return True

    def name(self, loss: Loss) -> None:
        """Records that never reached the stream, and why: by a loss frame, or by the journal of a dead writer."""
        if loss.end > self.ordinal:
            self.add(MISSING, loss.end - self.ordinal)
            self.ordinal = loss.end
        moved = self.move(MISSING, loss.reason, loss.count)
        self.move(DAMAGED, loss.reason, loss.count - moved)

    def add(self, reason: str, count: int) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def move(self, source: str, target: str | None, count: int) -> int:
        """Give up to `count` records of one reason another one (None: they did arrive); returns how many."""
        count = min(count, self.dropped.get(source, 0))
        if not count:
            return 0
        self.dropped[source] -= count
        if not self.dropped[source]:
            del self.dropped[source]
        if target is not None:
            self.add(target, count)
        return count


class StreamReader:
    """Reads one stream folder. Holds no descriptor between calls, so that folders may vanish under it."""

    def __init__(self, folder: str, *, files: Files | None = None) -> None:
        self.folder = folder
        self._files: Files = files or RealFiles()
        self._segments: list[Segment] = []

    def read(
        self, offset: int, *, bytes_max: int = READ_BYTES, until: int | None = None, final: bool = False
    ) -> tuple[list[Finding], int]:
        """Findings from `offset` on, about `bytes_max` of them, and the offset behind the last one.

        `until` limits reading to bytes before that offset. `final` says that nobody will append any more.
        """
        segment, behind = self._locate(offset)
        if segment is None:
            if behind is not None and (until is None or behind.first_offset <= until):
                return [Gap(offset, behind.first_offset)], behind.first_offset
            return [], offset
        # The budget first; more only for a frame, or a damage, that is larger than the budget.
        for size in (bytes_max, READ_BYTES, 2 * FRAME_BYTES_MAX):
            data, readable = self._bytes(segment, offset, max(size, bytes_max), behind, until)
            found, understood = scan(data)
            if found:
                return [_finding(item, offset) for item in found], offset + understood
            if len(data) < size:
                break
        if len(data) > FRAME_BYTES_MAX:
            hopeless = len(data) - FRAME_BYTES_MAX  # no valid frame begins there: it would be complete by now
            return [Damage(offset, offset + hopeless)], offset + hopeless
        if behind is not None and (until is None or behind.first_offset <= until):
            return _left(offset, len(data), behind.first_offset), behind.first_offset
        if final and behind is None:
            return self._end(segment, offset, len(data), until, readable=readable)
        return [], offset

    def frames(self, offset: int = 0, *, final: bool = False) -> Iterator[Finding]:
        """All findings from `offset` to the present end."""
        while True:
            found, end = self.read(offset, final=final)
            yield from found
            if end == offset:
                return
            offset = end

    def end_offset(self) -> int:
        """Offset behind the last byte on disk, valid or not."""
        self._segments = list_segments(self._files, self.folder)
        for segment in reversed(self._segments):
            try:
                return segment.first_offset + self._files.size(segment.path)
            except OSError:
                continue
        return 0

    def segment_start(self, offset: int) -> int:
        """Where the segment begins that holds `offset`; `offset` itself when there is none."""
        segment, _ = self._locate(offset)
        return offset if segment is None else segment.first_offset

    def _locate(self, offset: int) -> tuple[Segment | None, Segment | None]:
        """The segment that holds `offset`, and the one behind it. Looks at the folder again when it must."""
        index = segment_at(self._segments, offset)
        if index < 0 or index + 1 >= len(self._segments):
            self._segments = list_segments(self._files, self.folder)
            index = segment_at(self._segments, offset)
        behind = self._segments[index + 1] if index + 1 < len(self._segments) else None
        return (self._segments[index] if index >= 0 else None), behind

    def _bytes(
        self, segment: Segment, offset: int, bytes_max: int, behind: Segment | None, until: int | None
    ) -> tuple[bytes, bool]:
        ends = [end for end in (behind.first_offset if behind else None, until) if end is not None]
        limit = min([bytes_max] + [end - offset for end in ends])
        if limit <= 0:
            return b"", True
        try:
            return self._files.read(segment.path, offset - segment.first_offset, limit), True
        except FileNotFoundError:
            self._segments = []  # reclaimed while we looked; the next call sees the folder as it is
            return b"", False
        except OSError as error:
            if is_our_own_trouble(error):
                raise
            return b"", False

    def _end(
        self, segment: Segment, offset: int, left: int, until: int | None, *, readable: bool
    ) -> tuple[list[Finding], int]:
        """The last bytes of a stream that nobody appends to any more: `left` of them could be read and are no frame."""
        try:
            end = segment.first_offset + self._files.size(segment.path)
        except OSError:
            end = offset + left
        if until is not None and end > until:
            return [], offset  # not the end yet, only as far as we may read
        if readable:
            end = offset + left
        return _left(offset, left, end), max(end, offset)


def _finding(item: Found, offset: int) -> Finding:
    if item.kind is Kind.DAMAGE:
        return Damage(offset + item.start, offset + item.end)
    return Frame(item.kind, item.ordinal, item.payload, offset + item.end)


def _left(offset: int, left: int, end: int) -> list[Finding]:
    """`left` bytes at `offset` are no frame, and those from there to `end` are not there."""
    findings: list[Finding] = []
    if left:
        findings.append(Damage(offset, offset + left))
    if offset + left < end:
        findings.append(Gap(offset + left, end))
    return findings
