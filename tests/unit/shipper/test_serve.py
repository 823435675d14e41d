"""Running for a person: in the foreground, beside a command, until a folder is flushed. Signals and exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.processes import wait_for
from support.streams import frame, make_header
from verl_shipper import serve, status
from verl_shipper.config import Config, Request
from verl_shipper.daemon import opened, places_of
from verl_shipper.errors import HeldError, ShipperError
from verl_shipper_client import Client
from verl_shipper_spool.location import SOCKET_VARIABLE, SPOOL_VARIABLE, STATE_VARIABLE


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spool and a state of their own, and lanes that are never started."""
    monkeypatch.setenv(SPOOL_VARIABLE, str(tmp_path / "spool"))
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    monkeypatch.setattr("verl_shipper.supervisor.Supervisor._start", lambda *_: None)


CONFIG = Config({})
CONSOLE = Config({"console": {}})


def _signal_when(condition: Callable[[], bool], number: int) -> threading.Thread:
    """Signal this process once `condition` holds."""

    def act() -> None:
        wait_for(condition, 30.0, "the moment to signal")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


# serve


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_daemon_and_gives_the_handlers_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, number: int
) -> None:
    before = signal.getsignal(number)
    socket = tmp_path / "spool" / "run" / "ingest.sock"
    thread = _signal_when(socket.exists, number)  # the daemon may still be starting: it hears it all the same

    assert serve.serve(CONFIG) == 0

    thread.join()
    assert signal.getsignal(number) == before
    assert "ready on" in capsys.readouterr().err
    assert status.report(str(tmp_path / "state")).daemon["state"] == "stopped"


def test_a_hangup_asks_for_the_configuration_again_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGHUP)
    asked: list[bool] = []
    monkeypatch.setattr("verl_shipper.reload.Reload.ask", lambda _: asked.append(True))
    socket = tmp_path / "spool" / "run" / "ingest.sock"
    threads = [_signal_when(socket.exists, signal.SIGHUP)]
    threads.append(_signal_when(lambda: bool(asked), signal.SIGTERM))

    assert serve.serve(CONSOLE, Request(None, backends=("console",))) == 0

    for thread in threads:
        thread.join()
    assert asked
    assert signal.getsignal(signal.SIGHUP) == before


# beside


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 15)", 143),
    ],
)
def test_the_exit_code_is_the_commands(script: str, code: int) -> None:
    assert serve.beside(CONFIG, [sys.executable, "-c", script], 5.0) == code


def test_a_command_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ShipperError, match="cannot run /nowhere"):
        serve.beside(CONFIG, ["/nowhere/program"], 5.0)


def test_the_command_finds_the_daemon(tmp_path: Path) -> None:
    script = f"""
import os
from pathlib import Path
assert os.environ[{SPOOL_VARIABLE!r}] == {str(tmp_path / "spool")!r}
from verl_shipper_client import Client
client = Client("p", "e", run_id="r")
client.log({{"a": 1}}, step=1)
assert client.finish(0, timeout_s=30.0)
"""
    assert serve.beside(CONFIG, [sys.executable, "-c", script], 5.0) == 0

    assert list(status.report(str(tmp_path / "state")).runs) == ["r"]


def test_a_signal_is_the_commands_to_handle(tmp_path: Path) -> None:
    script = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
open({str(tmp_path / "up")!r}, "w").close()
time.sleep(60)
"""
    thread = _signal_when((tmp_path / "up").exists, signal.SIGTERM)

    assert serve.beside(CONFIG, [sys.executable, "-c", script], 5.0) == 5
    thread.join()


def test_a_command_that_ignores_a_signal_is_killed_after_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "FORWARD_GRACE_S", 0.3)
    script = f"""
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(tmp_path / "up")!r}, "w").close()
time.sleep(60)
"""
    thread = _signal_when((tmp_path / "up").exists, signal.SIGTERM)

    assert serve.beside(CONFIG, [sys.executable, "-c", script], 5.0) == 137
    thread.join()


def test_a_drain_has_an_end_and_says_what_remains(capsys: pytest.CaptureFixture[str]) -> None:
    script = 'from verl_shipper_client import Client; Client("p", "e").log({"a": 1}, step=1)'
    began_s = time.monotonic()

    assert serve.beside(CONSOLE, [sys.executable, "-c", script], 1.0) == 0

    assert time.monotonic() - began_s < 25.0
    words = capsys.readouterr().err
    assert "3 of 3 records are not at console yet" in words
    assert "verl-shipper run" in words


# flush


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShipperError, match="absent"):
        serve.flush(CONFIG, [str(tmp_path / "absent")], 1.0, lambda _report: None)


def test_flush_keeps_its_state_beside_what_it_describes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATE_VARIABLE)
    (tmp_path / "archive").mkdir()

    assert serve.flush(CONFIG, [str(tmp_path / "archive")], 5.0, lambda _report: None) == 0

    assert (tmp_path / "archive" / ".flush-state" / "daemon.sqlite3").exists()


def test_flush_gives_up_when_nothing_moves(tmp_path: Path) -> None:
    with Client("p", "e", spool_dir=tmp_path / "archive") as client:
        client.log({"a": 1}, step=1)
    reports: list[status.Report] = []

    code = serve.flush(CONSOLE, [str(tmp_path / "archive")], 0.5, reports.append)

    assert code == serve.EXIT_REMAINS
    assert reports[-1].pending == 3
    assert any((tmp_path / "archive").iterdir())


def test_flush_ends_at_a_signal(tmp_path: Path) -> None:
    with Client("p", "e", spool_dir=tmp_path / "archive") as client:
        client.log({"a": 1}, step=1)
    looks: list[int] = []
    thread = _signal_when(lambda: len(looks) > 2, signal.SIGTERM)

    code = serve.flush(CONSOLE, [str(tmp_path / "archive")], 60.0, lambda report: looks.append(report.pending))

    thread.join()
    assert code == serve.EXIT_REMAINS


def test_flush_of_a_folder_that_a_daemon_holds_is_refused(tmp_path: Path) -> None:
    with opened(CONFIG, places_of(CONFIG)), pytest.raises(HeldError):
        serve.flush(CONFIG, [str(tmp_path / "spool")], 1.0, lambda _report: None)


def test_flush_without_a_folder_follows_the_daemon_at_work() -> None:
    with opened(CONFIG, places_of(CONFIG)) as daemon:
        daemon.adopt.look(time.monotonic())
        daemon._write_status(state="running")
        assert serve.flush(CONFIG, [], 5.0, lambda _report: None) == 0

    with opened(CONSOLE, places_of(CONSOLE)) as daemon:
        header = make_header()
        daemon.ingest.greet(header)
        daemon.ingest.take(header.stream_id, 0, frame(0))
        daemon.ingest.settle()
        daemon._write_status(state="running")
        assert serve.flush(CONSOLE, [], 0.3, lambda _report: None) == serve.EXIT_REMAINS
