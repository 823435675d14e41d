"""Reading a stream: every recovery case, and the account of what is missing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.streams import Folder, assert_law, frame, loss_frame, payload, read_all
from verl_shipper_spool.frame import PAYLOAD_BYTES_MAX, Kind, encode
from verl_shipper_spool.loss_journal import LossJournal
from verl_shipper_spool.reader import (
    DAMAGED,
    FRAME_BYTES_MAX,
    MISSING,
    Damage,
    Finding,
    Frame,
    Gap,
    Ledger,
    StreamReader,
)
from verl_shipper_spool.record import Loss
from verl_shipper_spool.segment import segment_name
from verl_shipper_spool.testing import FaultyFiles


def _frame(number: int, end: int = 0) -> Frame:
    return Frame(Kind.RECORD, number, payload(number), end)


def _loss(ordinal: int, loss: Loss) -> Frame:
    made = loss_frame(ordinal, loss)
    return Frame(Kind.LOSS, ordinal, made[20:], 0)


def _size(paths: list[str]) -> int:
    return sum(os.path.getsize(path) for path in paths)


# The stream and its cursor


def test_an_empty_stream_has_nothing_yet(tmp_path: Path) -> None:
    reader = StreamReader(Folder(tmp_path).path)

    assert reader.read(0) == reader.read(0, final=True) == ([], 0)
    assert reader.end_offset() == 0


def test_a_cursor_goes_on_where_the_last_reading_ended(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(frame(0) + frame(1), 0)
    reader = StreamReader(folder.path)

    found, end = reader.read(0)
    folder.add(frame(2), 2)

    assert [item.end for item in found if isinstance(item, Frame)] == [len(frame(0)), end]
    assert reader.read(end) == ([_frame(2, end + len(frame(2)))], end + len(frame(2)))
    assert StreamReader(folder.path).end_offset() == end + len(frame(2))


def test_a_reader_meets_every_cursor_between_two_frames(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for first in (0, 3, 6):
        folder.add_records(first, 3)

    ends = [item.end for item in read_all(folder.path).findings if isinstance(item, Frame)]

    for index, end in enumerate(ends[:-1]):
        findings = list(StreamReader(folder.path).frames(end))
        assert findings == [_frame(number, ends[number]) for number in range(index + 1, 9)]


@pytest.mark.parametrize("bytes_max", [1, 21, 50, 64, 1000])
def test_a_budget_smaller_than_a_frame_still_reads_it(tmp_path: Path, bytes_max: int) -> None:
    folder = Folder(tmp_path)
    folder.add_records(0, 5)
    folder.add_records(5, 5)

    found = read_all(folder.path, bytes_max=bytes_max)

    assert (found.numbers, found.damages, found.gaps) == (list(range(10)), [], [])


@pytest.mark.parametrize("bytes_max", [100, 1024 * 1024])
def test_a_frame_larger_than_any_usual_reading_is_read(tmp_path: Path, bytes_max: int) -> None:
    folder = Folder(tmp_path)
    folder.add(frame(0) + frame(1, 3 * 1024 * 1024) + frame(2), 0)
    folder.add(frame(3) + encode(payload(4), 4), 3)

    found = read_all(folder.path, bytes_max=bytes_max)

    assert (found.numbers, found.damages) == ([0, 1, 2, 3, 4], [])


def test_the_largest_frame_is_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(encode(bytes(PAYLOAD_BYTES_MAX), 0) + frame(1), 0)

    found, _ = StreamReader(folder.path).read(0)

    assert [item.ordinal for item in found if isinstance(item, Frame)] == [0, 1]


def test_nothing_at_or_behind_the_limit_is_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(frame(0) + frame(1), 0)
    folder.add(frame(2), 2)
    one, two, all_ = len(frame(0)), len(frame(0) + frame(1)), len(frame(0) + frame(1) + frame(2))

    for until in range(all_ + 1):
        reader = StreamReader(folder.path)
        offset, numbers = 0, []
        for _ in range(4):
            found, offset = reader.read(offset, until=until, final=True)
            assert all(isinstance(item, Frame) for item in found)
            numbers += [item.ordinal for item in found if isinstance(item, Frame)]

        whole = [end for end in (one, two, all_) if end <= until]
        assert (numbers, offset) == (list(range(len(whole))), max(whole, default=0))


# Recovery cases of spool/README.md


def test_a_tail_torn_at_any_byte_waits_and_is_damage_once_the_writer_is_gone(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    path = folder.add(frame(0) + frame(1), 0)
    good = len(frame(0))

    for size in range(good + len(frame(1)) - 1, good, -1):
        os.truncate(path, size)
        alive, dead = read_all(folder.path, final=False), read_all(folder.path)

        assert (alive.numbers, alive.damages, alive.end) == ([0], [], good)
        assert (dead.numbers, dead.damages, dead.end) == ([0], [Damage(good, size)], size)


def test_a_torn_tail_with_a_segment_behind_it_is_damage_with_a_number(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(frame(0) + frame(1)[:-1], 0)
    folder.add(frame(2), 2)

    found = read_all(folder.path, final=False)

    assert found.numbers == [0, 2]
    assert found.damages == [Damage(len(frame(0)), len(frame(0) + frame(1)) - 1)]
    assert found.ledger.dropped == {DAMAGED: 1}


def test_a_torn_segment_cut_after_the_next_began_is_damage_and_a_gap(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    path = folder.add(frame(0) + frame(1) + frame(2), 0)
    folder.add(frame(3), 3)
    cut, end = len(frame(0)) + 5, len(frame(0) + frame(1) + frame(2))
    os.truncate(path, cut)

    found = read_all(folder.path)

    assert (found.damages, found.gaps) == ([Damage(len(frame(0)), cut)], [Gap(cut, end)])
    assert (found.numbers, found.ledger.dropped) == ([0, 3], {DAMAGED: 2})


def test_any_flipped_byte_in_the_middle_costs_its_own_record_only(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    content = frame(0) + frame(1) + frame(2)
    path = folder.add(content, 0)

    for place in range(len(frame(0)), len(frame(0) + frame(1))):
        with open(path, "wb") as file:
            file.write(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        found = read_all(folder.path)

        assert (found.numbers, found.ledger.dropped) == ([0, 2], {DAMAGED: 1})
        assert found.damages == [Damage(len(frame(0)), len(frame(0) + frame(1)))]


@pytest.mark.parametrize("size_bytes", [1, 20, 4096, 3_000_000])
def test_a_zero_filled_tail_is_like_a_torn_one(tmp_path: Path, size_bytes: int) -> None:
    folder = Folder(tmp_path)
    folder.add(frame(0) + bytes(size_bytes), 0)
    good = len(frame(0))

    alive, dead = read_all(folder.path, final=False), read_all(folder.path)

    assert (alive.numbers, alive.damages) == ([0], [])
    assert (dead.numbers, dead.damages) == ([0], [Damage(good, good + size_bytes)])
    assert dead.ledger.ordinal == 1


def test_damage_larger_than_any_frame_is_passed_in_steps(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    size_bytes = 3 * FRAME_BYTES_MAX
    path = folder.add(frame(0), 0)
    os.truncate(path, size_bytes)
    with open(path, "ab") as file:
        file.write(frame(1))

    found = read_all(folder.path)

    assert found.numbers == [0, 1]
    assert sum(item.end - item.start for item in found.damages) == size_bytes - len(frame(0))
    assert found.ledger.dropped == {}


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_segment_is_an_exact_gap(tmp_path: Path, missing: int) -> None:
    folder = Folder(tmp_path)
    for first in (0, 10, 20, 30):
        folder.add_records(first, 10)
    ends = [0]
    for path in folder.segments:
        ends.append(ends[-1] + os.path.getsize(path))
    os.unlink(folder.segments[missing])

    found = read_all(folder.path, final=False)

    lost = range(missing * 10, missing * 10 + 10)
    assert found.numbers == [number for number in range(40) if number not in lost]
    assert found.gaps == [Gap(ends[missing], ends[missing + 1])]
    assert found.ledger.dropped == {MISSING: 10}


def test_a_missing_last_segment_is_waited_for(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add_records(0, 10)
    os.unlink(folder.add_records(10, 10))

    assert read_all(folder.path).numbers == list(range(10))


def test_a_segment_that_vanishes_while_it_is_read_is_a_gap(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for first in (0, 10, 20):
        folder.add_records(first, 10)
    reader = StreamReader(folder.path)
    _, end = reader.read(0)

    os.unlink(folder.segments[1])
    found, end = reader.read(end)

    assert [type(item) for item in found] == [Gap]
    assert reader.read(end)[0][0] == _frame(20, end + len(frame(20)))


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_an_unreadable_segment_is_an_exact_gap(tmp_path: Path, code: int) -> None:
    files = FaultyFiles(seed=1)
    folder = Folder(tmp_path)
    for first in (0, 10, 20):
        folder.add_records(first, 10)
    files.read_errors[folder.segments[1]] = code

    found = read_all(folder.path, files=files, final=False)

    assert found.numbers == [*range(10), *range(20, 30)]
    assert found.ledger.dropped == {MISSING: 10}
    assert [gap.end - gap.start for gap in found.gaps] == [os.path.getsize(folder.segments[1])]


def test_an_unreadable_last_segment_is_a_gap_once_the_writer_is_gone(tmp_path: Path) -> None:
    files = FaultyFiles(seed=1)
    folder = Folder(tmp_path)
    folder.add_records(0, 10)
    last = folder.add_records(10, 10)
    files.read_errors[last] = errno.EIO

    assert read_all(folder.path, files=files, final=False).gaps == []
    assert [gap.end - gap.start for gap in read_all(folder.path, files=files).gaps] == [os.path.getsize(last)]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_folder_in_a_segments_place_is_a_gap(tmp_path: Path, index: int) -> None:
    folder = Folder(tmp_path)
    for first in (0, 10, 20):
        folder.add_records(first, 10)
    os.unlink(folder.segments[index])
    os.mkdir(folder.segments[index])

    found = read_all(folder.path)

    kept = [number for number in range(30) if number // 10 != index]
    assert found.numbers == kept
    assert len(found.gaps) == (index < 2)
    assert found.ledger.dropped == ({MISSING: 10} if index < 2 else {})
    assert StreamReader(folder.path).end_offset() == (found.end if index < 2 else _size(folder.segments[:2]))


def test_a_reader_without_descriptors_sees_an_error_and_no_gap(tmp_path: Path) -> None:
    files = FaultyFiles(seed=1)
    folder = Folder(tmp_path)
    for first in (0, 10):
        folder.add_records(first, 10)
    files.read_errors[folder.segments[0]] = errno.EMFILE

    with pytest.raises(OSError, match="Too many open files"):
        read_all(folder.path, files=files)
    files.read_errors.clear()

    assert read_all(folder.path, files=files).numbers == list(range(20))


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        StreamReader(str(tmp_path / "none")).read(0)


def test_the_same_bytes_twice_count_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(frame(0) + frame(1), 0)
    folder.add(frame(0) + frame(1) + frame(2), 0)

    found = read_all(folder.path)

    assert (found.ledger.ordinal, found.ledger.seen, found.ledger.dropped) == (3, 3, {})


def test_bytes_of_a_segment_behind_the_next_ones_beginning_do_not_count(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    first = folder.add(frame(0), 0)
    folder.add(frame(1), 1)
    with open(first, "ab") as file:
        file.write(frame(1) + frame(2))

    assert read_all(folder.path).numbers == [0, 1]


def test_of_two_segments_at_one_offset_the_later_ordinal_is_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    Path(folder.path, segment_name(0, 0)).write_bytes(b"")
    Path(folder.path, segment_name(0, 1)).write_bytes(frame(1))

    found = read_all(folder.path)

    assert (found.numbers, found.ledger.dropped) == ([1], {MISSING: 1})


# The account


def test_records_in_the_order_of_a_signal_handler_are_all_there(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(frame(0) + frame(3) + frame(2) + frame(1) + frame(4), 0)

    found = read_all(folder.path)

    assert found.numbers == [0, 3, 2, 1, 4]
    assert (found.ledger.ordinal, found.ledger.seen, found.ledger.dropped) == (5, 5, {})


def test_a_loss_frame_gives_missing_records_their_reason(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(frame(0) + loss_frame(5, Loss(1, 5, "metrics", "disk_full")) + frame(5), 0)

    found = read_all(folder.path)

    assert (found.numbers, found.ledger.dropped) == ([0, 5], {"disk_full": 4})


def test_a_loss_frame_says_so_even_when_no_record_follows() -> None:
    ledger = Ledger()

    ledger.account(_loss(4, Loss(0, 4, "span", "quota")))

    assert (ledger.ordinal, ledger.dropped) == (4, {"quota": 4})


def test_a_loss_declared_late_renames_what_was_taken_for_missing() -> None:
    ledger = Ledger()

    for item in (_frame(0), Gap(10, 20), _frame(6), _loss(7, Loss(1, 6, "span", "quota")), _frame(7)):
        ledger.account(item)

    assert (ledger.seen, ledger.dropped) == (3, {"quota": 5})


def test_a_loss_explains_the_torn_bytes_it_left() -> None:
    ledger = Ledger()

    for item in (Damage(0, 9), _loss(3, Loss(1, 3, "metrics", "disk_full")), _frame(3)):
        ledger.account(item)

    assert (ledger.seen, ledger.dropped) == (1, {"disk_full": 2, DAMAGED: 1})


def test_a_loss_that_was_named_already_changes_nothing() -> None:
    ledger = Ledger()
    loss = Loss(0, 4, "metrics", "disk_full")

    ledger.account(_loss(4, loss))
    ledger.name(loss)

    assert (ledger.ordinal, ledger.dropped) == (4, {"disk_full": 4})


def test_a_loss_frame_that_cannot_be_read_leaves_its_records_missing() -> None:
    ledger = Ledger()

    ledger.account(Frame(Kind.LOSS, 3, b"\xc1", 0))

    assert (ledger.ordinal, ledger.dropped) == (3, {MISSING: 3})


def test_a_dead_writers_journal_adds_what_the_stream_does_not_tell(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add_records(0, 2)
    journal = LossJournal(folder.path)
    journal.open()
    journal.add(Loss(2, 9, "metrics", "disk_full"))
    journal.close()

    found = read_all(folder.path, journal=True)

    assert (found.ledger.ordinal, found.ledger.seen, found.ledger.dropped) == (9, 2, {"disk_full": 7})


def test_account_tells_new_records_from_everything_else() -> None:
    ledger = Ledger()
    stream: list[Finding] = [
        _frame(0),
        _frame(0),
        Damage(0, 1),
        Gap(1, 2),
        _loss(1, Loss(0, 1, "a", "b")),
        _frame(3),
        _frame(2),
    ]

    assert [ledger.account(item) for item in stream] == [True, False, False, False, False, True, True]
    assert ledger.dropped == {MISSING: 1}


_ordinals = st.integers(0, 12)
_findings = st.one_of(
    _ordinals.map(_frame),
    st.builds(Damage, st.just(0), st.just(1)),
    st.builds(Gap, st.just(0), st.just(1)),
    st.builds(
        lambda ordinal, first, count, reason: _loss(ordinal, Loss(first, first + count, "c", reason)),
        _ordinals,
        _ordinals,
        st.integers(1, 9),
        st.sampled_from(["disk_full", "quota", MISSING, DAMAGED]),
    ),
    _ordinals.map(lambda ordinal: Frame(Kind.LOSS, ordinal, b"?", 0)),
)


@given(st.lists(_findings, max_size=30))
@settings(print_blob=True, deadline=None)
def test_every_ordinal_is_seen_or_dropped_after_any_sequence(findings: list[Frame | Damage | Gap]) -> None:
    ledger = Ledger()

    for finding in findings:
        before = ledger.ordinal, ledger.seen
        fresh = ledger.account(finding)

        assert_law(ledger)
        assert ledger.ordinal >= before[0]
        assert ledger.seen == before[1] + fresh
