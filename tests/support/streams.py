"""Streams without a client: headers, records by number, and all that a reader finds in a folder.

Payloads carry their ordinal, so that a test can tell which records came back: `number_of(payload(7)) == 7`.
Must not know: client, daemon. On failure: AssertionError.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_shipper_spool.files import Files, RealFiles
from verl_shipper_spool.frame import LOSS_TAG, Kind, encode
from verl_shipper_spool.header import SCALARS, Process, StreamHeader, encode_header, new_id
from verl_shipper_spool.loss_journal import read_losses
from verl_shipper_spool.reader import READ_BYTES, Damage, Finding, Frame, Gap, Ledger, StreamReader
from verl_shipper_spool.record import Loss, Record, RecordKind, decode_record, encode_loss, encode_record
from verl_shipper_spool.segment import segment_name

PROCESS = Process(node="n1", boot_id="b" * 36, pid=4242, pid_namespace="pid:[1]", start_ticks=77, uid=1000)


def make_header(stream_class: str = SCALARS, **changes: Any) -> StreamHeader:
    """A header of a fresh stream."""
    header = StreamHeader(
        stream_id=new_id(),
        writer_id=new_id(),
        stream_class=stream_class,
        run_id="run-1",
        project="project",
        experiment="experiment",
        rank=0,
        world=1,
        created_ns=1_700_000_000_000_000_000,
        forked=False,
        process=PROCESS,
    )
    return replace(header, **changes)


def payload(number: int, size_bytes: int = 0) -> bytes:
    """Payload of a metrics record that carries `number`, and is at least `size_bytes` long."""
    body: dict[str, Any] = {"n": number}
    if size_bytes:
        body["filling"] = "x" * size_bytes
    return encode_record(Record(RecordKind.METRICS, number, number, 1, body))


def number_of(content: bytes) -> int:
    number = decode_record(content).body["n"]
    assert isinstance(number, int)
    return number


def frame(number: int, size_bytes: int = 0) -> bytes:
    """Frame of record `number`."""
    return encode(payload(number, size_bytes), number)


def loss_frame(ordinal: int, loss: Loss) -> bytes:
    return encode(encode_loss(loss), ordinal, LOSS_TAG)


@dataclass
class Found:
    """What one reading of a stream gave."""

    findings: list[Finding] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    end: int = 0

    @property
    def frames(self) -> list[Frame]:
        """Record frames, in the order of the stream."""
        return [item for item in self.findings if isinstance(item, Frame) and item.kind is Kind.RECORD]

    @property
    def numbers(self) -> list[int]:
        """Numbers of the records, in the order of the stream, when every payload carries its ordinal."""
        assert all(number_of(item.payload) == item.ordinal for item in self.frames)
        return [item.ordinal for item in self.frames]

    @property
    def damages(self) -> list[Damage]:
        return [item for item in self.findings if isinstance(item, Damage)]

    @property
    def gaps(self) -> list[Gap]:
        return [item for item in self.findings if isinstance(item, Gap)]


def read_all(
    folder: str, *, files: Files | None = None, bytes_max: int = READ_BYTES, final: bool = True, journal: bool = False
) -> Found:
    """Everything in a stream's folder, with its account; `journal`: and what the dead writer's journal says."""
    reader = StreamReader(folder, files=files)
    found = Found()
    while True:
        findings, end = reader.read(found.end, bytes_max=bytes_max, final=final)
        assert end >= found.end
        for finding in findings:
            found.ledger.account(finding)
        found.findings += findings
        if end == found.end:
            break
        found.end = end
    for loss in read_losses(folder) if journal else []:
        found.ledger.name(loss)
    assert_law(found.ledger)
    return found


def assert_law(ledger: Ledger) -> None:
    assert ledger.ordinal == ledger.seen + sum(ledger.dropped.values()), ledger
    assert all(count > 0 for count in ledger.dropped.values()), ledger


def fill(path: Path) -> None:
    """Take what room is left on the disk."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


class Folder:
    """A stream's folder made by hand, segment by segment."""

    def __init__(self, spool_dir: os.PathLike[str] | str, header: StreamHeader | None = None) -> None:
        self.header = header or make_header()
        self.path = os.path.join(os.fspath(spool_dir), self.header.stream_id)
        self.segments: list[str] = []
        self._offset = 0
        RealFiles().make_folder(self.path)
        RealFiles().replace(os.path.join(self.path, "stream"), encode_header(self.header), durable=False)

    def add(self, content: bytes, first_ordinal: int) -> str:
        """One more segment; returns its path."""
        path = os.path.join(self.path, segment_name(self._offset, first_ordinal))
        with open(path, "wb") as file:
            file.write(content)
        self.segments.append(path)
        self._offset += len(content)
        return path

    def add_records(self, first: int, count: int) -> str:
        return self.add(b"".join(frame(number) for number in range(first, first + count)), first)
