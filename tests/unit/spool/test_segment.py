"""Segments: names, order, and reading a stream as raw bytes across them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from support.streams import Folder
from verl_shipper_spool.files import RealFiles
from verl_shipper_spool.segment import (
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    RawReader,
    Segment,
    is_our_own_trouble,
    list_segments,
    segment_at,
    segment_bytes_for,
    segment_name,
)
from verl_shipper_spool.testing import FaultyFiles

FAR = 10**9


def _drain(reader: RawReader, until: int, bytes_max: int = FAR) -> list[tuple[int, bytes]]:
    offset = 0
    parts: list[tuple[int, bytes]] = []
    while True:
        start, data = reader.read(offset, bytes_max, until)
        if not data:
            return parts
        parts.append((start, data))
        offset = start + len(data)


def test_a_name_says_where_a_segment_begins_and_how_many_records_came_before() -> None:
    assert segment_name(0x800123, 0x11D7) == "0000000000800123-00000000000011d7.seg"


def test_segments_are_listed_in_order_and_other_names_left_alone(tmp_path: Path) -> None:
    names = [segment_name(256, 9), segment_name(16, 3), segment_name(0, 0), segment_name(16, 2)]
    others = ["stream", "losses", "x.seg", segment_name(1, 1) + ".bad", segment_name(2, 2).upper(), "stream.tmp9"]
    for name in names + others:
        (tmp_path / name).write_bytes(b"")

    found = list_segments(RealFiles(), str(tmp_path))

    assert [(one.first_offset, one.first_ordinal) for one in found] == [(0, 0), (16, 2), (16, 3), (256, 9)]
    assert found[0].path == os.path.join(tmp_path, segment_name(0, 0))


def test_an_offset_belongs_to_the_last_segment_that_begins_at_or_before_it() -> None:
    segments = [Segment(offset, 0, "") for offset in (10, 20, 20, 30)]

    assert [segment_at(segments, offset) for offset in (0, 9, 10, 19, 20, 29, 30, 99)] == [-1, -1, 0, 0, 2, 2, 3, 3]
    assert segment_at([], 5) == -1


def test_a_segment_is_a_small_part_of_a_small_disk(tmp_path: Path, tight_disk: Path) -> None:
    assert segment_bytes_for(str(tight_disk), SEGMENT_BYTES_MAX) == SEGMENT_BYTES_MIN
    assert segment_bytes_for(str(tight_disk), 100) == 100
    assert segment_bytes_for(str(tmp_path), SEGMENT_BYTES_MAX) == SEGMENT_BYTES_MAX
    assert segment_bytes_for(str(tmp_path / "none"), 100) == 100


def test_raw_bytes_come_segment_by_segment_within_the_budget(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(b"abcde", 0)
    folder.add(b"fgh", 2)

    assert _drain(RawReader(RealFiles(), folder.path), FAR) == [(0, b"abcde"), (5, b"fgh")]
    assert _drain(RawReader(RealFiles(), folder.path), 7, 3) == [(0, b"abc"), (3, b"de"), (5, b"fg")]


def test_raw_bytes_at_or_behind_the_limit_are_not_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(b"abcde", 0)
    folder.add(b"fgh", 2)
    reader = RawReader(RealFiles(), folder.path)

    assert reader.read(5, FAR, 5) == (5, b"")
    assert reader.read(0, FAR, 0) == (0, b"")
    assert reader.read(8, FAR, FAR) == (8, b"")


def test_raw_bytes_of_segments_that_come_later_are_seen(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(b"abc", 0)
    reader = RawReader(RealFiles(), folder.path)
    assert reader.read(3, FAR, FAR) == (3, b"")

    folder.add(b"def", 1)

    assert reader.read(3, FAR, FAR) == (3, b"def")


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_segment_is_a_jump_to_the_next(tmp_path: Path, missing: int) -> None:
    folder = Folder(tmp_path)
    for content in (b"abc", b"def", b"ghi"):
        folder.add(content, 0)
    os.unlink(folder.segments[missing])

    parts = _drain(RawReader(RealFiles(), folder.path), FAR)

    assert parts == [part for index, part in enumerate([(0, b"abc"), (3, b"def"), (6, b"ghi")]) if index != missing]


def test_a_segment_that_vanishes_while_it_is_listed_is_a_jump(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for content in (b"abc", b"def", b"ghi"):
        folder.add(content, 0)
    reader = RawReader(RealFiles(), folder.path)
    reader.read(0, FAR, FAR)

    os.unlink(folder.segments[1])

    assert reader.read(3, FAR, FAR) == (6, b"ghi")


def test_a_segment_shorter_than_its_successor_says_is_read_to_its_end(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(b"abcde", 0)
    folder.add(b"fgh", 2)
    os.truncate(folder.segments[0], 2)

    assert _drain(RawReader(RealFiles(), folder.path), FAR) == [(0, b"ab"), (5, b"fgh")]


def test_a_segment_longer_than_its_successor_says_ends_there(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(b"abcde", 0)
    folder.add(b"fgh", 2)
    with open(folder.segments[0], "ab") as file:
        file.write(b"XYZ")

    assert _drain(RawReader(RealFiles(), folder.path), FAR) == [(0, b"abcde"), (5, b"fgh")]


def test_a_folder_or_an_unreadable_file_in_a_segments_place_is_a_jump(tmp_path: Path) -> None:
    files = FaultyFiles(seed=1)
    folder = Folder(tmp_path)
    for content in (b"abc", b"def", b"ghi"):
        folder.add(content, 0)
    os.unlink(folder.segments[0])
    os.mkdir(folder.segments[0])
    files.read_errors[folder.segments[1]] = errno.EIO

    assert _drain(RawReader(files, folder.path), FAR) == [(6, b"ghi")]


def test_a_process_without_descriptors_sees_an_error_and_no_gap(tmp_path: Path) -> None:
    files = FaultyFiles(seed=1)
    folder = Folder(tmp_path)
    for content in (b"abc", b"def"):
        folder.add(content, 0)
    reader = RawReader(files, folder.path)
    files.read_errors[folder.segments[0]] = errno.EMFILE

    with pytest.raises(OSError, match="Too many open files"):
        reader.read(0, FAR, FAR)
    files.read_errors.clear()

    assert _drain(reader, FAR) == [(0, b"abc"), (3, b"def")]


def test_what_is_wrong_with_a_file_is_not_our_own_trouble() -> None:
    assert is_our_own_trouble(OSError(errno.ENFILE, ""))
    assert not is_our_own_trouble(OSError(errno.EACCES, ""))
    assert not is_our_own_trouble(OSError(errno.EIO, ""))


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RawReader(RealFiles(), str(tmp_path / "none")).read(0, 1, 1)
