"""The node's copy of a stream: appended by offset, recovered, sealed once, reclaimed only where nobody needs it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from support.streams import frame, loss_frame, make_header, read_all
from verl_shipper import node_stream
from verl_shipper.node_stream import NodeStream
from verl_shipper_spool.files import RealFiles
from verl_shipper_spool.frame import Kind, encode
from verl_shipper_spool.header import BULK, StreamHeader
from verl_shipper_spool.reader import Frame
from verl_shipper_spool.record import Loss, Record, RecordKind, decode_record, encode_record
from verl_shipper_spool.segment import list_segments


class Files(RealFiles):
    """A disk that fails when told so."""

    def __init__(self) -> None:
        self.write_left = 10**12  # bytes until it is full
        self.sync_fails = self.truncate_fails = False

    def write(self, fd: int, data: bytes) -> int:
        if self.write_left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[: self.write_left]
        self.write_left -= len(part)
        return os.write(fd, part)

    def sync(self, fd: int) -> None:
        if self.sync_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)

    def truncate(self, fd: int, size_bytes: int) -> None:
        if self.truncate_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.ftruncate(fd, size_bytes)


def _make(tmp_path: Path, **changes: Any) -> NodeStream:
    header = make_header(**changes)
    made = NodeStream(header, str(tmp_path / header.stream_id), files=Files())
    made.create()
    return made


def _again(stream: NodeStream) -> NodeStream:
    """The same stream after a restart of the daemon."""
    stream.close()
    fresh = NodeStream(stream.header, stream.folder, files=Files())
    fresh.recover()
    return fresh


def _files(stream: NodeStream) -> Files:
    assert isinstance(stream.files, Files)
    return stream.files


def _content(stream: NodeStream) -> bytes:
    return b"".join(Path(segment.path).read_bytes() for segment in list_segments(RealFiles(), stream.folder))


def _put(stream: NodeStream, *numbers: int, size_bytes: int = 0) -> None:
    content = b"".join(frame(number, size_bytes) for number in numbers)
    assert stream.append(stream.end, content, gap=False)


def _finish(number: int) -> bytes:
    body = {"exit_code": 0, "reason": "finish"}
    return encode(encode_record(Record(RecordKind.RUN_FINISH, number, None, 1, body)), number)


def _records(stream: NodeStream) -> list[Record]:
    found = read_all(stream.folder).findings
    return [decode_record(item.payload) for item in found if isinstance(item, Frame) and item.kind is Kind.RECORD]


# Appending


def test_bytes_are_appended_at_their_offset(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0, 1)
    _put(stream, 2)

    assert _content(stream) == frame(0) + frame(1) + frame(2)
    assert stream.walker.ordinal_next == 3
    assert (stream.end, stream.durable) == (len(_content(stream)), 0)
    stream.sync()
    assert stream.durable == stream.end


def test_what_is_there_already_is_taken_once(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    both = frame(0) + frame(1)
    assert stream.append(0, both, gap=False)
    assert stream.append(0, both, gap=False)
    assert stream.append(5, both[5:], gap=False)
    assert stream.append(0, both + frame(2), gap=False)

    assert _content(stream) == both + frame(2)
    assert stream.walker.ordinal_next == 3


def test_bytes_behind_the_end_are_refused_unless_a_gap_is_told(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0)
    end = stream.end

    assert not stream.append(end + 100, frame(5), gap=False)
    assert stream.end == end
    assert stream.append(end + 100, frame(5), gap=True)

    assert stream.end == end + 100 + len(frame(5))
    found = read_all(stream.folder)
    assert found.numbers == [0, 5]
    assert [(gap.start, gap.end) for gap in found.gaps] == [(end, end + 100)]


def test_cuts_anywhere_give_the_same_stream(tmp_path: Path) -> None:
    content = b"".join(frame(number) for number in range(20))
    stream = _make(tmp_path)
    for start in range(0, len(content), 7):
        assert stream.append(start, content[start : start + 7], gap=False)

    assert _content(stream) == content
    assert stream.walker.ordinal_next == 20
    assert stream.walker.at_boundary


def test_a_full_segment_is_followed_by_another_between_two_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_stream, "SEGMENT_BYTES_MAX", 500)
    stream = _make(tmp_path)
    for number in range(60):
        content = frame(number)
        assert stream.append(stream.end, content[:11], gap=False)
        assert stream.append(stream.end, content[11:], gap=False)

    segments = list_segments(RealFiles(), stream.folder)
    assert len(segments) > 2
    assert read_all(stream.folder).numbers == list(range(60))
    for segment in segments:
        assert Path(segment.path).read_bytes().startswith(b"\xf5vs\x01")


# A failing disk


def test_a_full_disk_leaves_no_half_bytes(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0)
    end = stream.end
    _files(stream).write_left = 10
    with pytest.raises(OSError, match="No space"):
        _put(stream, 1, 2)
    assert (stream.end, _content(stream)) == (end, frame(0))

    _files(stream).write_left = 10**9
    _put(stream, 1, 2)

    assert read_all(stream.folder).numbers == [0, 1, 2]


def test_a_file_that_cannot_be_cut_back_is_left_behind(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0)
    _files(stream).write_left = 10
    _files(stream).truncate_fails = True
    with pytest.raises(OSError, match=r"No space|Input/output"):
        _put(stream, 1)
    _files(stream).write_left = 10**9

    _put(stream, 1, 2)

    assert read_all(stream.folder).numbers == [0, 1, 2]
    assert _again(stream).walker.ordinal_next == 3


def test_after_a_failed_fsync_only_what_was_durable_counts(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0, 1)
    stream.sync()
    durable = stream.durable
    _put(stream, 2, 3)
    _files(stream).sync_fails = True
    with pytest.raises(OSError, match="Input/output"):
        stream.sync()
    _files(stream).sync_fails = False

    stream.distrust()

    assert (stream.end, stream.durable) == (durable, durable)
    assert stream.walker.ordinal_next == 2
    assert not stream.append(durable + 50, frame(4), gap=False)
    _put(stream, 2, 3, 4)
    assert read_all(stream.folder).numbers == [0, 1, 2, 3, 4]


def test_an_fsync_that_fails_at_a_roll_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_stream, "SEGMENT_BYTES_MAX", 80)
    stream = _make(tmp_path)
    _put(stream, 0, 1, 2)
    _files(stream).sync_fails = True
    with pytest.raises(OSError, match="Input/output"):
        _put(stream, 3)
    _files(stream).sync_fails = False

    assert stream.doubtful
    stream.distrust()

    assert (stream.end, stream.durable, stream.doubtful) == (0, 0, False)
    _put(stream, 0, 1, 2, 3)
    assert read_all(stream.folder).numbers == [0, 1, 2, 3]


# Recovery


def test_a_torn_tail_is_cut_and_asked_for_again(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0, 1)
    end = stream.end
    assert stream.append(end, frame(2)[:9], gap=False)

    stream = _again(stream)

    assert (stream.end, stream.durable) == (end, end)
    _put(stream, 2)
    assert read_all(stream.folder).numbers == [0, 1, 2]


@pytest.mark.parametrize(
    "tail", [b"\0" * 5000, b"\xf5vs\x01", b"junk", frame(2)[:-1]], ids=["NULs", "magic", "junk", "torn"]
)
def test_what_power_loss_leaves_behind_is_cut(tmp_path: Path, tail: bytes) -> None:
    stream = _make(tmp_path)
    _put(stream, 0, 1)
    end = stream.end
    stream.close()
    (segment,) = list_segments(RealFiles(), stream.folder)
    with open(segment.path, "ab") as file:
        file.write(tail)

    stream = _again(stream)

    assert stream.end == end
    assert stream.walker.ordinal_next == 2


def test_damage_before_valid_frames_is_kept(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    damaged = frame(1)[:-2] + b"??"
    assert stream.append(0, frame(0) + damaged + frame(2), gap=False)

    stream = _again(stream)

    assert stream.end == len(frame(0) + damaged + frame(2))
    assert stream.walker.ordinal_next == 3


def test_a_loss_frame_at_the_end_counts_no_record_of_its_own(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0, 1)
    assert stream.append(stream.end, loss_frame(5, Loss(2, 5, "metrics", "disk_full")), gap=False)
    assert stream.walker.ordinal_next == 5

    assert _again(stream).walker.ordinal_next == 5


def test_an_empty_last_segment_remembers_where_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_stream, "SEGMENT_BYTES_MAX", 80)
    stream = _make(tmp_path)
    _put(stream, 0, 1, 2)
    _put(stream, 3)
    end = stream.end
    last = list_segments(RealFiles(), stream.folder)[-1]
    stream.close()
    os.truncate(last.path, 0)

    stream = _again(stream)

    assert (stream.end, stream.walker.ordinal_next) == (last.first_offset, 3)
    _put(stream, 3)
    assert stream.end == end


@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_what_is_no_segment_at_the_end_is_set_aside(tmp_path: Path, kind: str) -> None:
    stream = _make(tmp_path)
    _put(stream, 0, 1)
    end = stream.end
    odd = os.path.join(stream.folder, f"{end:016x}-{2:016x}.seg")
    if kind == "folder":
        os.mkdir(odd)
    else:
        os.symlink("/nowhere", odd)

    stream = _again(stream)

    assert stream.end == end
    assert os.path.lexists(odd + ".bad")
    _put(stream, 2)
    assert read_all(stream.folder).numbers == [0, 1, 2]


def test_a_stream_without_bytes_recovers_empty(tmp_path: Path) -> None:
    stream = _again(_make(tmp_path))

    assert (stream.end, stream.sealed, stream.walker.ordinal_next) == (0, False, 0)
    _put(stream, 0)
    assert read_all(stream.folder).numbers == [0]


# Sealing


def test_a_stream_whose_writer_said_its_end_is_sealed_as_it_is(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0)
    assert stream.append(stream.end, _finish(1), gap=False)
    content = _content(stream)

    stream.seal([])

    assert _content(stream) == content
    assert stream.sealed
    assert stream.durable == stream.end


def test_a_stream_without_an_end_gets_an_unknown_one(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0, 1)

    stream.seal([])

    finish = _records(stream)[-1]
    assert (finish.kind, finish.seq, finish.time_ns) == (RecordKind.RUN_FINISH, 2, 1)
    assert finish.body["exit_code"] is None
    assert stream.walker.ordinal_next == 3


@pytest.mark.parametrize("changes", [{"forked": True}, {"stream_class": BULK}])
def test_streams_that_speak_for_no_run_get_no_end(tmp_path: Path, changes: dict[str, Any]) -> None:
    stream = _make(tmp_path, **changes)
    _put(stream, 0, 1)

    stream.seal([])

    assert len(_records(stream)) == 2


def test_sealing_twice_changes_nothing(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0)
    stream.seal([])
    content = _content(stream)

    stream.seal([Loss(5, 6, "metrics", "disk_full")])
    stream = _again(stream)
    stream.seal([])

    assert _content(stream) == content
    assert stream.append(stream.end, frame(9), gap=False)
    assert _content(stream) == content


def test_a_seal_that_was_interrupted_is_finished_once(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0)
    stream.seal([])
    content = _content(stream)
    os.unlink(os.path.join(stream.folder, node_stream.SEALED_NAME))

    stream = _again(stream)
    stream.seal([])

    assert _content(stream) == content


def test_losses_of_a_dead_writer_are_declared_before_its_end(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0, 1)

    stream.seal([Loss(2, 4, "metrics", "disk_full"), Loss(4, 7, "metrics", "quota")])

    found = read_all(stream.folder)
    assert found.ledger.dropped == {"disk_full": 2, "quota": 3}
    assert found.ledger.seen == 3
    assert found.ledger.ordinal == stream.walker.ordinal_next == 8
    assert _again(stream).walker.ordinal_next == 8


def test_losses_in_the_middle_of_a_stream_are_named_too(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0, 1)
    assert stream.append(stream.end + 70, frame(4), gap=True)

    stream.seal([Loss(2, 4, "metrics", "quota")])

    found = read_all(stream.folder)
    assert found.ledger.dropped == {"quota": 2}
    assert found.ledger.ordinal == stream.walker.ordinal_next == 6


def test_half_a_frame_whose_rest_never_comes_is_cut_before_the_end_is_told(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0, 1)
    assert stream.append(stream.end, frame(2)[:-4], gap=False)
    stream.sync()

    stream.seal([])

    found = read_all(stream.folder)
    assert found.damages == []
    assert found.ledger.ordinal == stream.walker.ordinal_next == 3
    assert _records(stream)[-1].kind is RecordKind.RUN_FINISH
    assert _again(stream).walker.ordinal_next == 3


# Reclaiming


def _three_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeStream:
    monkeypatch.setattr(node_stream, "SEGMENT_BYTES_MAX", 200)
    stream = _make(tmp_path)
    for number in range(20):
        _put(stream, number)
        if len(list_segments(RealFiles(), stream.folder)) == 3:
            break
    stream.sync()
    return stream


def test_only_segments_wholly_below_the_offset_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _three_segments(tmp_path, monkeypatch)
    first, second, third = list_segments(RealFiles(), stream.folder)
    size = os.path.getsize(first.path)

    assert stream.reclaim(second.first_offset - 1) == 0
    assert stream.reclaim(second.first_offset) == size
    assert list_segments(RealFiles(), stream.folder) == [second, third]
    stream.reclaim(stream.end)
    assert list_segments(RealFiles(), stream.folder) == [third]


def test_a_delivered_segment_that_is_still_written_to_can_be_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = _three_segments(tmp_path, monkeypatch)
    stream.reclaim(stream.end)
    end, ordinal = stream.end, stream.walker.ordinal_next

    freed = stream.reclaim(stream.end, open_bytes_min=1)

    assert freed > 0
    (segment,) = list_segments(RealFiles(), stream.folder)
    assert (segment.first_offset, segment.first_ordinal, os.path.getsize(segment.path)) == (end, ordinal, 0)
    assert stream.reclaim(stream.end, open_bytes_min=1) == 0
    stream = _again(stream)
    assert (stream.end, stream.walker.ordinal_next) == (end, ordinal)
    _put(stream, ordinal)
    assert read_all(stream.folder).numbers == [ordinal]


def test_a_segment_with_anything_undelivered_is_not_left_behind(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0, 1)
    stream.sync()
    end = stream.end

    assert stream.reclaim(end - 1, open_bytes_min=1) == 0
    _put(stream, 2)
    assert stream.reclaim(end, open_bytes_min=1) == 0
    assert stream.append(stream.end, frame(3)[:5], gap=False)
    stream.sync()
    assert stream.reclaim(stream.end, open_bytes_min=1) == 0


def test_the_end_of_a_run_is_not_left_behind_before_it_is_sealed(tmp_path: Path) -> None:
    stream = _make(tmp_path)
    _put(stream, 0)
    assert stream.append(stream.end, _finish(1), gap=False)
    stream.sync()

    assert stream.reclaim(stream.end, open_bytes_min=1) == 0
    stream.seal([])

    assert [record.kind for record in _records(stream)].count(RecordKind.RUN_FINISH) == 1


def test_a_header_is_written_once_and_is_private(tmp_path: Path) -> None:
    header: StreamHeader = make_header()
    stream = NodeStream(header, str(tmp_path / "a" / header.stream_id))
    stream.create()

    assert os.stat(os.path.join(stream.folder, "stream")).st_mode & 0o077 == 0
    assert os.stat(stream.folder).st_mode & 0o077 == 0
