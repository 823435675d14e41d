"""A configuration that follows its file: taken over once it stands still, and kept as it was while it is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import wait_for
from verl_shipper.config import Request
from verl_shipper.reload import STILL_S, Reload

FIRST = "backends: {console: {}}\n"
SECOND = FIRST + "sampling: {log_frequency: 10}\n"
BROKEN = FIRST + "sampling: {log_freqency: 10}\n"


class Bench:
    """A file, and a Reload whose clock is ours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = 1000.0
        path.write_text(FIRST)
        request = Request(str(path))
        self.reload = Reload(request, request.load())
        self.look()
        assert self.reload.take() is None, "nothing new at the beginning"

    def look(self) -> None:
        self.reload.look(self.now_s)
        self.now_s += STILL_S + 0.1
        self.reload.look(self.now_s)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "config.yaml")


def test_a_change_is_taken_over_once(bench: Bench) -> None:
    bench.path.write_text(SECOND)
    bench.look()

    found = bench.reload.take()
    assert found is not None
    assert found.sampling == {"console": {"log_frequency": 10}}
    bench.look()
    assert bench.reload.take() is None


def test_a_file_that_is_being_written_is_left_alone_until_it_stands_still(bench: Bench) -> None:
    for length in range(len(FIRST), len(SECOND)):
        bench.path.write_text(SECOND[:length])
        assert bench.reload.look(bench.now_s), "look again soon"
        bench.now_s += STILL_S / 2
    bench.path.write_text(SECOND)
    bench.look()

    assert bench.reload.take() is not None
    assert bench.reload.problem == ""


@pytest.mark.parametrize("text", [BROKEN, "", "backends: [", None, "backends: {mlflow: {tracking_uri: /a/folder}}"])
def test_a_broken_file_changes_nothing_and_is_told_once_until_it_is_mended(
    bench: Bench, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    if text is None:
        bench.path.unlink()
    else:
        bench.path.write_text(text)
    for _ in range(3):
        bench.look()
        bench.reload.ask()
    bench.look()

    assert bench.reload.take() is None
    assert "the old one stays in use" in bench.reload.problem
    assert len(caplog.records) == 1
    bench.path.write_text(FIRST)
    bench.look()
    assert bench.reload.problem == ""
    assert bench.reload.take() is None, "it is what the daemon has"


def test_a_broken_file_may_be_followed_by_another_configuration(bench: Bench) -> None:
    bench.path.write_text(BROKEN)
    bench.look()
    bench.path.write_text(SECOND)
    bench.look()

    assert bench.reload.take() is not None
    assert bench.reload.problem == ""


def test_a_failure_that_nobody_thought_of_is_a_broken_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a backend's own")

    monkeypatch.setattr("verl_shipper.reload.check_backends", fail)
    bench.path.write_text(SECOND)
    bench.look()

    assert bench.reload.take() is None
    assert "RuntimeError: a backend's own" in bench.reload.problem


def test_whoever_asks_need_not_wait_for_a_change(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PROJECT", "from-now-on")
    bench.look()
    assert bench.reload.take() is None
    bench.reload.ask()
    bench.reload.look(bench.now_s)

    found = bench.reload.take()
    assert found is not None
    assert found.project == "from-now-on"


def test_without_a_file_there_is_nothing_to_follow_but_it_may_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(None, backends=("console",))
    reload = Reload(request, request.load())
    assert not reload.look(0.0)
    monkeypatch.setenv("VERL_EXPERIMENT", "e")
    reload.ask()
    reload.look(1.0)

    found = reload.take()
    assert found is not None
    assert found.experiment == "e"


def test_the_latest_of_several_changes_counts(bench: Bench) -> None:
    for frequency in (10, 20):
        bench.path.write_text(SECOND.replace("10", str(frequency)))
        bench.look()

    found = bench.reload.take()
    assert found is not None
    assert found.sampling["console"]["log_frequency"] == 20
    assert bench.reload.take() is None


def test_the_thread_sees_a_change_by_itself_and_ends(bench: Bench) -> None:
    bench.reload.start()
    try:
        bench.path.write_text(SECOND)
        bench.reload.hasten()
        wait_for(lambda: bench.reload.take() is not None, 20.0, "the change is seen")
    finally:
        bench.reload.stop()

    assert bench.reload._thread is not None
    assert not bench.reload._thread.is_alive()
