"""What a client left in its spool.

Must not know: the daemon. On failure: AssertionError.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_shipper_spool.frame import Kind
from verl_shipper_spool.reader import Damage, Frame, StreamReader
from verl_shipper_spool.record import Record, RecordKind, decode_record


def records(spool: Path) -> list[Record]:
    """All records in a spool, in the order of their sequence numbers."""
    found = []
    for folder in spool.iterdir():
        if (folder / "stream").exists():
            for finding in StreamReader(str(folder)).frames(final=True):
                assert not isinstance(finding, Damage), finding
                if isinstance(finding, Frame) and finding.kind is Kind.RECORD:
                    found.append(decode_record(finding.payload))
    return sorted(found, key=lambda record: record.seq)


def bodies(spool: Path, kind: RecordKind = RecordKind.METRICS) -> list[dict[Any, Any]]:
    """Bodies of all records of one kind, in order."""
    return [record.body for record in records(spool) if record.kind is kind]
