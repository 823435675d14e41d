"""Format v1, pinned: these bytes were written once, and every later version reads and writes the very same.

A change here is a change of the format. It needs a new version number and a reader that still knows this one; the
files are never written again. tests/golden/*.bin are the folder of one stream: a segment with a record of every kind, a
loss frame and odd values; the header; the journal.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from support.streams import read_all
from verl_shipper_spool.frame import LOSS_TAG, Kind, encode, scan
from verl_shipper_spool.header import SCALARS, Process, StreamHeader, decode_header, encode_header
from verl_shipper_spool.loss_journal import LossJournal, read_losses
from verl_shipper_spool.record import (
    Loss,
    Record,
    RecordKind,
    Unsupported,
    decode_loss,
    decode_record,
    encode_loss,
    encode_record,
)

GOLDEN = Path(__file__).parent
TIME_NS = 1_700_000_000_123_456_789

RECORDS = [
    Record(
        RecordKind.RUN_START,
        0,
        None,
        TIME_NS,
        {
            "project": "rlhf",
            "experiment": "grpo",
            "config": {"actor": {"lr": 1e-6, "tags": ["a", None, True]}},
            "node": "node-1",
            "rank": 0,
            "world": 8,
        },
    ),
    Record(
        RecordKind.METRICS,
        1,
        1,
        TIME_NS + 1,
        {
            "actor/pg_loss": -0.0125,
            "step": 1,
            "largest": 2**64 - 1,
            "smallest": -(2**63),
            "infinite": math.inf,
            "nested": {"ü": 1.5, ("a", 2): -math.inf, 7: False},
            "odd": Unsupported("torch.Tensor (3, 4)"),
        },
    ),
    Record(
        RecordKind.GENERATIONS,
        2,
        10,
        TIME_NS + 2,
        {
            "columns": ["input", "output", "score"],
            "rows": [["1+1=", "2", 1.0], ["2+2=", "5 …", 0.0]],
            "part": 0,
            "parts": 1,
            "call": 0,
        },
    ),
    Record(
        RecordKind.SPAN,
        3,
        10,
        TIME_NS + 3,
        {
            "trace_id": bytes(range(16)),
            "span_id": bytes(range(8)),
            "parent_id": None,
            "name": "rollout",
            "start_ns": TIME_NS,
            "end_ns": TIME_NS + 1000,
            "inputs": {"prompt": "1+1="},
            "outputs": {"answer": "2"},
            "status": "ok",
            "attributes": {"step": 10},
        },
    ),
    Record(RecordKind.TEXT, 4, None, TIME_NS + 4, {"note": "text"}),
    Record(RecordKind.FILE, 5, 10, TIME_NS + 5, {"path": "/data/trace.json", "name": "trace.json"}),
    Record(RecordKind.RUN_FINISH, 9, None, TIME_NS + 6, {"exit_code": None, "reason": "finish"}),
]
LOSS = Loss(6, 9, "metrics", "disk_full")  # stands in front of the last record, whose ordinal is 9
PENDING = [Loss(20, 25, "metrics", "disk_full"), Loss(30, 31, "span", "quota")]
HEADER = StreamHeader(
    stream_id="0123456789abcdef" * 2,
    writer_id="fedcba9876543210" * 2,
    stream_class=SCALARS,
    run_id="run-1",
    project="rlhf",
    experiment="grpo",
    rank=0,
    world=8,
    created_ns=TIME_NS,
    forked=False,
    process=Process(
        node="node-1",
        boot_id="11111111-2222-3333-4444-555555555555",
        pid=4242,
        pid_namespace="pid:[4026531836]",
        start_ticks=123_456,
        uid=1000,
    ),
)


def _segment() -> bytes:
    frames = [encode(encode_record(record), record.seq) for record in RECORDS]
    return b"".join([*frames[:-1], encode(encode_loss(LOSS), 9, LOSS_TAG), frames[-1]])


def test_a_segment_is_written_byte_for_byte_as_in_version_1() -> None:
    assert _segment() == (GOLDEN / "segment_v1.bin").read_bytes()


def test_a_segment_of_version_1_is_read_as_it_was_meant() -> None:
    content = (GOLDEN / "segment_v1.bin").read_bytes()

    found, end = scan(content)

    assert end == len(content)
    assert [decode_record(item.payload) for item in found if item.kind is Kind.RECORD] == RECORDS
    assert [decode_loss(item.payload) for item in found if item.kind is Kind.LOSS] == [LOSS]
    assert [item.ordinal for item in found] == [0, 1, 2, 3, 4, 5, 9, 9]


def test_a_header_is_written_and_read_as_in_version_1() -> None:
    content = (GOLDEN / "stream_v1.bin").read_bytes()

    assert encode_header(HEADER) == content
    assert decode_header(content) == HEADER


def test_a_loss_journal_is_written_and_read_as_in_version_1(tmp_path: Path) -> None:
    journal = LossJournal(str(tmp_path))
    journal.open()
    for loss in PENDING:
        journal.add(loss)
    journal.close()

    assert (tmp_path / "losses").read_bytes() == (GOLDEN / "losses_v1.bin").read_bytes()
    assert read_losses(str(tmp_path)) == PENDING


def test_a_stream_of_version_1_has_the_account_it_had(tmp_path: Path) -> None:
    for name, target in (
        ("segment_v1.bin", "0000000000000000-0000000000000000.seg"),
        ("stream_v1.bin", "stream"),
        ("losses_v1.bin", "losses"),
    ):
        shutil.copy(GOLDEN / name, tmp_path / target)

    ledger = read_all(str(tmp_path), journal=True).ledger

    assert (ledger.ordinal, ledger.seen) == (31, 7)
    assert ledger.dropped == {"disk_full": 8, "missing": 15, "quota": 1}
