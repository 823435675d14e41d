"""Everything is bounded: files per look, files that wait, files remembered, bytes on disk, folders' depth, time."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.collecting import Collected, dump, samples, steps
from verl_shipper.collect import ledger, place, streams, walk
from verl_shipper.collect.order import collected_dir


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Collected]:
    made = Collected(tmp_path)
    made.entries = [made.entry(recursive=True)]
    yield made
    made.close()


def fill(bench: Collected, count: int, rows: int = 1) -> None:
    for number in range(count):
        (bench.folder / f"{number}.jsonl").write_text(dump(samples(number, rows, str(number))))


def seen_steps(bench: Collected) -> list[int]:
    return sorted(record.step or 0 for record in bench.of("generations"))


def test_a_large_folder_is_looked_at_a_little_at_a_time(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "FILES_PER_LOOK", 3)
    fill(bench, 20)
    bench.turn(3)
    assert seen_steps(bench) == []
    bench.settle()

    assert seen_steps(bench) == list(range(20))


def test_files_that_wait_are_looked_after_some_at_a_time(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "WAITING_MAX", 3)
    fill(bench, 20)
    bench.settle()

    assert seen_steps(bench) == list(range(20))


def test_the_longer_a_look_takes_the_longer_is_the_pause(bench: Collected) -> None:
    (only,) = bench.start()._places

    assert only.pause_s(0.0) == 0.0
    assert only.pause_s(0.05) == pytest.approx(5.0)
    assert only.pause_s(1000.0) == place.PAUSE_S_MAX


def test_more_files_than_can_be_remembered_are_told_and_those_that_are_gone_make_room(
    bench: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "FILES_REMEMBERED_MAX", 5)
    fill(bench, 5)
    bench.settle()
    fill(bench, 8)
    bench.look()
    assert seen_steps(bench) == list(range(5))
    assert bench.collector is not None
    assert "more files than can be remembered" in bench.collector.problems()[0]
    for number in range(3):
        (bench.folder / f"{number}.jsonl").unlink()
    bench.settle()

    assert seen_steps(bench) == list(range(8))


def test_without_room_files_wait_and_nothing_is_dropped(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BYTES_MAX", 1)
    fill(bench, 3)
    bench.turn(5)
    collector = bench.collector
    assert collector is not None
    bench.until(lambda: "files wait" in " ".join(collector.problems()), "it is told")
    assert seen_steps(bench) == []
    monkeypatch.setattr(streams, "BYTES_MAX", 10**9)
    bench.settle()

    assert seen_steps(bench) == [0, 1, 2]
    assert collector.problems() == []


def test_a_disk_that_is_nearly_full_is_left_alone(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    def full(path: Any) -> Any:
        found = list(real(path))
        found[4] = 1  # blocks that are free
        return os.statvfs_result(found)

    with monkeypatch.context() as patch:
        patch.setattr("verl_shipper.collect.streams.os.statvfs", full)
        fill(bench, 1)
        bench.turn(10)
        assert seen_steps(bench) == []
    bench.settle()

    assert seen_steps(bench) == [0]


def test_records_that_find_no_room_all_the_same_come_again(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    fails = [3]

    def write(fd: int, content: bytes) -> int:
        if b"loss" in content and fails[0]:
            fails[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, content)

    (bench.folder / "x.jsonl").write_text(dump(steps(0, 20)))
    with monkeypatch.context() as patch:
        patch.setattr("verl_shipper_spool.files.RealFiles.write", staticmethod(write))
        bench.settle()
    assert fails == [0]

    assert [record.body["loss"] for record in bench.of("metrics")] == list(range(20))


def test_segments_that_the_daemon_has_are_removed(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_shipper.collect.collector.CHORES_S", 0.0)
    monkeypatch.setattr("verl_shipper_spool.writer.segment_bytes_for", lambda _folder, _wanted: 100_000)
    fill(bench, 10, rows=2000)
    bench.settle()
    collector = bench.collector
    assert collector is not None
    before = collector._streams.size_bytes()
    for _ in range(5):
        bench.take()
    bench.turn(3)

    assert before > 500_000
    assert collector._streams.size_bytes() < 300_000
    assert seen_steps(bench) == list(range(10))


def test_only_so_many_streams_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PAIRS_MAX", 3)
    bench = Collected(tmp_path)
    bench.entries = [bench.entry(kind="metrics")]
    for number in range(10):  # each a run of its own
        (bench.folder / f"{number}x.jsonl").write_text(dump(steps(number, number + 1)))
    bench.settle()
    assert bench.collector is not None
    assert bench.collector._streams.count == 3
    for _ in range(3):
        bench.take()

    assert len(os.listdir(collected_dir(str(bench.state)))) == 3, "the others are sealed and gone"
    assert sorted(record.body["loss"] for record in bench.of("metrics")) == list(range(10))
    bench.close()


def test_streams_of_a_silent_run_end(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(bench, 1)
    bench.settle()
    monkeypatch.setattr("verl_shipper.collect.collector.IDLE_S", 0.0)
    monkeypatch.setattr("verl_shipper.collect.collector.CHORES_S", 0.0)
    collector = bench.collector
    assert collector is not None
    bench.until(lambda: collector._streams.count == 0, "they end")
    for _ in range(3):
        bench.take()
    assert os.listdir(collected_dir(str(bench.state))) == []
    fill(bench, 2)
    bench.settle()

    assert seen_steps(bench) == [0, 1]


def test_links_lead_nowhere_and_depth_has_an_end(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "DEPTH_MAX", 3)
    (bench.folder / "loop").symlink_to(bench.folder)
    deep = bench.folder
    for number in range(6):
        (deep / f"{number}.jsonl").write_text(dump(samples(number, 1, str(number))))
        deep = deep / "below"
        deep.mkdir()
    bench.settle()

    assert seen_steps(bench) == [0, 1, 2, 3]


def test_a_folder_that_cannot_be_read_is_a_problem_with_a_name(
    bench: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bench, 1)
    (bench.folder / "shut").mkdir()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("shut"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr("verl_shipper.collect.walk.os.scandir", scandir)
    bench.settle()

    assert bench.collector is not None
    (problem,) = bench.collector.problems()
    assert "shut" in problem
    assert "Permission denied" in problem
    assert seen_steps(bench) == [0]


def test_a_ledger_that_takes_nothing_ends_the_process_and_the_next_goes_on(
    bench: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bench, 3)
    real = ledger.Ledger.settle
    calls = [0]

    def settle(*given: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise sqlite3.OperationalError("database or disk is full")
        real(*given)

    monkeypatch.setattr(ledger.Ledger, "settle", settle)
    with pytest.raises(sqlite3.OperationalError):
        bench.settle()
    bench.kill()
    bench.settle()

    assert seen_steps(bench) == [0, 1, 2]


def test_a_million_names_cost_no_more_than_their_share(bench: Collected) -> None:
    """A thousand stand for them: what one look costs is bounded, whatever there is."""
    for number in range(1000):
        (bench.folder / f"{number}.jsonl").touch()
    bench.settle()
    (only,) = bench.start()._places
    began_s = time.thread_time()
    only._begin(time.monotonic())
    only.look(time.monotonic())

    assert time.thread_time() - began_s < 1.0


def test_lines_of_metrics_do_not_wait_for_a_large_trace(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_shipper.collect.collector.TURN_S", 0.0)
    (bench.folder / "a.pickle").write_bytes(os.urandom(20_000_000))
    bench.until(lambda: bench.of("file"), "the trace is under way")
    (bench.folder / "x.jsonl").write_text(dump(steps(0, 3)))
    bench.until(lambda: len(bench.of("metrics")) == 3, "lines arrive")
    is_whole = any("sha256" in record.body for record in bench.of("file"))
    bench.settle()

    assert not is_whole
    assert sum("sha256" in record.body for record in bench.of("file")) == 1
