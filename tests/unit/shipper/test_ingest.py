"""Ingest: the one way into the node spool. One bad stream, one bad disk, one lost table: the others never notice."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.streams import frame, make_header, read_all
from verl_shipper import node_stream
from verl_shipper.ingest import Ingest, IngestRefusedError
from verl_shipper_spool.files import RealFiles
from verl_shipper_spool.frame import encode
from verl_shipper_spool.header import StreamHeader, encode_header
from verl_shipper_spool.record import Record, RecordKind, encode_record


class Bench:
    """An ingest that can be started again."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.ingest = self._new()

    def _new(self) -> Ingest:
        made = Ingest(str(self.state), 10**9)
        made.open()
        return made

    def restart(self) -> Ingest:
        self.ingest.close()
        self.ingest = self._new()
        return self.ingest

    def stream(self, count: int = 0, **changes: Any) -> StreamHeader:
        header = make_header(**changes)
        self.ingest.greet(header)
        self.put(header, *range(count))
        return header

    def put(self, header: StreamHeader, *numbers: int) -> None:
        for number in numbers:
            assert self.ingest.take(header.stream_id, self.ingest.end(header.stream_id), frame(number))

    def folder(self, header: StreamHeader) -> Path:
        return Path(self.ingest.spool_dir) / header.stream_id

    def row(self, header: StreamHeader) -> tuple[Any, ...]:
        db = sqlite3.connect(self.state / "daemon.sqlite3")
        found = db.execute(
            "SELECT run_id, durable, ordinal_next, state FROM streams WHERE stream_id = ?", (header.stream_id,)
        ).fetchone()
        db.close()
        return tuple(found)

    def size(self) -> int:
        return sum(path.stat().st_size for path in Path(self.ingest.spool_dir).rglob("*.seg"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "state")
    yield made
    made.ingest.close()


def _finish(number: int) -> bytes:
    body = {"exit_code": 0, "reason": "finish"}
    return encode(encode_record(Record(RecordKind.RUN_FINISH, number, None, 1, body)), number)


# Taking


def test_a_stream_is_made_known_and_taken(bench: Bench) -> None:
    header = make_header()
    assert not bench.ingest.known(header.stream_id)
    assert bench.ingest.greet(header) == 0
    assert bench.ingest.known(header.stream_id)

    bench.put(header, 0, 1)
    assert bench.ingest.unsettled
    assert bench.ingest.durable(header.stream_id) == 0
    (settled,) = bench.ingest.settle()

    assert settled.durable == bench.ingest.durable(header.stream_id) == len(frame(0) + frame(1))
    assert not bench.ingest.unsettled
    assert bench.row(header) == ("run-1", settled.durable, 2, "open")
    assert bench.ingest.greet(header) == settled.durable


def test_bytes_that_are_there_are_no_change(bench: Bench) -> None:
    header = bench.stream(2)
    bench.ingest.settle()
    taken = bench.ingest.taken_bytes

    assert bench.ingest.take(header.stream_id, 0, frame(0))

    assert not bench.ingest.unsettled
    assert bench.ingest.taken_bytes == taken


def test_a_hole_is_answered_with_false_and_a_gap_is_taken(bench: Bench) -> None:
    header = bench.stream(1)
    end = bench.ingest.end(header.stream_id)

    assert not bench.ingest.take(header.stream_id, end + 10, frame(1))
    assert bench.ingest.take(header.stream_id, end + 10, frame(1), gap=True)


@pytest.mark.parametrize("offset", [2**62 + 1, 2**63, 2**64 - 40])
def test_an_offset_beyond_all_reason_is_refused(bench: Bench, offset: int) -> None:
    header = bench.stream(1)

    with pytest.raises(IngestRefusedError, match="offset"):
        bench.ingest.take(header.stream_id, offset, frame(1), gap=True)
    bench.ingest.settle()


def test_an_ordinal_beyond_all_reason_does_not_stop_the_table(bench: Bench) -> None:
    header = bench.stream()
    assert bench.ingest.take(header.stream_id, 0, encode(b"x", 2**64 - 2))

    bench.ingest.settle()

    assert bench.row(header)[2] <= 2**63 - 1


def test_the_size_is_what_the_segments_have(bench: Bench) -> None:
    bench.stream(5)
    bench.stream(7)
    bench.ingest.settle()
    assert bench.ingest.size_bytes == bench.size()

    bench.restart()

    assert bench.ingest.size_bytes == bench.size()


# Quota


def test_beyond_the_quota_writers_keep_their_bytes(bench: Bench) -> None:
    header = bench.stream(3)
    bench.ingest.quota_bytes = bench.ingest.size_bytes
    with pytest.raises(IngestRefusedError, match="full"):
        bench.put(header, 3)

    assert bench.ingest.take(header.stream_id, 0, frame(0)), "bytes that are there need no room"
    bench.ingest.quota_bytes *= 2
    bench.put(header, 3)


def test_reclaiming_makes_room_for_as_long_as_the_daemon_runs(bench: Bench) -> None:
    for number in range(20):
        header = bench.stream(50, run_id=f"run-{number}")
        bench.ingest.settle()
        bench.ingest.seal(header.stream_id, [])
        bench.ingest.reclaim({header.stream_id: bench.ingest.end(header.stream_id)})

    assert bench.size() == 0
    assert bench.ingest.size_bytes == 0


def test_delivered_bytes_of_living_streams_do_not_fill_the_quota_for_ever(bench: Bench) -> None:
    headers = [bench.stream(20) for _ in range(4)]
    bench.ingest.settle()
    bench.ingest.quota_bytes = bench.ingest.size_bytes + 10
    with pytest.raises(IngestRefusedError):
        bench.put(headers[0], 20)

    bench.ingest.reclaim({header.stream_id: bench.ingest.end(header.stream_id) for header in headers})

    for header in headers:
        bench.put(header, *range(20, 25))
        assert read_all(str(bench.folder(header))).numbers == list(range(20, 25))
    assert bench.ingest.size_bytes == bench.size()


# A failing disk


def test_a_full_disk_is_a_refusal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    header = bench.stream(2)

    def full(_fd: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.ingest.streams[header.stream_id].files, "write", full, raising=False)
    with pytest.raises(IngestRefusedError, match="No space"):
        bench.put(header, 2)
    monkeypatch.undo()
    bench.put(header, 2)

    bench.ingest.settle()
    assert read_all(str(bench.folder(header))).numbers == [0, 1, 2]


def test_a_stream_that_cannot_be_made_is_a_refusal(bench: Bench) -> None:
    header = make_header()
    bench.folder(header).write_text("in the way")

    with pytest.raises(IngestRefusedError):
        bench.ingest.greet(header)


def test_bytes_whose_fsync_failed_are_asked_for_again_and_others_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick, well = bench.stream(2), bench.stream(2)
    bench.ingest.settle()
    durable = bench.ingest.durable(sick.stream_id)
    bench.put(sick, 2, 3)
    bench.put(well, 2, 3)

    def fail(_fd: int) -> None:
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(bench.ingest.streams[sick.stream_id].files, "sync", fail, raising=False)
    settled = bench.ingest.settle()

    assert [stream.header for stream in settled] == [well]
    assert bench.ingest.durable(sick.stream_id) == bench.ingest.end(sick.stream_id) == durable
    assert not bench.ingest.take(sick.stream_id, durable + 100, frame(9))
    bench.put(sick, 2, 3)
    bench.ingest.settle()
    assert read_all(str(bench.folder(sick))).numbers == [0, 1, 2, 3]
    assert bench.ingest.size_bytes == bench.size()


def test_a_disk_whose_fsync_always_fails_costs_its_stream_only_until_it_works_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick, well = bench.stream(2), bench.stream(2)

    def fail(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(bench.ingest.streams[sick.stream_id].files, "sync", fail, raising=False)
    assert [stream.header for stream in bench.ingest.settle()] == [well]
    with pytest.raises(IngestRefusedError, match="Input/output"):
        bench.ingest.take(sick.stream_id, 0, frame(0))

    assert bench.ingest.greet(sick) == 0
    bench.put(sick, 0, 1, 2)
    bench.ingest.settle()
    assert read_all(str(bench.folder(sick))).numbers == [0, 1, 2]


def test_a_table_that_takes_nothing_costs_no_bytes_and_is_brought_up_to_date_later(bench: Bench) -> None:
    header = bench.stream(1)
    bench.ingest.settle()
    bench.ingest.store.execute("PRAGMA query_only = 1")
    bench.put(header, 1)
    other = bench.stream(1)

    settled = bench.ingest.settle()
    bench.ingest.write_notes({"state": "running"})

    assert {stream.header.stream_id for stream in settled} == {header.stream_id, other.stream_id}
    assert bench.row(header)[2] == 1
    assert "readonly" in bench.ingest.trouble
    bench.ingest.store.execute("PRAGMA query_only = 0")
    bench.ingest.settle()
    assert bench.row(header)[2] == 2
    assert bench.row(other)[2] == 1
    assert bench.ingest.trouble == ""


def test_nothing_is_forgotten_that_the_table_does_not_know_as_delivered(bench: Bench) -> None:
    header = bench.stream(2)
    bench.ingest.settle()
    bench.ingest.seal(header.stream_id, [])
    end = bench.ingest.end(header.stream_id)
    bench.ingest.store.execute("PRAGMA query_only = 1")
    bench.ingest.reclaim({header.stream_id: end})
    assert bench.folder(header).exists()

    bench.ingest.store.execute("PRAGMA query_only = 0")
    bench.ingest.reclaim({header.stream_id: end})

    assert not bench.folder(header).exists()
    assert bench.row(header)[3] == "reclaimed"


# Recovery


def test_a_restart_finds_everything_again(bench: Bench) -> None:
    header = bench.stream(3)
    bench.ingest.settle()
    bench.put(header, 3)
    end = bench.ingest.end(header.stream_id)

    bench.restart()

    assert bench.ingest.durable(header.stream_id) == end
    assert bench.row(header) == ("run-1", end, 4, "open")


@pytest.mark.parametrize("damage", [None, b"", b"\0" * 4096])
def test_a_lost_table_is_rebuilt_from_the_spool(bench: Bench, damage: bytes | None) -> None:
    live, sealed = bench.stream(3), bench.stream(2, run_id="run-2")
    bench.ingest.settle()
    bench.ingest.seal(sealed.stream_id, [])
    rows = bench.row(live), bench.row(sealed)
    bench.ingest.close()
    path = bench.state / "daemon.sqlite3"
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)

    bench.ingest = bench._new()

    assert (bench.row(live), bench.row(sealed)) == rows
    assert bench.ingest.streams[sealed.stream_id].sealed


def test_a_lost_header_is_rebuilt_from_the_table(bench: Bench) -> None:
    header = bench.stream(3)
    bench.ingest.close()
    (bench.folder(header) / "stream").write_bytes(b"\0" * 100)

    bench.ingest = bench._new()

    assert bench.ingest.streams[header.stream_id].header == header
    assert (bench.folder(header) / "stream").read_bytes() == encode_header(header)


def test_a_folder_without_any_header_is_left_alone(bench: Bench) -> None:
    folder = Path(bench.ingest.spool_dir) / ("a" * 32)
    folder.mkdir()
    (folder / "notes").write_text("mine")

    bench.restart()

    assert (folder / "notes").exists()
    assert bench.ingest.streams == {}


def test_a_copy_of_a_folder_is_not_taken_for_the_stream(bench: Bench) -> None:
    header = bench.stream(2)
    bench.ingest.settle()
    shutil.copytree(bench.folder(header), bench.folder(header).with_name("z-backup"))

    bench.restart()
    bench.put(header, 2)
    bench.ingest.settle()

    assert read_all(str(bench.folder(header))).numbers == [0, 1, 2]
    assert list(bench.ingest.streams) == [header.stream_id]


def test_one_stream_that_cannot_be_recovered_does_not_stop_the_start(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick, well = bench.stream(2), bench.stream(2)
    bench.ingest.close()
    read = RealFiles.read

    def fail(self: RealFiles, path: str, offset: int, size_bytes: int) -> bytes:
        if sick.stream_id in path:
            raise OSError(5, "Input/output error")
        return read(self, path, offset, size_bytes)

    monkeypatch.setattr(RealFiles, "read", fail)
    bench.ingest = bench._new()

    assert list(bench.ingest.streams) == [well.stream_id]
    with pytest.raises(IngestRefusedError, match="Input/output"):
        bench.ingest.greet(sick)
    with pytest.raises(IngestRefusedError, match="Input/output"):
        bench.ingest.take(sick.stream_id, 0, frame(0))
    assert bench.folder(sick).exists()
    monkeypatch.undo()
    assert bench.ingest.greet(sick) == len(frame(0) + frame(1))


# The end of a stream


def test_what_was_reclaimed_is_remembered_and_brings_nothing_again(bench: Bench) -> None:
    header = bench.stream(3)
    bench.ingest.settle()
    bench.ingest.seal(header.stream_id, [])
    end = bench.ingest.end(header.stream_id)
    bench.ingest.reclaim({header.stream_id: end})
    for _ in range(2):
        assert bench.ingest.known(header.stream_id)
        assert bench.ingest.greet(header) == end
        assert bench.ingest.take(header.stream_id, 0, frame(0))
        assert not bench.ingest.unsettled
        assert not bench.folder(header).exists()
        bench.restart()

    assert bench.row(header) == ("run-1", end, 4, "reclaimed")


def test_a_reclaim_that_was_interrupted_is_finished_at_the_next_start(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = bench.stream(3)
    bench.ingest.settle()
    bench.ingest.seal(header.stream_id, [])
    end = bench.ingest.end(header.stream_id)
    monkeypatch.setattr("verl_shipper.ingest.shutil.rmtree", lambda *_args, **_more: None)
    bench.ingest.reclaim({header.stream_id: end})
    monkeypatch.undo()
    assert bench.folder(header).exists()

    bench.restart()

    assert not bench.folder(header).exists()
    assert bench.ingest.greet(header) == end


def test_a_sealed_stream_takes_no_more_and_says_so(bench: Bench) -> None:
    header = bench.stream(2)
    bench.ingest.settle()
    bench.ingest.seal(header.stream_id, [])
    end = bench.ingest.end(header.stream_id)
    for _ in range(2):
        assert bench.ingest.take(header.stream_id, 0, frame(0))
        with pytest.raises(IngestRefusedError, match="ended"):
            bench.ingest.take(header.stream_id, end, frame(9))
        bench.ingest.reclaim({header.stream_id: end})


def test_nothing_unsafe_is_ever_removed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_stream, "SEGMENT_BYTES_MAX", 100)
    header = bench.stream(20)
    bench.ingest.settle()
    end = bench.ingest.end(header.stream_id)
    for safe in range(0, end + 1, 17):
        bench.ingest.reclaim({header.stream_id: safe})
        found = read_all(str(bench.folder(header)))
        first = min((item.end for item in found.findings if not hasattr(item, "start")), default=end)
        assert first - len(frame(0)) <= safe

    bench.ingest.reclaim({"f" * 32: 10**9})
    assert bench.folder(header).exists()


def test_bytes_that_are_not_durable_are_not_reclaimed(bench: Bench) -> None:
    header = bench.stream(20)

    bench.ingest.reclaim({header.stream_id: bench.ingest.end(header.stream_id)})
    bench.ingest.settle()

    assert read_all(str(bench.folder(header))).numbers == list(range(20))


def test_a_stream_that_cannot_be_reclaimed_does_not_stop_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick, well = bench.stream(5), bench.stream(5)
    bench.ingest.settle()
    for header in (sick, well):
        bench.ingest.seal(header.stream_id, [])
    safe = {header.stream_id: bench.ingest.end(header.stream_id) for header in (sick, well)}

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(bench.ingest.streams[sick.stream_id].files, "size", fail, raising=False)
    bench.ingest.reclaim(safe)

    assert bench.folder(sick).exists()
    assert not bench.folder(well).exists()


def test_a_run_that_ended_well_keeps_its_end(bench: Bench) -> None:
    header = bench.stream(2)
    assert bench.ingest.take(header.stream_id, bench.ingest.end(header.stream_id), _finish(2))
    bench.ingest.settle()
    bench.ingest.quota_bytes = bench.ingest.size_bytes + 1
    bench.ingest.reclaim({header.stream_id: bench.ingest.end(header.stream_id)})

    bench.ingest.seal(header.stream_id, [])

    assert bench.row(header)[2] == 3


def test_hearing_is_remembered_by_stream(bench: Bench) -> None:
    assert bench.ingest.heard_at_s("a") == float("-inf")
    bench.ingest.hear("a", 12.5)

    assert bench.ingest.heard_at_s("a") == 12.5
    assert os.path.isdir(bench.ingest.spool_dir)
