"""The loss journal: exact numbers on a full disk, ranges that are joined, and damage."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.streams import fill
from verl_shipper_spool.loss_journal import BALLAST_BYTES, JOURNAL_BYTES, RANGES_MAX, LossJournal, read_losses
from verl_shipper_spool.record import Loss
from verl_shipper_spool.testing import FaultyFiles


def _open(folder: Path, ballast_bytes: int = 0) -> LossJournal:
    journal = LossJournal(str(folder), ballast_bytes=ballast_bytes)
    journal.open()
    return journal


def _loss(first: int, end: int, reason: str = "disk_full") -> Loss:
    return Loss(first, end, "metrics", reason)


def test_a_journal_is_laid_out_as_the_table_says(tmp_path: Path) -> None:
    _open(tmp_path).add(_loss(3, 5))

    content = (tmp_path / "losses").read_bytes()
    packed = msgpack.packb([[3, 5, "metrics", "disk_full"]])
    crc = zlib.crc32(struct.pack("<I", len(packed)) + packed)
    assert content == (b"vsLJ" + struct.pack("<II", crc, len(packed)) + packed).ljust(JOURNAL_BYTES, b"\0")


def test_what_was_added_is_read_after_the_writers_death(tmp_path: Path) -> None:
    journal = _open(tmp_path)
    assert read_losses(str(tmp_path)) == []

    journal.add(_loss(3, 4))
    journal.add(_loss(4, 5))
    journal.add(_loss(9, 10, "quota"))

    assert read_losses(str(tmp_path)) == journal.pending == [_loss(3, 5), _loss(9, 10, "quota")]


def test_declared_losses_leave_the_journal_and_undeclared_ones_stay(tmp_path: Path) -> None:
    journal = _open(tmp_path)
    journal.add(_loss(1, 3))

    taken = journal.take()
    journal.add(_loss(5, 6))
    journal.settle(taken, declared=False)
    assert read_losses(str(tmp_path)) == [_loss(1, 3), _loss(5, 6)]

    taken = journal.take()
    journal.add(_loss(8, 9))
    journal.settle(taken, declared=True)
    assert read_losses(str(tmp_path)) == [_loss(8, 9)]


def test_ranges_are_in_order_whatever_the_order_of_the_losses(tmp_path: Path) -> None:
    journal = _open(tmp_path)

    journal.add(_loss(100, 101))
    journal.add(_loss(0, 50, "quota"))
    journal.add(_loss(7 * 10, 80))

    assert read_losses(str(tmp_path)) == [_loss(0, 50, "quota"), _loss(70, 80), _loss(100, 101)]


def test_a_record_is_lost_once_and_for_its_first_reason(tmp_path: Path) -> None:
    journal = _open(tmp_path)
    journal.add(_loss(3, 5))
    journal.add(_loss(7, 8))

    journal.add(_loss(0, 10, "quota"))

    assert journal.pending == [
        _loss(0, 3, "quota"),
        _loss(3, 5),
        _loss(5, 7, "quota"),
        _loss(7, 8),
        _loss(8, 10, "quota"),
    ]


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9), st.sampled_from("abc" * 3 + "d")), max_size=120))
@settings(print_blob=True, deadline=None)
def test_sums_are_exact_however_many_ranges_pile_up(losses: list[tuple[int, int, str]]) -> None:
    journal = LossJournal("/nowhere")
    lost: set[int] = set()

    for first, count, reason in losses:
        ordinals = set(range(first, first + count))
        if ordinals & lost:
            continue  # joined ranges have moved: a writer never loses a record twice
        lost |= ordinals
        journal.add(Loss(first, first + count, "metrics", reason))

        starts = [loss.first for loss in journal.pending]
        assert starts == sorted(starts)
        assert all(one.end <= two.first for one, two in zip(journal.pending, journal.pending[1:], strict=False))
        assert len(journal.pending) <= RANGES_MAX
        assert all(loss.first >= 0 for loss in journal.pending)
    if len(losses) <= RANGES_MAX:
        assert {ordinal for loss in journal.pending for ordinal in range(loss.first, loss.end)} == lost


def test_forty_ranges_and_more_keep_the_sum(tmp_path: Path) -> None:
    journal = _open(tmp_path)

    for index in range(500):
        journal.add(_loss(3 * index, 3 * index + 2, f"reason {index % 7}"))

    read = read_losses(str(tmp_path))
    assert len(read) == RANGES_MAX
    assert sum(loss.count for loss in read) == 1000


def test_reasons_too_long_for_the_journal_are_joined_until_they_fit(tmp_path: Path) -> None:
    journal = _open(tmp_path)

    for index in range(30):
        journal.add(_loss(2 * index, 2 * index + 1, f"{index}" * 150))

    assert sum(loss.count for loss in read_losses(str(tmp_path))) == 30


def test_a_full_disk_cannot_stop_the_journal(tight_disk: Path) -> None:
    journal = _open(tight_disk, BALLAST_BYTES)
    fill(tight_disk / "filling")

    journal.add(_loss(0, 1000))
    journal.close()

    assert read_losses(str(tight_disk)) == [_loss(0, 1000)]


def test_the_ballast_is_room_for_somebody_else(tight_disk: Path) -> None:
    journal = _open(tight_disk, BALLAST_BYTES)
    fill(tight_disk / "filling")

    journal.drop_ballast()

    (tight_disk / "last").write_bytes(bytes(BALLAST_BYTES))
    journal.add(_loss(0, 7))
    journal.close()
    assert read_losses(str(tight_disk)) == [_loss(0, 7)]


def test_a_disk_without_room_for_ballast_gets_a_journal_alone(tight_disk: Path) -> None:
    fill(tight_disk / "filling")
    os.truncate(tight_disk / "filling", os.path.getsize(tight_disk / "filling") - 8192)

    journal = _open(tight_disk, BALLAST_BYTES)
    journal.add(_loss(0, 7))
    journal.close()

    assert read_losses(str(tight_disk)) == [_loss(0, 7)]


def test_without_a_journal_losses_stay_in_memory(tmp_path: Path) -> None:
    files = FaultyFiles(seed=1)
    files.full = True
    journal = LossJournal(str(tmp_path), files=files)

    with pytest.raises(OSError, match="No space left"):
        journal.open()
    journal.add(_loss(0, 7))
    journal.drop_ballast()
    journal.close()

    assert journal.pending == [_loss(0, 7)]
    assert read_losses(str(tmp_path)) == []


def test_a_journal_that_opens_late_holds_what_was_lost_before(tmp_path: Path) -> None:
    journal = LossJournal(str(tmp_path))
    journal.add(_loss(0, 7))

    journal.open()

    assert read_losses(str(tmp_path)) == [_loss(0, 7)]


def test_a_damaged_journal_is_empty_never_an_error(tmp_path: Path) -> None:
    _open(tmp_path).add(_loss(3, 5))
    path = tmp_path / "losses"
    content = path.read_bytes()
    used = len(content.rstrip(b"\0"))

    for cut in range(used):
        path.write_bytes(content[:cut])
        assert read_losses(str(tmp_path)) == []
    for place in range(used):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert read_losses(str(tmp_path)) == []
    for other in (bytes(JOURNAL_BYTES), b"", b"\xff" * 100):
        path.write_bytes(other)
        assert read_losses(str(tmp_path)) == []


@pytest.mark.parametrize("value", [None, 7, [1], [[1, 2]], [[2, 1, "a", "b"]], [["x", "y", "a", "b"]]])
def test_a_journal_of_something_else_is_empty(tmp_path: Path, value: object) -> None:
    packed = msgpack.packb(value)
    crc = zlib.crc32(struct.pack("<I", len(packed)) + packed)
    (tmp_path / "losses").write_bytes(b"vsLJ" + struct.pack("<II", crc, len(packed)) + packed)

    assert read_losses(str(tmp_path)) == []


def test_no_journal_is_no_loss(tmp_path: Path) -> None:
    assert read_losses(str(tmp_path)) == []
    (tmp_path / "losses").mkdir()
    assert read_losses(str(tmp_path)) == []
