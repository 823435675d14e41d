"""The wire between trainer and daemon: replication of append-only streams by offset. Pure bytes.

ZeroMQ multipart messages; the stream's bytes travel as they lie on disk.

    from    parts
    client  "H1" stream_id header                  I am this stream; how much of it do you have?
    daemon  "W1" stream_id <u64 offset>            I have everything below `offset`, durably
    client  "D1" stream_id <u64 offset><u8 flags> bytes      flags bit 0: the bytes below `offset` are gone for good
    daemon  "A1" stream_id <u64 offset>            everything below `offset` is on disk (fsynced)
    daemon  "G1" stream_id                         I do not know this stream yet: greet
    daemon  "R1" stream_id reason                  refused; ask again later

Re-sending is harmless (same offset, same bytes), a gap is impossible (DATA beyond the end is answered with WELCOME).
Must not know: sockets, time. On a message it cannot read: None, and the receiver counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import TypeAlias

DATA_BYTES_MAX = 256 * 1024  # one DATA message; small enough that scalars slip in between two of a burst
HEADER_BYTES_MAX = 64 * 1024

_OFFSET = Struct("<Q")
_DATA = Struct("<QB")
_GAP = 1


@dataclass(frozen=True, slots=True)
class Hello:
    stream_id: str
    header: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    stream_id: str
    offset: int


@dataclass(frozen=True, slots=True)
class Data:
    stream_id: str
    offset: int
    gap: bool
    content: bytes


@dataclass(frozen=True, slots=True)
class Ack:
    stream_id: str
    offset: int


@dataclass(frozen=True, slots=True)
class Greet:
    stream_id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    stream_id: str
    reason: str


FromClient: TypeAlias = Hello | Data
FromDaemon: TypeAlias = Welcome | Ack | Greet | Refuse


def pack(message: FromClient | FromDaemon) -> list[bytes]:
    """Parts of a message."""
    identity = message.stream_id.encode("ascii")
    match message:
        case Hello():
            return [b"H1", identity, message.header]
        case Data():
            return [b"D1", identity, _DATA.pack(message.offset, _GAP if message.gap else 0), message.content]
        case Welcome():
            return [b"W1", identity, _OFFSET.pack(message.offset)]
        case Ack():
            return [b"A1", identity, _OFFSET.pack(message.offset)]
        case Greet():
            return [b"G1", identity]
        case Refuse():
            return [b"R1", identity, message.reason.encode("utf-8", "replace")]


def unpack_from_client(parts: Sequence[bytes]) -> FromClient | None:
    match parts:
        case [b"H1", identity, header] if len(header) <= HEADER_BYTES_MAX:
            stream_id = _stream_id(identity)
            return Hello(stream_id, header) if stream_id else None
        case [b"D1", identity, place, content] if len(place) == _DATA.size and content:
            stream_id = _stream_id(identity)
            offset, flags = _DATA.unpack(place)
            return Data(stream_id, offset, bool(flags & _GAP), content) if stream_id else None
    return None


def unpack_from_daemon(parts: Sequence[bytes]) -> FromDaemon | None:
    if len(parts) < 2:
        return None
    stream_id = _stream_id(parts[1])
    match parts:
        case [b"W1", _, place] if len(place) == _OFFSET.size:
            return Welcome(stream_id, *_OFFSET.unpack(place)) if stream_id else None
        case [b"A1", _, place] if len(place) == _OFFSET.size:
            return Ack(stream_id, *_OFFSET.unpack(place)) if stream_id else None
        case [b"G1", _]:
            return Greet(stream_id) if stream_id else None
        case [b"R1", _, reason]:
            return Refuse(stream_id, reason.decode("utf-8", "replace")) if stream_id else None
    return None


def _stream_id(identity: bytes) -> str:
    """The id, or empty when it is not 32 hexadecimal digits: ids become folder names."""
    if len(identity) != 32 or identity.strip(b"0123456789abcdef"):
        return ""
    return identity.decode("ascii")
