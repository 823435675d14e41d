"""A frame: one record on disk and on the wire, byte for byte the same. Pure functions over bytes.

    offset size field
    0      3    magic    F5 76 73          (F5 never occurs in UTF-8 text)
    3      1    type     01 record, 02 loss
    4      4    crc32    little endian; zlib's CRC-32 with a seed per type, over bytes 8 .. 20+length
    8      4    length   little endian; payload bytes, 1 .. PAYLOAD_BYTES_MAX
    12     8    ordinal  little endian; see below
    20     n    payload  MessagePack

The checksum covers length, ordinal and payload and is seeded: crc32 of nothing is 0, so an unseeded
`length|crc|payload` reads a zero-filled tail as thousands of valid empty records.

Ordinals count the records of one stream from 0 without a gap, in the order in which they were captured. A
jump is therefore a loss of known size. A loss frame has the ordinal of the record that follows it and consumes
none itself. A signal handler that logs while it interrupts another `log()` may put its frame before the one
it interrupted; readers count ordinals, they do not insist on their order.

Must not know: files, sockets, kinds of records. On damage: `scan` says where and how many bytes, never raises.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from struct import Struct
from zlib import crc32

HEADER = Struct("<4sIIQ")
HEADER_BYTES = HEADER.size
CHECKED = Struct("<IQ")  # the part of the header that the checksum covers
CHECKED_AT = 8

MAGIC = b"\xf5vs"
RECORD_TAG = MAGIC + b"\x01"
LOSS_TAG = MAGIC + b"\x02"
SEED = {RECORD_TAG: 0x5EED_0001, LOSS_TAG: 0x5EED_0002}

# A frame is read into memory whole; 16 MiB holds a validation table of 512 answers of 32 KiB.
PAYLOAD_BYTES_MAX = 16 * 1024 * 1024


class Kind(enum.Enum):
    """What a scan found at an offset."""

    RECORD = "record"
    LOSS = "loss"
    DAMAGE = "damage"


@dataclass(frozen=True, slots=True)
class Found:
    """One finding of `scan`: a frame, or a damaged range that was skipped.

    `start` and `end` are positions in the scanned buffer. For damage, `payload` is empty and `ordinal` is -1.
    """

    kind: Kind
    start: int
    end: int
    ordinal: int
    payload: bytes


def encode(payload: bytes, ordinal: int, tag: bytes = RECORD_TAG) -> bytes:
    """Frame bytes of one payload. `ordinal` ≥ 0; payload length within 1 .. PAYLOAD_BYTES_MAX."""
    length = len(payload)
    assert 0 < length <= PAYLOAD_BYTES_MAX, length
    crc = crc32(payload, crc32(CHECKED.pack(length, ordinal), SEED[tag]))
    return HEADER.pack(tag, crc, length, ordinal) + payload


def scan(buffer: bytes | memoryview, *, at: int = 0, final: bool = False) -> tuple[list[Found], int]:
    """Find all frames from position `at`; return them and the position up to which the buffer is understood.

    Damage in front of a valid frame is reported and skipped. Bytes behind the last valid frame stay open (they may
    be a frame that is still being written) unless `final`, when they are reported as damage.
    """
    view = memoryview(buffer)
    data = buffer if isinstance(buffer, bytes) else b""  # a copy of anything else is made when damage is met
    size = len(view)
    found: list[Found] = []
    position = at
    while position < size:
        frame = _frame_at(view, position, size)
        if frame is not None:
            found.append(frame)
            position = frame.end
            continue
        data = data or bytes(view)
        resume = _next_frame(view, data, position + 1)
        if resume is None:
            break
        found.append(Found(Kind.DAMAGE, position, resume, -1, b""))
        position = resume
    if final and position < size:
        found.append(Found(Kind.DAMAGE, position, size, -1, b""))
        position = size
    return found, position


def _frame_at(view: memoryview, position: int, size: int) -> Found | None:
    body_at = position + HEADER_BYTES
    if body_at > size:
        return None
    tag, crc, length, ordinal = HEADER.unpack_from(view, position)
    seed = SEED.get(tag)
    end = body_at + length
    if seed is None or not 0 < length <= PAYLOAD_BYTES_MAX or end > size:
        return None
    if crc32(view[position + CHECKED_AT : end], seed) != crc:
        return None
    kind = Kind.RECORD if tag == RECORD_TAG else Kind.LOSS
    return Found(kind, position, end, ordinal, bytes(view[body_at:end]))


def _next_frame(view: memoryview, data: bytes, start: int) -> int | None:
    """Position of the next complete, valid frame at or after `start`; `data` is the viewed bytes, searchable."""
    hit = data.find(MAGIC, start)
    while hit >= 0:
        if _frame_at(view, hit, len(data)) is not None:
            return hit
        hit = data.find(MAGIC, hit + 1)
    return None


class Walker:
    """Steps over frames by their headers alone, across arbitrary cuts of the byte stream.

    Costs the daemon a few hundred nanoseconds a record where a full check would cost a read of every byte. Says how
    many ordinals a stream has used (`ordinal_next`) and whether the bytes end between two frames (`at_boundary`).
    Exact for undamaged bytes. Of damaged ones it makes what it can: it trusts a header that continues the count.
    """

    __slots__ = ("_carry", "_skip", "ordinal_next", "pending")

    def __init__(self, ordinal_next: int = 0) -> None:
        self.ordinal_next = ordinal_next
        self.pending = 0  # bytes at the end that belong to a frame not yet complete
        self._skip = 0  # payload bytes of the current frame that have not come yet
        self._carry = b""  # an incomplete header, or an incomplete frame that has to be checked

    @property
    def at_boundary(self) -> bool:
        return self._skip == 0 and not self._carry

    def feed(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes of the stream."""
        size = len(chunk)
        position = self._skip
        if position >= size and position > 0:
            self._skip = position - size
            self.pending = self.pending + size if self._skip else 0
            return
        if self._carry:
            chunk = self._carry + bytes(chunk)
            size = len(chunk)
            position = 0
            self._carry = b""
        unpack_from = HEADER.unpack_from
        ordinal_next = self.ordinal_next
        start = position
        while position + HEADER_BYTES <= size:
            tag, _crc, length, ordinal = unpack_from(chunk, position)
            if tag == RECORD_TAG and ordinal == ordinal_next and 0 < length <= PAYLOAD_BYTES_MAX:
                ordinal_next += 1
            elif tag not in SEED or not 0 < length <= PAYLOAD_BYTES_MAX:
                position = _next_magic(chunk, position + 1)
                continue
            elif ordinal > ordinal_next:
                # A jump is rare, and a flipped bit in a header must not invent records: it is checked in full.
                if position + HEADER_BYTES + length > size:
                    break
                if _frame_at(memoryview(chunk), position, size) is None:
                    position = _next_magic(chunk, position + 1)
                    continue
                ordinal_next = ordinal + (tag == RECORD_TAG)
            start = position
            position += HEADER_BYTES + length
        self.ordinal_next = ordinal_next
        self._skip = max(position - size, 0)
        self._carry = bytes(chunk[position:]) if position < size else b""
        self.pending = size - start if self._skip else len(self._carry)


def _next_magic(chunk: bytes | memoryview, start: int) -> int:
    data = bytes(chunk[start:])
    hit = data.find(MAGIC)
    return start + hit if hit >= 0 else start + max(len(data) - len(MAGIC) + 1, 0)
