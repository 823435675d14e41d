"""The writer of a stream: what it leaves on disk, in good times and on full disks."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from support.streams import fill, frame, make_header, payload, read_all
from verl_shipper_spool.frame import PAYLOAD_BYTES_MAX
from verl_shipper_spool.header import BULK, HEADER_NAME, decode_header
from verl_shipper_spool.loss_journal import BALLAST_BYTES, JOURNAL_BYTES, JOURNAL_NAME, read_losses
from verl_shipper_spool.reader import MISSING
from verl_shipper_spool.record import Loss
from verl_shipper_spool.segment import list_segments, segment_name
from verl_shipper_spool.testing import FaultyFiles
from verl_shipper_spool.writer import REOPEN_PAUSE_S, StreamWriter

METRICS = "metrics"


def _writer(spool: Path, files: FaultyFiles | None = None, **options: Any) -> StreamWriter:
    return StreamWriter(str(spool), make_header(), files=files, **options)


def _append(writer: StreamWriter, count: int, record_class: str = METRICS, size_bytes: int = 0) -> list[int]:
    """Append `count` records; returns the numbers of those that were kept."""
    first = writer.records
    return [n for n in range(first, first + count) if writer.append(payload(n, size_bytes), record_class)]


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(seed=1)


# In good times


def test_nothing_is_made_before_the_first_record(tmp_path: Path) -> None:
    writer = _writer(tmp_path / "spool")

    assert writer.records == writer.end_offset == 0
    assert list(tmp_path.iterdir()) == []
    writer.close()


def test_the_first_record_makes_a_folder_with_header_journal_and_segment(tmp_path: Path) -> None:
    writer = _writer(tmp_path / "spool")

    writer.append(payload(0), METRICS)

    folder = Path(writer.folder)
    assert folder == tmp_path / "spool" / writer.header.stream_id
    assert {path.name for path in folder.iterdir()} == {HEADER_NAME, JOURNAL_NAME, segment_name(0, 0)}
    assert decode_header((folder / HEADER_NAME).read_bytes()) == writer.header
    assert (folder / segment_name(0, 0)).read_bytes() == frame(0)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    writer.close()


def test_only_the_scalars_stream_holds_a_reserve(tmp_path: Path) -> None:
    for stream_class, size_bytes in (("scalars", JOURNAL_BYTES + BALLAST_BYTES), ("bulk", JOURNAL_BYTES)):
        writer = StreamWriter(str(tmp_path), make_header(stream_class))
        writer.append(payload(0), METRICS)

        assert os.path.getsize(os.path.join(writer.folder, JOURNAL_NAME)) == size_bytes
        writer.close()


def test_a_record_is_one_write_and_no_fsync(tmp_path: Path) -> None:
    class Counting(FaultyFiles):
        def __init__(self) -> None:
            super().__init__(seed=1)
            self.calls: list[str] = []

        def write(self, fd: int, data: bytes) -> int:
            self.calls.append("write")
            return super().write(fd, data)

        def sync(self, fd: int) -> None:
            self.calls.append("sync")
            super().sync(fd)

        def sync_file(self, path: str) -> None:
            self.calls.append("sync")
            super().sync_file(path)

        def sync_folder(self, path: str) -> None:
            self.calls.append("sync")
            super().sync_folder(path)

        def replace(self, path: str, content: bytes, *, durable: bool = True) -> None:
            assert not durable, "even the first record waits for no disk"
            super().replace(path, content, durable=durable)

    files = Counting()
    writer = _writer(tmp_path, files)

    _append(writer, 10)

    assert files.calls == ["write"] * 10
    writer.close()


def test_records_come_back_as_they_were_offered(tmp_path: Path) -> None:
    writer = _writer(tmp_path, segment_bytes_max=500)

    kept = _append(writer, 100)

    found = read_all(writer.folder)
    assert kept == found.numbers == list(range(100))
    assert (found.end, found.ledger.dropped, found.damages, found.gaps) == (writer.end_offset, {}, [], [])
    assert (writer.records, writer.lost_records, writer.last_error) == (100, 0, "")
    writer.close()


def test_a_segment_ends_with_the_first_frame_that_reaches_the_limit(tmp_path: Path) -> None:
    writer = _writer(tmp_path, segment_bytes_max=len(frame(0)) + 1)

    _append(writer, 5)

    names = [os.path.basename(segment.path) for segment in writer.segments]
    ends = list(itertools.accumulate((len(frame(n)) for n in range(5)), initial=0))
    assert names == [segment_name(0, 0), segment_name(ends[2], 2), segment_name(ends[4], 4)]
    assert [(one.end_offset, one.end_ordinal) for one in writer.segments] == [(ends[2], 2), (ends[4], 4), (None, None)]
    assert writer.sealed_bytes == ends[4]
    writer.close()


def test_another_class_begins_another_segment(tmp_path: Path) -> None:
    writer = _writer(tmp_path)

    for record_class in ("generations", "generations", "span", "generations"):
        _append(writer, 1, record_class)

    assert [segment.record_class for segment in writer.segments] == ["generations", "span", "generations"]
    assert read_all(writer.folder).numbers == [0, 1, 2, 3]
    writer.close()


def test_who_asked_is_told_of_every_roll(tmp_path: Path) -> None:
    rolls: list[int] = []
    writer = StreamWriter(
        str(tmp_path), make_header(), segment_bytes_max=100, on_roll=lambda: rolls.append(writer.sealed_bytes)
    )

    _append(writer, 10)

    assert len(rolls) == len(writer.segments)
    assert rolls == sorted(rolls)
    writer.close()


def test_an_append_after_close_goes_on_in_a_new_segment(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    _append(writer, 3)

    writer.close()
    writer.close()
    _append(writer, 3)

    assert [segment.first_ordinal for segment in writer.segments] == [0, 3]
    assert read_all(writer.folder).numbers == list(range(6))
    writer.close()


def test_a_fork_child_lets_go_without_touching_its_parents_stream(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    _append(writer, 3)

    pid = os.fork()
    if pid == 0:
        writer.abandon()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    _append(writer, 3)

    assert read_all(writer.folder).numbers == list(range(6))
    writer.close()


@pytest.mark.parametrize("size_bytes", [0, PAYLOAD_BYTES_MAX + 1])
def test_a_payload_that_is_no_frame_is_dropped_counted_and_declared(tmp_path: Path, size_bytes: int) -> None:
    writer = _writer(tmp_path)

    assert not writer.append(bytes(size_bytes), METRICS)
    assert writer.append(payload(1), METRICS)

    found = read_all(writer.folder)
    assert (found.numbers, found.ledger.dropped, writer.lost_records) == ([1], {"too_large": 1}, 1)
    writer.close()


# Room


def test_what_is_safe_elsewhere_is_forgotten(tmp_path: Path) -> None:
    writer = _writer(tmp_path, segment_bytes_max=100)
    _append(writer, 10)
    first = writer.segments[0]

    writer.forget(first)

    assert first not in writer.segments
    assert not os.path.exists(first.path)
    assert writer.lost_records == 0
    writer.close()


def test_the_oldest_segment_of_a_class_is_shed_and_declared(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    for record_class, count in (("span", 3), ("generations", 4), ("span", 5), ("generations", 1)):
        _append(writer, count, record_class)

    assert writer.shed_oldest("generations", "quota") == 4
    assert writer.shed_oldest("text", "quota") == 0
    assert writer.shed_oldest("generations", "quota") == 0, "the segment being written stays"
    _append(writer, 1, "generations")

    found = read_all(writer.folder)
    assert found.numbers == [0, 1, 2, *range(7, 14)]
    assert (found.ledger.dropped, writer.lost_records) == ({"quota": 4}, 4)
    writer.close()


def test_without_a_class_the_oldest_of_all_is_shed(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    for record_class in ("span", "generations", "span"):
        _append(writer, 2, record_class)

    assert [writer.shed_oldest(None, "quota") for _ in range(3)] == [2, 2, 0]
    assert writer.declare_losses()

    found = read_all(writer.folder)
    assert (found.numbers, found.ledger.dropped) == ([4, 5], {"quota": 4})
    writer.close()


def test_records_lost_before_their_segment_was_shed_are_lost_once(tmp_path: Path, files: FaultyFiles) -> None:
    writer = _writer(tmp_path, files)
    _append(writer, 2, "span")
    files.full = True
    _append(writer, 3, "span")
    files.full = False
    _append(writer, 2, "span")
    _append(writer, 1, "generations")

    assert writer.shed_oldest("span", "quota") == 7
    _append(writer, 1, "generations")

    found = read_all(writer.folder)
    assert (writer.records, writer.lost_records) == (9, 7)
    assert (found.numbers, found.ledger.dropped) == ([7, 8], {"quota": 7})
    writer.close()


def test_a_loss_keeps_its_reason_when_the_segment_that_told_it_is_shed_too(tmp_path: Path) -> None:
    writer = _writer(tmp_path, segment_bytes_max=300)

    # No daemon for a long time: the quota sheds a segment at every roll, and later those with the loss frames.
    for _ in range(40):
        _append(writer, 10)
        writer.shed_oldest(None, "quota")
    _append(writer, 1)

    found = read_all(writer.folder)
    assert found.ledger.dropped == {"quota": writer.lost_records}
    assert found.ledger.seen == writer.records - writer.lost_records
    writer.close()


# Full disks


def test_records_that_find_no_room_are_counted_and_declared_when_room_returns(
    tmp_path: Path, files: FaultyFiles
) -> None:
    writer = _writer(tmp_path, files)
    kept = _append(writer, 5)

    files.full = True
    kept += _append(writer, 7)
    assert read_losses(writer.folder) == [Loss(5, 12, METRICS, "disk_full")]
    assert "No space left" in writer.last_error
    files.full = False
    kept += _append(writer, 5)

    found = read_all(writer.folder)
    assert kept == found.numbers == [*range(5), *range(12, 17)]
    assert found.ledger.dropped == {"disk_full": 7}
    assert read_losses(writer.folder) == []
    writer.close()


def test_losses_are_declared_without_another_record_when_asked(tmp_path: Path, files: FaultyFiles) -> None:
    writer = _writer(tmp_path, files)
    assert writer.declare_losses()
    _append(writer, 1)
    files.full = True
    _append(writer, 2)

    assert not writer.declare_losses()
    files.full = False
    assert writer.declare_losses()

    found = read_all(writer.folder)
    assert (found.ledger.ordinal, found.ledger.dropped) == (3, {"disk_full": 2})
    writer.close()


def test_a_short_write_is_cut_back_to_the_last_good_offset(tmp_path: Path) -> None:
    for seed in range(20):
        print(f"seed {seed}")
        files = FaultyFiles(seed)
        writer = _writer(tmp_path, files)
        _append(writer, 2)
        good = writer.end_offset

        files.short_writes_next = 1
        assert _append(writer, 1) == []
        assert os.path.getsize(writer.segments[0].path) == writer.end_offset == good
        files.short_writes_next = 1  # this time in the middle of the declaration
        files.full = True
        _append(writer, 1)
        assert os.path.getsize(writer.segments[0].path) == writer.end_offset == good
        files.full = False
        _append(writer, 1)

        found = read_all(writer.folder)
        assert (found.numbers, found.damages, found.ledger.dropped) == ([0, 1, 4], [], {"disk_full": 2})
        writer.close()


def test_torn_bytes_that_cannot_be_cut_are_damage_and_cost_nothing_more(tmp_path: Path) -> None:
    for seed in range(10):
        print(f"seed {seed}")
        files = FaultyFiles(seed)
        writer = _writer(tmp_path, files, segment_bytes_max=300)
        files.truncate_fails = True

        kept: list[int] = []
        for _ in range(10):
            kept += _append(writer, 3)
            files.short_writes_next = files.random.randint(0, 2)
            kept += _append(writer, 2)
        files.short_writes_next = 0
        kept += _append(writer, 1)

        found = read_all(writer.folder)
        assert found.numbers == kept
        assert (found.end, found.gaps) == (writer.end_offset, [])
        assert found.ledger.dropped == {"disk_full": writer.lost_records}
        writer.close()


def test_another_error_of_the_disk_has_its_own_reason(tmp_path: Path, files: FaultyFiles) -> None:
    writer = _writer(tmp_path, files)
    _append(writer, 1)

    def fail(_fd: int, _data: bytes) -> int:
        raise OSError(errno.EIO, "Input/output error")

    writer._write = fail
    _append(writer, 2)
    writer._write = files.write
    _append(writer, 1)

    assert read_all(writer.folder).ledger.dropped == {"disk_error": 2}
    writer.close()


def test_a_spool_that_cannot_be_made_costs_records_until_it_can(
    tmp_path: Path, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    writer = _writer(tmp_path, files)
    files.full = True
    assert _append(writer, 3) == []
    assert "No space left" in writer.last_error

    files.full = False
    assert _append(writer, 2) == [], "tried again every second only"
    now_s[0] += REOPEN_PAUSE_S
    assert _append(writer, 2) == [5, 6]

    found = read_all(writer.folder)
    assert (found.numbers, found.ledger.dropped) == ([5, 6], {"spool_unavailable": 5})
    writer.close()


def test_a_segment_that_cannot_be_begun_goes_on_in_the_old_one(tmp_path: Path, files: FaultyFiles) -> None:
    writer = _writer(tmp_path, files, segment_bytes_max=200)
    _append(writer, 1)
    create = files.create

    def refuse(path: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files", path)

    files.create = refuse  # type: ignore[method-assign]
    kept = [0, *_append(writer, 20), *_append(writer, 5, "text")]
    assert len(writer.segments) == 1
    files.create = create  # type: ignore[method-assign]
    kept += _append(writer, 1, "other")
    kept += _append(writer, 1, METRICS)

    assert kept == read_all(writer.folder).numbers == list(range(28))
    assert len(writer.segments) == 3
    writer.close()


def test_a_folder_that_was_removed_is_begun_again_with_a_gap(tmp_path: Path) -> None:
    writer = _writer(tmp_path, segment_bytes_max=200)
    _append(writer, 5)
    shutil.rmtree(writer.folder)

    kept = _append(writer, 20)

    found = read_all(writer.folder)
    kept = [number for number in kept if number >= found.numbers[0]]
    assert found.numbers == kept
    assert found.gaps
    assert found.ledger.dropped == {MISSING: found.numbers[0]}
    assert decode_header(Path(writer.folder, HEADER_NAME).read_bytes()) == writer.header
    writer.close()


def test_on_a_real_full_disk_numbers_are_exact_and_the_reserve_takes_the_last_record(tight_disk: Path) -> None:
    writer = _writer(tight_disk)

    kept = _append(writer, 2000, size_bytes=1000)
    lost = 2000 - len(kept)
    assert lost > 500
    assert read_losses(writer.folder)[0].count <= lost
    fill(tight_disk / "filling")
    assert not writer.append(payload(2000), METRICS)

    writer.use_reserve()
    assert writer.append(payload(2001, size_bytes=20_000), METRICS)

    found = read_all(writer.folder)
    assert found.numbers == [*kept, 2001]
    assert (found.damages, found.ledger.dropped) == ([], {"disk_full": lost + 1})
    writer.close()


# Power


def test_what_was_synced_survives_a_power_cut_with_its_names(tmp_path: Path, files: FaultyFiles) -> None:
    writer = _writer(tmp_path, files, segment_bytes_max=200)
    _append(writer, 20)

    writer.sync()
    _append(writer, 3)
    writer.close()
    files.power_cut(str(tmp_path), nul_tail=True)

    found = read_all(writer.folder)
    assert found.numbers[:20] == list(range(20))
    assert decode_header(Path(writer.folder, HEADER_NAME).read_bytes()) == writer.header


def test_a_header_that_was_never_synced_is_empty_after_a_power_cut(tmp_path: Path, files: FaultyFiles) -> None:
    writer = _writer(tmp_path, files)
    _append(writer, 1)
    writer.close()

    files.power_cut(str(tmp_path), nul_tail=False)

    assert {path.name: path.read_bytes() for path in Path(writer.folder).iterdir()} == {HEADER_NAME: b""}


def test_a_sync_touches_each_full_segment_once(tmp_path: Path) -> None:
    synced: list[str] = []

    class Listening(FaultyFiles):
        def sync_file(self, path: str) -> None:
            synced.append(os.path.basename(path))
            super().sync_file(path)

    writer = _writer(tmp_path, Listening(seed=1), segment_bytes_max=200)
    writer.sync()
    _append(writer, 12)
    names = [os.path.basename(segment.path) for segment in writer.segments]

    writer.sync()
    assert synced == [*names, HEADER_NAME]
    synced.clear()
    writer.sync()
    assert synced == names[-1:]
    writer.close()


def test_a_segment_shed_before_it_was_synced_is_no_trouble(tmp_path: Path) -> None:
    writer = _writer(tmp_path, segment_bytes_max=200)
    _append(writer, 12)
    writer.shed_oldest(None, "quota")

    writer.sync()

    assert writer.last_error == ""
    writer.close()


def test_names_on_disk_are_the_writers_segments(tmp_path: Path, files: FaultyFiles) -> None:
    writer = StreamWriter(str(tmp_path), make_header(BULK), files=files, segment_bytes_max=200)
    _append(writer, 30)
    writer.shed_oldest(None, "quota")

    assert [one.path for one in list_segments(files, writer.folder)] == [one.path for one in writer.segments]
    writer.close()
