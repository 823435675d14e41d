"""P29: two daemons on one spool, a stale lock, a recycled pid. The second gives way, and no lock needs hand work."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import oracle
from support.daemon import Daemon, shipper
from support.site import Site
from support.trainer import Ledger, counting_trainer

pytestmark = pytest.mark.alone

HELD = 3


def _assert_gives_way(result: subprocess.CompletedProcess[str], took_s: float, holder: int) -> None:
    assert result.returncode == HELD, f"exit code {result.returncode}: {result.stderr}"
    assert took_s < 3, f"it took {took_s:.1f} s to give way"
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, f"one clear line, not {len(lines)}: {lines}"
    assert str(holder) in lines[0], f"the holder {holder} is not named: {lines[0]}"


def _second(site: Site, *arguments: str | Path) -> tuple[subprocess.CompletedProcess[str], float]:
    began_s = time.monotonic()
    result = shipper(site, "run", *arguments, timeout_s=20)
    return result, time.monotonic() - began_s


@pytest.mark.parametrize("shared", ["everything", "spool", "state", "socket"])
def test_p29_a_second_daemon_gives_way_and_the_first_still_receives(site: Site, tmp_path: Path, shared: str) -> None:
    other = Site(tmp_path / "other")
    if shared in ("everything", "spool"):
        other.spool = site.spool
    if shared in ("everything", "state"):
        other.state = site.state
    arguments = [*other.file_backend()]
    if shared == "socket":
        arguments += ["--socket", site.socket]
    ledger = Ledger(site.root / "ledger")

    with (
        Daemon(site, *site.file_backend()) as daemon,
        counting_trainer(site, ledger, count=1500, pace_s=0.002) as trainer,
    ):
        ledger.wait_for(100)
        result, took_s = _second(other, *arguments)
        trainer.wait()
        status = daemon.wait_settled(1502)
    other.close()

    _assert_gives_way(result, took_s, daemon.pid)
    lines = oracle.read_lines(site.output("count", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(1500)], "file")
    oracle.assert_law(status, pending=0)


def _locks(site: Site) -> list[Path]:
    """Lock and pid files, by their names."""
    found = []
    for folder in (site.spool, site.state):
        found += [path for path in folder.rglob("*") if path.is_file() and path.name.rpartition(".")[2] in LOCK_ENDINGS]
    return found


LOCK_ENDINGS = ("lock", "pid")


@pytest.fixture
def sleeper() -> Iterator[int]:
    """The pid of a program that has nothing to do with us."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as process:
        yield process.pid
        process.kill()


@pytest.mark.parametrize("state", ["as left", "empty", "pid of another", "garbage", "removed", "read-only"])
def test_p29_a_lock_left_behind_needs_no_hand_work(site: Site, sleeper: int, state: str) -> None:
    ledger = Ledger(site.root / "ledger")
    daemon = Daemon(site, *site.file_backend()).start()
    with daemon, counting_trainer(site, ledger, count=800, pace_s=0.002) as trainer:
        ledger.wait_for(100)
        daemon.kill()
        locks = _locks(site)
        assert locks, "no lock file found"
        for path in locks:
            if state == "empty":
                path.write_bytes(b"")
            elif state == "pid of another":
                path.write_text(f"{sleeper}\n")
            elif state == "garbage":
                path.write_bytes(b"\xff\x00" * 3000)
            elif state == "removed":
                path.unlink()
            elif state == "read-only":
                path.chmod(0o400)

        daemon.start()
        trainer.wait()
        status = daemon.wait_settled(802)

    lines = oracle.read_lines(site.output("count", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(800)], "file")
    oracle.assert_law(status, pending=0)


def test_a_lane_that_outlives_its_daemon_does_not_keep_the_next_one_out(site: Site) -> None:
    """Sibling: children must not inherit the lock; a killed daemon's lanes hold nothing."""
    with Daemon(site, *site.file_backend()) as daemon:
        daemon.lanes()
        for _ in range(3):
            daemon.kill()
            daemon.start()

        assert daemon.is_running()


def test_status_and_cat_work_beside_a_running_daemon_and_without_one(site: Site) -> None:
    """Sibling: looking never takes a lock that a daemon needs."""
    ledger = Ledger(site.root / "ledger")
    counting_trainer(site, ledger, count=10, pace_s=0).wait()
    with Daemon(site, *site.file_backend()) as daemon:
        daemon.wait_settled(12)
        for path in _locks(site):
            with open(path, "rb") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        daemon.stop()

    result = shipper(site, "status", "--json")

    assert result.returncode == 0, result.stderr
