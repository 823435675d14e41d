"""The daemon's side of the collector: a process only while there is something to do, and an end in order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.collecting import dump, samples
from support.processes import command_line, is_alive, kill, wait_for
from support.streams import make_header
from verl_shipper import collecting as collecting_module
from verl_shipper.collecting import Collecting
from verl_shipper.config import Config
from verl_shipper.config_watch import WatchEntry
from verl_shipper.ingest import Ingest
from verl_shipper_spool.header import this_process

WAIT_S = 30.0


class Bench:
    """A daemon's collecting without the rest of the daemon."""

    def __init__(self, root: Path) -> None:
        self.data = root / "data"
        self.data.mkdir()
        self.state = root / "state"
        self.ingest = Ingest(str(self.state), 10**9)
        self.ingest.open()
        self.watching = Config({}, watch=(WatchEntry(str(self.data), stable_s=0.1, poll_s=0.1),))
        self.made = self.make(Config({}))

    def make(self, config: Config, *, works: bool = True, ends: bool = False) -> Collecting:
        self.made = Collecting(str(self.state), self.ingest, config, works=works, ends=ends)
        return self.made

    def turn(self) -> None:
        self.made.turn(time.monotonic())
        self.ingest.settle()

    def until(self, condition: object, what: str) -> None:
        assert callable(condition)

        def met() -> object:
            self.turn()
            return condition()

        wait_for(met, WAIT_S, what, pause_s=0.02)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(collecting_module, "LIVE_LOOK_S", 0.05)
    monkeypatch.setattr(collecting_module, "LOOK_S", 0.05)
    made = Bench(tmp_path)
    yield made
    made.made.stop()
    made.ingest.close()


def test_where_there_is_nothing_to_do_there_is_no_process(bench: Bench) -> None:
    for config in (Config({}), Config({}, system_metrics=True)):
        collecting = bench.make(config)
        for _ in range(5):
            bench.turn()
            time.sleep(0.02)

        assert collecting.pid() is None
        assert collecting.settled()
        assert collecting.settled_ns() is None
        assert collecting.problems() == set()


def test_a_run_that_lives_here_wants_its_node_sampled_and_one_that_ended_does_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting_module, "LINGER_S", 0.2)
    collecting = bench.make(Config({}, system_metrics=True))
    header = make_header(process=this_process())
    bench.ingest.greet(header)
    bench.until(collecting.pid, "a collector")
    bench.ingest.seal(header.stream_id, [])
    bench.until(lambda: collecting.pid() is None, "it ends")

    gone = make_header(process=replace(this_process(), start_ticks=1))
    bench.ingest.greet(gone)
    for _ in range(10):
        bench.turn()
        time.sleep(0.02)
    assert collecting.pid() is None


def test_what_is_collected_is_taken_and_told_as_settled(bench: Bench) -> None:
    collecting = bench.make(bench.watching)
    (bench.data / "1.jsonl").write_text(dump(samples(1, 1)))
    began_ns = time.monotonic_ns()

    bench.until(lambda: (collecting.settled_ns() or 0) > began_ns, "it is settled")

    assert sum(stream.end for stream in bench.ingest.streams.values()) > 0
    assert collecting.settled()


def test_finishing_takes_what_is_left_ends_the_process_and_seals_its_streams(bench: Bench) -> None:
    collecting = bench.make(bench.watching)
    bench.until(collecting.pid, "a collector")
    (bench.data / "1.jsonl").write_text(dump(samples(1, 1)))
    collecting.finish()
    assert not collecting.settled()
    bench.until(collecting.settled, "it is finished")

    assert collecting.pid() is None
    assert len(bench.ingest.streams) == 2
    assert all(stream.sealed for stream in bench.ingest.streams.values())
    for _ in range(5):
        bench.turn()
    assert collecting.pid() is None, "what has come to its end is not begun again"


def test_a_collector_that_was_killed_is_started_again(bench: Bench) -> None:
    collecting = bench.make(bench.watching)
    bench.until(collecting.pid, "a collector")
    pid = collecting.pid()
    assert pid is not None
    kill(pid)
    bench.until(lambda: collecting.pid() not in (None, pid), "another one")

    assert any("collector ended with code -9" in problem for problem in collecting.problems())


def test_a_daemon_of_other_peoples_folders_collects_nothing(bench: Bench) -> None:
    collecting = bench.make(bench.watching, works=False, ends=True)
    for _ in range(5):
        bench.turn()

    assert collecting.pid() is None
    assert collecting.settled()


def test_a_stop_ends_it(bench: Bench) -> None:
    collecting = bench.make(bench.watching)
    bench.until(collecting.pid, "a collector")
    pid = collecting.pid()
    assert pid is not None
    wait_for(lambda: "collect.process" in command_line(pid), WAIT_S, "it is that program")
    collecting.tell_to_stop()
    collecting.stop()

    assert not is_alive(pid)
