"""The supervisor and real lane processes: dead, silent and stubborn ones are replaced or ended; a stop has an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes import is_alive, kill, wait_for, wait_gone
from support.streams import frame, make_header
from unit.shipper.plugged import plug
from verl_shipper import supervisor as supervisor_module
from verl_shipper.ingest import Ingest
from verl_shipper.supervisor import HEALTHY_S, SILENT_S, STOP_S, Orders, Supervisor

PATIENCE_S = 40.0


class Bench:
    """A supervisor over a node spool with one stream. `skew_s` moves its clock ahead of the machine's."""

    def __init__(self, root: Path) -> None:
        self.out = root / "out"
        self.ingest = Ingest(str(root / "state"), 10**9)
        self.ingest.open()
        self.header = make_header()
        self.ingest.greet(self.header)
        self.supervisor = Supervisor(str(root / "state"), self.ingest.spool_dir, "WARNING")
        self.skew_s = 0.0

    def log(self, *numbers: int) -> None:
        for number in numbers:
            self.ingest.take(self.header.stream_id, self.ingest.end(self.header.stream_id), frame(number))
        self.ingest.settle()

    def add(self, backend: str, **settings: Any) -> None:
        wanted = {name: child.orders for name, child in self.supervisor.children.items()}
        wanted[backend] = Orders({"out": str(self.out), **settings})
        self.supervisor.apply(wanted, "WARNING", time.monotonic() + self.skew_s)

    def apply(self, *backends: str, **more: Any) -> None:
        wanted = {backend: Orders({"out": str(self.out)}, more) for backend in backends}
        self.supervisor.apply(wanted, "WARNING", time.monotonic() + self.skew_s)

    def watch(self) -> None:
        self.supervisor.watch(time.monotonic() + self.skew_s)

    def until(self, condition: Callable[[], object], what: str) -> None:
        def watched() -> object:
            self.watch()
            return condition()

        wait_for(watched, PATIENCE_S, what, pause_s=0.02)

    def lines(self) -> list[str]:
        return self.out.read_text().split() if self.out.exists() else []

    @property
    def pids(self) -> dict[str, int]:
        return self.supervisor.pids()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("PYTHONPATH", plug(tmp_path / "plug"))
    monkeypatch.setattr(supervisor_module, "STOP_S", 0.5)  # hung lanes shall not cost every test five seconds
    made = Bench(tmp_path)
    yield made
    made.supervisor.stop()
    made.ingest.close()


def test_lanes_deliver_and_end_with_their_supervisor(bench: Bench) -> None:
    bench.add("plug_ok")
    bench.log(0, 1, 2)
    bench.until(lambda: bench.lines() == ["0", "1", "2"], "all is delivered")
    (pid,) = bench.pids.values()

    bench.supervisor.stop()

    assert not is_alive(pid)
    assert bench.pids == {}


def test_a_lane_that_was_killed_is_started_again_and_goes_on(bench: Bench) -> None:
    bench.add("plug_ok")
    bench.log(0)
    bench.until(lambda: bench.lines() == ["0"], "the first is delivered")
    (pid,) = bench.pids.values()
    kill(pid)
    bench.log(1)

    bench.until(lambda: list(dict.fromkeys(bench.lines())) == ["0", "1"], "the second too")

    assert bench.pids["plug_ok"] != pid
    assert "code -9" in bench.supervisor.troubles()[0]
    bench.skew_s += HEALTHY_S + 1
    bench.until(lambda: not bench.supervisor.troubles(), "it is forgiven")


def test_a_lane_that_keeps_dying_is_started_ever_more_slowly_and_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_shipper.supervisor.random.random", lambda: 0.99)
    bench.add("plug_crash")
    pauses = []
    for deaths in (1, 2, 3):
        child = bench.supervisor.children["plug_crash"]
        bench.until(lambda: child.deaths == deaths, "it dies")  # noqa: B023 - used before the loop goes on
        pauses.append(child.start_at_s - time.monotonic() - bench.skew_s)
        bench.skew_s += max(pauses[-1], 0.0)

    assert pauses == sorted(pauses)
    assert pauses[-1] > 1.5
    assert bench.supervisor.troubles() == ["lane plug_crash ended with code 7, 3 times"]


def test_a_silent_lane_is_killed_and_replaced(bench: Bench) -> None:
    bench.add("plug_silent")
    bench.watch()
    pid = bench.pids["plug_silent"]
    bench.skew_s = SILENT_S + 1
    bench.watch()

    wait_gone([pid], PATIENCE_S)
    bench.until(lambda: bench.supervisor.children["plug_silent"].deaths == 1, "it is buried")
    bench.skew_s += 60
    bench.until(lambda: "plug_silent" in bench.pids, "another one is started")
    assert bench.pids["plug_silent"] != pid


def test_a_stopped_lane_counts_as_silent(bench: Bench) -> None:
    bench.add("plug_ok")
    bench.log(0)
    bench.until(lambda: bench.lines() == ["0"], "it delivers")
    pid = bench.pids["plug_ok"]
    os.kill(pid, signal.SIGSTOP)
    bench.watch()
    bench.skew_s = SILENT_S + 1
    bench.watch()

    wait_gone([pid], PATIENCE_S)


def test_a_lane_in_an_upload_still_beats(bench: Bench) -> None:
    bench.add("plug_hang")
    bench.log(0)
    bench.until(lambda: bench.lines() == ["hung"], "it hangs")
    child = bench.supervisor.children["plug_hang"]
    before = child.beat_at_s

    bench.until(lambda: child.beat_at_s > before, "it beats")

    assert child.deaths == 0


def test_one_sick_lane_does_not_touch_the_others(bench: Bench) -> None:
    for name in ("plug_crash", "plug_hang", "plug_silent", "plug_ok"):
        bench.add(name)
    bench.log(0, 1)

    bench.until(lambda: {"0", "1"} <= set(bench.lines()), "the well one delivers")


@pytest.mark.parametrize("backend", ["plug_hang", "plug_stubborn"])
def test_a_stop_ends_soon_whatever_a_lane_does(bench: Bench, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_S", STOP_S)
    bench.add(backend)
    bench.log(0)
    bench.until(bench.lines, "it is at work")
    (pid,) = bench.pids.values()
    began_s = time.monotonic()

    bench.supervisor.stop()

    assert time.monotonic() - began_s < 8.0
    assert not is_alive(pid)


def test_a_lane_ends_when_its_daemon_is_gone(bench: Bench) -> None:
    bench.add("plug_ok")
    bench.log(0)
    bench.until(bench.lines, "it is at work")
    child = bench.supervisor.children["plug_ok"]
    process = child.process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()

    assert process.wait(PATIENCE_S) == 0


def test_the_lane_of_a_killed_daemon_is_waited_for(
    bench: Bench, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bench.add("plug_ok")
    bench.log(0)
    bench.until(bench.lines, "the first lane is at work")
    second = Supervisor(str(tmp_path / "state"), bench.ingest.spool_dir, "WARNING")
    request.addfinalizer(second.stop)
    second.apply({"plug_ok": Orders({"out": str(bench.out)})}, "WARNING", time.monotonic())
    second.watch(time.monotonic())
    child = second.children["plug_ok"]

    def waits() -> bool:
        second.watch(time.monotonic())
        return child.beat_at_s > child.started_s

    wait_for(waits, PATIENCE_S, "it waits")
    bench.log(1)
    bench.until(lambda: bench.lines() == ["0", "1"], "the first lane delivers")
    kill(bench.pids["plug_ok"])
    bench.log(2)

    # A lane killed between delivery and commit delivers again: this backend cannot tell.
    wait_for(lambda: list(dict.fromkeys(bench.lines())) == ["0", "1", "2"], PATIENCE_S, "the second goes on")


def test_a_lane_whose_state_cannot_be_opened_says_so_in_a_line(
    bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state" / "lanes").write_text("in the way")
    bench.add("plug_ok")

    bench.until(bench.supervisor.troubles, "it ends")

    assert "plug_ok" in bench.supervisor.troubles()[0]


@pytest.mark.parametrize("failing", ["pipe", "program"])
def test_a_process_that_cannot_be_started_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    if failing == "pipe":

        def no_pipe() -> tuple[int, int]:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr("verl_shipper.supervisor.os.pipe", no_pipe)
    else:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    bench.add("plug_ok")
    bench.watch()
    assert "cannot start" in bench.supervisor.troubles()[0]
    assert bench.pids == {}
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", str(bench.out.parent / "plug"))

    bench.skew_s = 61
    bench.log(0)
    bench.until(lambda: bench.lines() == ["0"], "it starts and delivers")


def test_a_process_that_takes_no_orders_is_ended_and_not_leaked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    bench.add("plug_ok", filling="x" * 10**7)  # more than a pipe holds, to a program that reads nothing
    bench.watch()

    assert "cannot start" in bench.supervisor.troubles()[0]
    assert bench.pids == {}


def test_settings_travel_on_the_lanes_standard_input_only(bench: Bench) -> None:
    bench.add("plug_ok", api_key="very-secret")
    bench.log(0)
    bench.until(bench.lines, "it is at work")
    (pid,) = bench.pids.values()

    for name in ("cmdline", "environ"):
        assert b"very-secret" not in Path(f"/proc/{pid}/{name}").read_bytes()
    listed = subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    assert "very-secret" not in listed


# Other orders


def test_lanes_come_and_go_and_those_with_the_same_orders_stay(bench: Bench) -> None:
    bench.apply("plug_ok", "plug_silent")
    bench.log(0)
    bench.until(lambda: bench.lines() == ["0"] and len(bench.pids) == 2, "both are there")
    before = bench.pids

    bench.apply("plug_ok", "plug_hang")
    bench.until(lambda: "plug_hang" in bench.pids, "the new one is there")
    bench.until(lambda: "plug_silent" not in bench.pids, "the old one is gone")

    assert bench.pids["plug_ok"] == before["plug_ok"]
    assert not is_alive(before["plug_silent"])
    assert bench.supervisor.troubles() == []


def test_a_lane_with_other_orders_is_replaced_at_once_and_nothing_is_lost(bench: Bench) -> None:
    bench.apply("plug_ok")
    for number in range(4):
        bench.log(number)
        bench.until(lambda: len(bench.lines()) == number + 1, "it delivers")  # noqa: B023 - used before the loop goes on
        before = bench.pids["plug_ok"]
        bench.apply("plug_ok", sampling={"traces": {"max_length": number + 1000}})
        bench.until(lambda: bench.pids.get("plug_ok", before) != before, "it is replaced")  # noqa: B023 - same

    bench.log(4)
    bench.until(lambda: bench.lines() == ["0", "1", "2", "3", "4"], "all came once")
    assert bench.supervisor.troubles() == []
    assert bench.supervisor.children["plug_ok"].deaths == 0


def test_nobody_waits_for_a_lane_that_takes_its_time_and_it_is_ended(bench: Bench) -> None:
    bench.apply("plug_stubborn", "plug_ok")
    bench.log(0)
    bench.until(lambda: "0" in bench.lines() and len(bench.pids) == 2, "both are at work")
    pid = bench.pids["plug_stubborn"]
    began_s = time.monotonic()
    bench.apply("plug_ok")
    bench.watch()
    assert time.monotonic() - began_s < 0.4

    bench.until(lambda: not is_alive(pid), "it is ended")
    bench.until(lambda: list(bench.supervisor.children) == ["plug_ok"], "it is forgotten")
    assert bench.supervisor.troubles() == []


def test_a_lane_that_is_wanted_again_before_it_is_gone_starts_again(bench: Bench) -> None:
    bench.apply("plug_ok")
    bench.log(0)
    bench.until(lambda: bench.lines() == ["0"], "it delivers")
    pid = bench.pids["plug_ok"]
    bench.apply()
    bench.apply("plug_ok")
    bench.log(1)

    bench.until(lambda: bench.lines() == ["0", "1"], "it goes on")
    bench.until(lambda: bench.pids.get("plug_ok", pid) != pid, "as another process")


def test_other_orders_end_the_pause_of_a_lane_that_kept_dying(bench: Bench) -> None:
    bench.apply("plug_crash")
    bench.until(lambda: bench.supervisor.children["plug_crash"].deaths == 2, "it dies")
    bench.apply("plug_crash", sampling={"rank": "all"})

    assert bench.supervisor.troubles() == []
    bench.watch()
    assert "plug_crash" in bench.pids
    bench.until(lambda: bench.supervisor.children["plug_crash"].deaths == 1, "it dies again")
    bench.apply()
    assert bench.supervisor.children == {}


def test_a_stop_ends_lanes_that_are_ending(bench: Bench) -> None:
    bench.apply("plug_stubborn")
    bench.log(0)
    bench.until(bench.lines, "it is at work")
    (pid,) = bench.pids.values()
    bench.apply()
    bench.supervisor.stop()

    assert not is_alive(pid)
