"""A node stream as a lane sees it, and what was found in it on its way through sampling.

Must not know: when it is read, where it goes. On failure: OSError of the stream's folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from verl_shipper.lane_store import Cursor
from verl_shipper.policy.stream_sampler import StreamSampler
from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.frame import Kind
from verl_shipper_spool.header import StreamHeader
from verl_shipper_spool.reader import READ_BYTES, Finding, Frame, Ledger, StreamReader
from verl_shipper_spool.record import Record, decode_record


@dataclass(slots=True)
class Found:
    """A finding of a stream that begins at `start`, on its way through sampling."""

    finding: Finding
    start: int
    reclaimed: bool = False  # the first frame behind a beginning that was reclaimed before this lane's state began
    record: Record | None = None

    def put_aside(self) -> None:
        """Let go of what is large; it can be read again."""
        self.record = None
        if isinstance(self.finding, Frame):
            self.finding = replace(self.finding, payload=b"")


@dataclass(slots=True)
class Stream:
    """A node stream as this lane sees it."""

    header: StreamHeader
    reader: StreamReader
    cursor: Cursor
    already: int = 0  # ordinals below this are at the tracker (its watermark)
    exhausted: bool = False  # sealed, and read to its end
    ended: bool = False  # its run has said that it is over
    sampler: StreamSampler[Found] | None = None  # None: everything is delivered
    is_learned: bool = False  # what its run asks for has been looked up
    is_judged: bool = False  # `sampler` has been decided
    moved: bool = False  # the cursor, since it was last committed
    grown_s: float = 0.0  # when there was last something new in it
    known_s: float = 0.0  # when it was looked at first
    turn: int = 0  # when it was read last, as a count
    ahead: int = field(init=False)  # how far it has been looked at; behind the cursor records wait for a verdict
    ledger: Ledger = field(init=False)  # account of what has been looked at

    def __post_init__(self) -> None:
        self.ahead = self.cursor.offset
        self.ledger = self.cursor.ledger


def record_of(finding: Finding) -> Record | None:
    """The record in a finding; None when it is something else, or cannot be read."""
    if not isinstance(finding, Frame) or finding.kind is not Kind.RECORD:
        return None
    try:
        return decode_record(finding.payload)
    except CorruptionError:
        return None


def remember(stream: Stream, sampler: StreamSampler[Found]) -> None:
    """Show a sampler what lies right before the cursor, as far as its segment still has it."""
    until = stream.cursor.offset
    offset = stream.reader.segment_start(until)
    while offset < until:
        found, end = stream.reader.read(offset, bytes_max=READ_BYTES, until=until)
        for record in filter(None, map(record_of, found)):
            sampler.remember(record)
        if end <= offset:
            return
        offset = end
