"""Adopt: streams taken from disk by the offsets of the socket. Dead writers whole, live ones so far, nothing twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.spools import dead_pid
from support.streams import Folder, Found, frame, make_header, read_all
from verl_shipper import adopt as adopt_module
from verl_shipper import node_stream
from verl_shipper.adopt import HEADER_GRACE_S, UNHEARD_S, Adopt
from verl_shipper.ingest import Ingest
from verl_shipper_spool.frame import encode
from verl_shipper_spool.header import Process, StreamHeader, this_process
from verl_shipper_spool.loss_journal import LossJournal
from verl_shipper_spool.reader import Frame
from verl_shipper_spool.record import Loss, Record, RecordKind, decode_record, encode_record

DEAD = replace(this_process(), pid=dead_pid(), start_ticks=1)
ALIVE = this_process()
ELSEWHERE = replace(this_process(), node="elsewhere", boot_id="f" * 36)


class Bench:
    """A client spool, an ingest and an adopter whose clock is the test's."""

    def __init__(self, root: Path, *, keep: bool = False) -> None:
        self.root = root
        self.spool = root / "client"
        self.spool.mkdir(exist_ok=True)
        self.now_s = time.monotonic()
        self.keep = keep
        self.ingest = Ingest(str(root / "state"), 10**9)
        self.ingest.open()
        self.adopt = Adopt(self.ingest, [str(self.spool)], keep=keep)

    def folder(self, process: Process, count: int = 0, **changes: Any) -> Folder:
        made = Folder(self.spool, make_header(process=process, **changes))
        if count:
            made.add_records(0, count)
        return made

    def look(self, times: int = 1, by_s: float = UNHEARD_S + 0.1, *, settle: bool = True) -> None:
        for _ in range(times):
            self.now_s += by_s
            self.adopt.look(self.now_s)
            if settle:
                self.ingest.settle()

    def numbers(self, header: StreamHeader) -> list[int]:
        """Metrics of the node's copy."""
        found = [decode_record(item.payload) for item in self.found(header).findings if isinstance(item, Frame)]
        return [record.seq for record in found if record.kind is RecordKind.METRICS]

    def found(self, header: StreamHeader) -> Found:
        return read_all(os.path.join(self.ingest.spool_dir, header.stream_id))

    def copy(self, header: StreamHeader) -> bytes:
        folder = Path(self.ingest.spool_dir) / header.stream_id
        return b"".join(path.read_bytes() for path in sorted(folder.glob("*.seg")))

    def restart(self) -> None:
        self.ingest.close()
        self.ingest = Ingest(str(self.root / "state"), 10**9)
        self.ingest.open()
        self.adopt = Adopt(self.ingest, [str(self.spool)], keep=self.keep)

    def close(self) -> None:
        self.ingest.close()


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def _finish(number: int) -> bytes:
    body = {"exit_code": 0, "reason": "finish"}
    return encode(encode_record(Record(RecordKind.RUN_FINISH, number, None, 1, body)), number)


def _content(folder: Folder) -> bytes:
    return b"".join(Path(path).read_bytes() for path in folder.segments)


# Dead writers


def test_a_dead_writers_stream_is_taken_sealed_and_its_folder_removed(bench: Bench) -> None:
    folder = bench.folder(DEAD, 10)
    folder.add(frame(10) + _finish(11), 10)
    content = _content(folder)

    bench.look(3)

    assert bench.copy(folder.header) == content
    assert bench.ingest.streams[folder.header.stream_id].sealed
    assert not os.path.exists(folder.path)
    assert bench.adopt.sources == {}
    assert bench.adopt.settled()


def test_a_folder_stays_until_its_bytes_are_durable(bench: Bench) -> None:
    folder = bench.folder(DEAD, 10)

    bench.look(5, settle=False)
    assert os.path.exists(folder.path)
    assert not bench.adopt.settled()
    bench.ingest.settle()
    bench.look()

    assert not os.path.exists(folder.path)


def test_a_run_whose_writer_died_gets_an_unknown_end(bench: Bench) -> None:
    folder = bench.folder(DEAD, 3)

    bench.look(3)

    assert bench.ingest.streams[folder.header.stream_id].walker.ordinal_next == 4


def test_a_torn_tail_is_counted_once_and_left_out(bench: Bench) -> None:
    folder = bench.folder(DEAD, 3)
    with open(folder.segments[0], "ab") as file:
        file.write(frame(3)[:-4])

    bench.look(2, settle=False)
    bench.ingest.settle()
    bench.look(3)

    assert bench.adopt.torn == 1
    assert bench.found(folder.header).damages == []
    assert not os.path.exists(folder.path)


def test_losses_that_were_never_declared_are_told_at_the_seal(bench: Bench) -> None:
    folder = bench.folder(DEAD, 3)
    journal = LossJournal(folder.path)
    journal.open()
    journal.add(Loss(3, 8, "metrics", "disk_full"))
    journal.close()

    bench.look(3)

    ledger = bench.found(folder.header).ledger
    assert ledger.dropped == {"disk_full": 5}
    assert ledger.ordinal == bench.ingest.streams[folder.header.stream_id].walker.ordinal_next == 9


@pytest.mark.parametrize("cut", [1, 12, 25, -1])
@pytest.mark.parametrize("restarted", [False, True])
def test_the_rest_of_a_frame_that_was_on_its_way_when_its_writer_died_arrives(
    bench: Bench, cut: int, restarted: bool
) -> None:
    folder = bench.folder(DEAD, 2)
    folder.add(frame(2, size_bytes=500) + frame(3) + _finish(4), 2)
    content = _content(folder)
    sent = len(frame(0) + frame(1)) + (cut if cut > 0 else len(frame(2, size_bytes=500)) - 1)
    bench.ingest.greet(folder.header)
    assert bench.ingest.take(folder.header.stream_id, 0, content[:sent])
    bench.ingest.settle()
    if restarted:
        bench.restart()

    bench.look(3)

    assert bench.copy(folder.header) == content
    assert bench.ingest.streams[folder.header.stream_id].walker.ordinal_next == 5
    assert not os.path.exists(folder.path)


@pytest.mark.parametrize("cut", [5, 25])
def test_half_a_frame_at_both_ends_is_one_torn_record(bench: Bench, cut: int) -> None:
    """A sender ships whole appends only, but who sends on a copy of a folder may ship its torn end."""
    folder = bench.folder(DEAD, 2)
    whole = frame(2, size_bytes=500)
    with open(folder.segments[0], "ab") as file:
        file.write(whole[:cut])
    bench.ingest.greet(folder.header)
    assert bench.ingest.take(folder.header.stream_id, 0, _content(folder))
    bench.ingest.settle()

    bench.look(3)

    found = bench.found(folder.header)
    assert bench.adopt.torn == 1
    assert found.damages == []
    assert found.ledger.ordinal == bench.ingest.streams[folder.header.stream_id].walker.ordinal_next == 3


def test_a_large_stream_is_taken_in_several_looks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt_module, "LOOK_BYTES_MAX", 2000)
    folder = bench.folder(DEAD)
    for index in range(20):
        folder.add_records(index * 50, 50)
    content = _content(folder)

    hungry = bench.adopt.look(bench.now_s)
    assert hungry
    assert 0 < bench.ingest.end(folder.header.stream_id) < len(content)
    for _ in range(40):
        bench.look()

    assert bench.copy(folder.header)[: len(content)] == content
    assert not os.path.exists(folder.path)


# Live writers


def test_a_live_writer_may_speak_for_itself_first(bench: Bench) -> None:
    folder = bench.folder(ALIVE, 5)

    bench.look(by_s=0.1)
    assert bench.ingest.end(folder.header.stream_id) == 0
    assert not bench.adopt.settled()
    bench.look()

    assert bench.numbers(folder.header) == [0, 1, 2, 3, 4]
    assert bench.adopt.unheard_count == 1
    assert not bench.ingest.streams[folder.header.stream_id].sealed
    assert os.path.exists(folder.path)


def test_a_live_writer_that_is_heard_is_left_to_its_sender(bench: Bench) -> None:
    folder = bench.folder(ALIVE, 5)
    for _ in range(5):
        bench.ingest.hear(folder.header.stream_id, bench.now_s + UNHEARD_S)
        bench.look()

    assert bench.ingest.end(folder.header.stream_id) == 0
    bench.ingest.greet(folder.header)
    assert bench.ingest.take(folder.header.stream_id, 0, _content(folder))
    bench.ingest.settle()
    bench.look()
    assert bench.adopt.settled()
    assert bench.adopt.unheard_count == 0


def test_of_a_live_writer_only_whole_frames_are_taken(bench: Bench) -> None:
    folder = bench.folder(ALIVE, 2)
    with open(folder.segments[0], "ab") as file:
        file.write(frame(2)[:7])

    bench.look(3)
    assert bench.copy(folder.header) == frame(0) + frame(1)
    assert bench.adopt.torn == 0
    assert bench.adopt.settled()
    os.truncate(folder.segments[0], len(frame(0) + frame(1)))
    with open(folder.segments[0], "ab") as file:
        file.write(frame(3))
    bench.look(3)

    assert bench.copy(folder.header) == frame(0) + frame(1) + frame(3)


def test_a_sender_that_comes_back_meets_the_same_offsets(bench: Bench) -> None:
    folder = bench.folder(ALIVE, 5)
    bench.look(2)
    more = folder.add_records(5, 5)
    content = _content(folder)

    assert bench.ingest.take(folder.header.stream_id, 0, content)
    bench.ingest.settle()
    bench.look(3)

    assert bench.copy(folder.header) == content
    assert os.path.exists(more)


def test_a_writer_on_another_host_is_never_sealed_while_it_beats(bench: Bench) -> None:
    folder = bench.folder(ELSEWHERE, 5)

    bench.look(5)

    assert bench.numbers(folder.header) == [0, 1, 2, 3, 4]
    assert not bench.ingest.streams[folder.header.stream_id].sealed
    assert os.path.exists(folder.path)
    assert bench.adopt.settled()


# Archives


def test_folders_that_are_kept_are_taken_once_and_left_as_they_are(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keep=True)
    folder = bench.folder(DEAD, 5)
    content = _content(folder)
    bench.look(3)
    taken = bench.copy(folder.header)
    for _ in range(2):
        assert _content(folder) == content
        assert bench.adopt.settled()
        bench.restart()
        bench.look(3)

    assert bench.copy(folder.header) == taken
    assert bench.ingest.taken_bytes == 0
    bench.close()


def test_an_archive_of_what_was_delivered_and_reclaimed_brings_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keep=True)
    folder = bench.folder(DEAD, 5)
    bench.look(3)
    stream_id = folder.header.stream_id
    bench.ingest.reclaim({stream_id: bench.ingest.end(stream_id)})
    bench.restart()

    for _ in range(3):
        bench.look()

    assert bench.adopt.settled()
    assert bench.ingest.streams == {}
    assert not bench.ingest.unsettled
    bench.close()


# Damage


def test_damage_in_the_middle_comes_along_and_what_follows_too(bench: Bench) -> None:
    folder = bench.folder(DEAD)
    folder.add(frame(0) + frame(1)[:-2] + b"??" + frame(2) + _finish(3), 0)
    content = _content(folder)

    bench.look(3)

    assert bench.copy(folder.header) == content


@pytest.mark.parametrize("harm", ["missing", "folder", "empty"])
def test_a_segment_that_is_not_there_costs_its_records_only(bench: Bench, harm: str) -> None:
    folder = bench.folder(DEAD)
    for first in (0, 5, 10):
        folder.add_records(first, 5)
    os.unlink(folder.segments[1])
    if harm == "folder":
        os.mkdir(folder.segments[1])
    elif harm == "empty":
        Path(folder.segments[1]).touch()

    bench.look(4)

    assert bench.numbers(folder.header) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert bench.found(folder.header).ledger.dropped == {"missing": 5}


def test_what_cannot_be_read_is_not_removed(bench: Bench) -> None:
    folder = bench.folder(DEAD, 5)
    odd = os.path.join(folder.path, f"{len(_content(folder)):016x}-{5:016x}.seg")
    os.mkdir(odd)
    Path(odd, "precious").write_text("bytes")

    bench.look(4)

    assert bench.numbers(folder.header) == [0, 1, 2, 3, 4]
    assert Path(odd, "precious").read_text() == "bytes"
    assert bench.adopt.settled()
    assert any("cannot be read" in text for text in bench.adopt.problems.values())


def test_bytes_that_vanish_while_they_are_read_are_no_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bench.folder(DEAD, 5)
    monkeypatch.setattr("verl_shipper.adopt.RawReader.read", lambda _self, offset, _max, _until: (offset, b""))
    bench.look(3)
    assert os.path.exists(folder.path)
    assert not bench.adopt.settled()
    monkeypatch.undo()

    bench.look(3)

    assert bench.numbers(folder.header) == [0, 1, 2, 3, 4]
    assert not os.path.exists(folder.path)


@pytest.mark.parametrize("name", ["notes", "A" * 32, "a" * 31, "a" * 33, ".hidden"])
def test_folders_of_other_names_are_nobodys_business(bench: Bench, name: str) -> None:
    (bench.spool / name).mkdir()
    (bench.spool / name / "stream").write_bytes(b"?")

    bench.look(2)

    assert bench.adopt.sources == {}
    assert bench.adopt.problems == {}


def test_a_renamed_folder_is_a_problem_with_a_name(bench: Bench) -> None:
    folder = bench.folder(DEAD, 5)
    os.rename(folder.path, bench.spool / ("a" * 32))

    bench.look(3)

    (text,) = bench.adopt.problems.values()
    assert folder.header.stream_id in text
    assert (bench.spool / ("a" * 32)).exists()


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"\xff"])
def test_an_unreadable_header_is_a_problem_once_it_is_old(bench: Bench, content: bytes) -> None:
    folder = bench.folder(DEAD, 5)
    header = Path(folder.path, "stream")
    whole = header.read_bytes()
    header.write_bytes(content)
    bench.look()
    assert bench.adopt.problems == {}
    for path in [header, *map(Path, folder.segments)]:
        os.utime(path, (0, time.time() - HEADER_GRACE_S - 5))
    bench.look()
    assert "cannot read spool" in bench.adopt.problems[folder.path]

    header.write_bytes(whole)
    bench.look(3)

    assert bench.adopt.problems == {}
    assert not os.path.exists(folder.path)


def test_a_problem_goes_with_its_folder(bench: Bench) -> None:
    folder = bench.folder(DEAD, 5)
    os.rename(folder.path, bench.spool / ("a" * 32))
    bench.look()
    assert bench.adopt.problems
    for path in (bench.spool / ("a" * 32)).iterdir():
        path.unlink()
    (bench.spool / ("a" * 32)).rmdir()

    bench.look()

    assert bench.adopt.problems == {}


def test_a_spool_that_does_not_exist_yet_is_no_problem(bench: Bench, tmp_path: Path) -> None:
    bench.adopt.roots.append(str(tmp_path / "later"))

    bench.look()

    assert bench.adopt.problems == {}


def test_one_sick_stream_does_not_hold_up_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [bench.folder(DEAD, 5) for _ in range(3)]
    sick = folders[1].header.stream_id
    greet = bench.ingest.greet

    def fail(self: Ingest, header: StreamHeader) -> int:
        if header.stream_id == sick:
            raise ValueError("nobody thought of this")
        return greet(header)

    monkeypatch.setattr(Ingest, "greet", fail)
    bench.look(4)

    assert [os.path.exists(folder.path) for folder in folders] == [False, True, False]
    assert "nobody thought of this" in bench.adopt.problems[folders[1].path]
    assert not bench.adopt.settled()


def test_a_full_node_is_a_problem_until_there_is_room(bench: Bench) -> None:
    folder = bench.folder(ALIVE, 5)
    bench.look(2)
    folder.add_records(5, 5)
    bench.ingest.quota_bytes = bench.ingest.size_bytes
    bench.look(2)
    assert "full" in bench.adopt.problems[folder.path]
    assert not bench.adopt.settled()

    bench.ingest.quota_bytes = 10**9
    bench.look(4)

    assert bench.adopt.problems == {}
    assert bench.numbers(folder.header) == list(range(10))


def test_the_nodes_own_segments_do_not_change_what_is_taken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_stream, "SEGMENT_BYTES_MAX", 100)
    folder = bench.folder(ALIVE)
    for index in range(6):
        folder.add_records(index * 5, 5)
        bench.look(2)

    assert bench.copy(folder.header) == _content(folder)
