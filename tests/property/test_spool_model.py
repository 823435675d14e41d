"""The spool against a Python list: whatever a disk, a kill or a power cut does, a reader sees what was kept, in order.

The model knows which records `append` said to keep, which it said to have lost, and which a quota shed before anybody
had read them. Reading goes on beside everything else, a few bytes at a time. Rules and faults are hypothesis' choice; a
failure prints the steps and a blob that repeats it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.streams import assert_law, make_header, number_of, payload, read_all
from verl_shipper_spool.frame import Kind, Walker
from verl_shipper_spool.header import BULK, SCALARS
from verl_shipper_spool.loss_journal import read_losses
from verl_shipper_spool.reader import Frame, Ledger, StreamReader
from verl_shipper_spool.segment import RawReader, list_segments
from verl_shipper_spool.testing import FaultyFiles
from verl_shipper_spool.writer import StreamWriter

CLASSES = ["metrics", "generations", "span"]
NAMED = {"disk_full", "spool_unavailable", "too_large", "quota"}


@dataclass
class Model:
    """One stream: what its writer said, and what its reader has seen."""

    writer: StreamWriter
    reader: StreamReader
    raw: RawReader
    kept: list[int] = field(default_factory=list)
    lost: int = 0
    gone: set[int] = field(default_factory=set)  # kept, then shed unread
    shed: bool = False
    synced: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    offset: int = 0
    walker: Walker = field(default_factory=Walker)
    copied: list[tuple[int, bytes]] = field(default_factory=list)  # (offset, bytes) as a sender would have sent them
    copied_to: int = 0

    def read(self, bytes_max: int, *, final: bool = False) -> bool:
        """Read on; False when there was nothing."""
        findings, end = self.reader.read(self.offset, bytes_max=bytes_max, final=final)
        for finding in findings:
            fresh = self.ledger.account(finding)
            if isinstance(finding, Frame) and finding.kind is Kind.RECORD:
                assert fresh, "no frame comes twice"
                assert number_of(finding.payload) == finding.ordinal
                self.seen.append(finding.ordinal)
        moved = end > self.offset
        assert end >= self.offset
        self.offset = end
        return moved

    def expected(self) -> list[int]:
        return [number for number in self.kept if number not in self.gone]


class SpoolModel(RuleBasedStateMachine):
    """Rules: what writers, disks, quotas and readers do."""

    @initialize(seed=st.integers(0, 2**32), segment_bytes_max=st.sampled_from([1, 150, 500, 5000]))
    def begin(self, seed: int, segment_bytes_max: int) -> None:
        self.spool = tempfile.mkdtemp(prefix="spool-model-")
        self.files = FaultyFiles(seed)
        self.segment_bytes_max = segment_bytes_max
        self.model = self._new()

    def _new(self) -> Model:
        header = make_header(self.files.random.choice([SCALARS, BULK]))
        options = {"files": self.files, "segment_bytes_max": self.segment_bytes_max}
        writer = StreamWriter(self.spool, header, **options)  # type: ignore[arg-type]
        return Model(writer, StreamReader(writer.folder, files=self.files), RawReader(self.files, writer.folder))

    def _is_there(self) -> bool:
        return os.path.isdir(self.model.writer.folder)

    # The writer

    @rule(
        count=st.integers(1, 12), size_bytes=st.integers(1, 300), record_class=st.sampled_from([*CLASSES, *CLASSES[:1]])
    )
    def append(self, count: int, size_bytes: int, record_class: str) -> None:
        model = self.model
        for _ in range(count):
            number = model.writer.records
            if model.writer.append(payload(number, size_bytes), record_class):
                model.kept.append(number)
            else:
                model.lost += 1

    @rule()
    def append_what_is_no_frame(self) -> None:
        assert not self.model.writer.append(b"", "metrics")
        self.model.lost += 1

    @rule(record_class=st.sampled_from([None, *CLASSES]))
    def shed(self, record_class: str | None) -> None:
        model = self.model
        before = [(one.first_ordinal, one.end_ordinal) for one in model.writer.segments]
        model.writer.shed_oldest(record_class, "quota")
        after = [(one.first_ordinal, one.end_ordinal) for one in model.writer.segments]
        for first, end in set(before) - set(after):
            assert end is not None
            unread = {number for number in model.kept if first <= number < end} - set(model.seen)
            model.gone |= unread
            model.shed = True
            model.synced = [number for number in model.synced if not first <= number < end]
            event("shed")

    @rule()
    def forget_what_was_read(self) -> None:
        model = self.model
        for segment in list(model.writer.segments):
            if segment.end_offset is not None and segment.end_offset <= min(model.offset, model.copied_to):
                model.writer.forget(segment)
                model.synced = [number for number in model.synced if number >= (segment.end_ordinal or 0)]

    @rule()
    def declare(self) -> None:
        self.model.writer.declare_losses()

    @precondition(lambda self: self._is_there() and self.model.writer.segments)
    @rule()
    def sync(self) -> None:
        self.model.writer.sync()
        first = self.model.writer.segments[0].first_ordinal
        self.model.synced = [number for number in self.model.expected() if number >= first]

    # The disk

    @rule(full=st.booleans())
    def fill_or_free(self, full: bool) -> None:
        self.files.full = full

    @rule(count=st.integers(1, 3))
    def write_short(self, count: int) -> None:
        self.files.short_writes_next = count

    @rule(fails=st.booleans())
    def fail_to_cut(self, fails: bool) -> None:
        self.files.truncate_fails = fails

    # The reader and the sender

    @precondition(lambda self: self._is_there())
    @rule(bytes_max=st.integers(1, 3000))
    def read(self, bytes_max: int) -> None:
        self.model.read(bytes_max)

    @precondition(lambda self: self._is_there())
    @rule(bytes_max=st.integers(1, 3000))
    def copy(self, bytes_max: int) -> None:
        model = self.model
        start, content = model.raw.read(model.copied_to, bytes_max, model.writer.end_offset)
        if content:
            if start > model.copied_to:
                model.walker = Walker(model.walker.ordinal_next)
            model.walker.feed(content)
            model.copied.append((start, content))
            model.copied_to = start + len(content)
        assert model.copied_to <= model.writer.end_offset
        assert model.walker.ordinal_next <= model.writer.records

    # The end of a writer

    @rule()
    def kill(self) -> None:
        self.model.writer.abandon()  # what the kernel does
        self._check_dead_stream()
        self.model = self._new()

    @rule(nul_tail=st.booleans())
    def cut_power(self, nul_tail: bool) -> None:
        model = self.model
        model.writer.abandon()
        self.files.power_cut(self.spool, nul_tail=nul_tail)
        event("power cut")
        if self._is_there():
            found = read_all(model.writer.folder)
            assert [number for number in found.numbers if number in set(model.synced)] == model.synced
            assert set(found.numbers) <= set(model.kept)
            assert found.numbers == sorted(found.numbers)
            while model.read(1000, final=True):
                pass
            assert_law(model.ledger)
        self.model = self._new()

    # What always holds

    @invariant()
    def the_reader_saw_what_was_kept_in_order(self) -> None:
        model = self.model
        assert model.seen == model.expected()[: len(model.seen)]
        assert model.ledger.seen == len(model.seen)
        assert_law(model.ledger)
        assert model.ledger.ordinal <= model.writer.records == len(model.kept) + model.lost
        assert model.writer.lost_records >= model.lost

    def _check_dead_stream(self) -> None:
        """A writer without a future: everything is there, or counted with a reason."""
        model = self.model
        if not self._is_there():
            assert model.kept == []
            return
        while model.read(1 + self.files.random.randrange(2000), final=True):
            pass
        for loss in read_losses(model.writer.folder):
            model.ledger.name(loss)
        assert model.seen == model.expected()
        assert_law(model.ledger)
        if not read_losses(model.writer.folder) and model.ledger.ordinal < model.writer.records:
            # The last ones were lost and the disk was too full even for a journal: known to nobody.
            assert self._journal_is_missing()
        else:
            assert model.ledger.ordinal == model.writer.records
            assert sum(model.ledger.dropped.values()) == model.lost + len(model.gone)
            assert set(model.ledger.dropped) <= NAMED
        self._check_copies()

    def _journal_is_missing(self) -> bool:
        return not os.path.exists(os.path.join(self.model.writer.folder, "losses"))

    def _check_copies(self) -> None:
        """Bytes at an offset never change: what a sender took is still there, unless its segment is gone."""
        segments = list_segments(self.files, self.model.writer.folder)
        for start, content in self.model.copied:
            for segment in segments:
                if segment.first_offset <= start < segment.first_offset + self.files.size(segment.path):
                    assert self.files.read(segment.path, start - segment.first_offset, len(content)) == content

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.files.full = self.files.truncate_fails = False
            self.model.writer.abandon()
            try:
                self._check_dead_stream()
            finally:
                shutil.rmtree(self.spool)


TestSpoolModel = SpoolModel.TestCase
TestSpoolModel.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
