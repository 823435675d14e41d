"""Reading a stream from its folder: frames, gaps and damage, in order, from a cursor on.

A cursor is (offset, ordinal): the next byte to understand and the next record to expect. Both only grow.

    case at the cursor                                  what `read` returns
    valid frame                                         Frame
    damage in front of a valid frame                    Damage(bytes skipped), then the frame
    torn or unfinished bytes at the stream's end        nothing yet; Damage when the stream is `final`
    next segment begins behind the end of this one      Gap(bytes missing)
    a segment that cannot be opened or is a directory   Gap over it, once the next segment exists or the stream is final
    zero-filled tail                                    like torn bytes

Losses are not judged here but by `account`, which turns a step from one ordinal to another into numbers: a jump is
records missing, a loss frame gives missing records their true reason.

Must not know: sockets, trackers, who wrote the stream. On failure: OSError of the folder itself; never of one segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.files import Files, RealFiles
from verl_shipper_spool.frame import HEADER_BYTES, PAYLOAD_BYTES_MAX, Kind, scan
from verl_shipper_spool.record import decode_loss
from verl_shipper_spool.segment import Segment, list_segments, segment_at

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
    """Running account of one stream at one reader: every ordinal below `ordinal` is seen or dropped with a reason."""

    ordinal: int = 0
    seen: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    damaged: bool = False

    def account(self, finding: Finding) -> None:
        """Take one finding into account. Damage is remembered until the next frame tells how many records it cost."""
        if isinstance(finding, Damage):
            self.damaged = True
        elif isinstance(finding, Frame):
            if finding.ordinal > self.ordinal:
                self.add(DAMAGED if self.damaged else MISSING, finding.ordinal - self.ordinal)
                self.ordinal = finding.ordinal
            self.damaged = False
            if finding.kind is Kind.LOSS:
                self._name_losses(finding.payload)
            elif finding.ordinal == self.ordinal:
                self.ordinal += 1
                self.seen += 1
            else:  # written by a signal handler in front of the record it interrupted, which was taken for missing
                self.seen += 1
                self.move(MISSING, None, 1)

    def add(self, reason: str, count: int) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def move(self, source: str, target: str | None, count: int) -> None:
        """Give up to `count` records of one reason another one (None: they did arrive)."""
        count = min(count, self.dropped.get(source, 0))
        if not count:
            return
        self.dropped[source] -= count
        if not self.dropped[source]:
            del self.dropped[source]
        if target is not None:
            self.add(target, count)

    def _name_losses(self, payload: bytes) -> None:
        try:
            loss = decode_loss(payload)
        except CorruptionError:
            return
        if loss.end > self.ordinal:
            self.add(MISSING, loss.end - self.ordinal)
            self.ordinal = loss.end
        self.move(MISSING, loss.reason, loss.count)


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
        data, readable = self._bytes(segment, offset, bytes_max, behind, until)
        if data:
            found, offset = self._frames(segment, data, offset, bytes_max, behind, until)
            if found:
                return found, offset
        return self._past_end(segment, offset, len(data), behind, readable=readable, final=final)

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
        except OSError:
            return b"", False

    def _frames(
        self,
        segment: Segment,
        data: bytes,
        offset: int,
        bytes_max: int,
        behind: Segment | None,
        until: int | None,
    ) -> tuple[list[Finding], int]:
        found, understood = scan(data)
        if not found and len(data) == bytes_max and bytes_max < 2 * FRAME_BYTES_MAX:
            bigger = 2 * FRAME_BYTES_MAX if bytes_max >= READ_BYTES else READ_BYTES
            data, _ = self._bytes(segment, offset, bigger, behind, until)
            found, understood = scan(data)
        if not found and len(data) > FRAME_BYTES_MAX:
            hopeless = len(data) - FRAME_BYTES_MAX  # no valid frame begins there: it would be complete by now
            return [Damage(offset, offset + hopeless)], offset + hopeless
        findings: list[Finding] = []
        for item in found:
            if item.kind is Kind.DAMAGE:
                findings.append(Damage(offset + item.start, offset + item.end))
            else:
                findings.append(Frame(item.kind, item.ordinal, item.payload, offset + item.end))
        return findings, offset + understood

    def _past_end(
        self,
        segment: Segment,
        offset: int,
        left: int,
        behind: Segment | None,
        *,
        readable: bool,
        final: bool,
    ) -> tuple[list[Finding], int]:
        """Nothing understandable at `offset`; `left` bytes there are no frame (yet)."""
        if behind is not None:
            findings: list[Finding] = []
            if left:
                findings.append(Damage(offset, offset + left))
            if offset + left < behind.first_offset and (not readable or left == 0 or self._short(segment, behind)):
                findings.append(Gap(offset + left, behind.first_offset))
            return findings, behind.first_offset
        if final and left:
            return [Damage(offset, offset + left)], offset + left
        return [], offset

    def _short(self, segment: Segment, behind: Segment) -> bool:
        try:
            return segment.first_offset + self._files.size(segment.path) < behind.first_offset
        except OSError:
            return True

