"""P19: daemon and trainers of different users. Nobody reads another's text, training goes on, and it is said aloud."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from support import oracle
from support.daemon import SHIPPER, Daemon, shipper
from support.processes import wait_for
from support.site import Site
from support.trainer import as_user, usable_root, write_script

DAEMON_UID = 1500
TRAINER_UID = 2000

TRAINER = """
import os, sys
os.umask(int(sys.argv[1], 8))
from verl_shipper_client import Client

client = Client("p19", "exp", run_id="r1")
for step in range(100):
    client.log({"n": float(step)}, step=step)
client.log_text("secret", "the text of a user", step=1)
client.log_generations([("question", "answer", 1.0)], step=1)
client.finish(exit_code=0, timeout_s=2)
"""
RECORDS = 104

pytestmark = [pytest.mark.alone, pytest.mark.skipif(not usable_root(), reason="needs root to become other users")]


@pytest.fixture
def theirs(open_folder: Path) -> Site:
    """The trainers' places."""
    return Site(open_folder / "theirs")


@pytest.fixture
def ours(open_folder: Path) -> Site:
    """The daemon's places, owned by its user."""
    site = Site(open_folder / "ours")
    for folder in (site.root, site.home, site.out):
        os.chown(folder, DAEMON_UID, DAEMON_UID)
    return site


def _train(site: Site, uid: int, umask: str, socket: str) -> None:
    """Run the trainer as `uid`; exit code 0 whatever it cannot reach."""
    for folder in (site.root, site.home):
        os.chown(folder, uid, uid)
    script = write_script(site, TRAINER)
    result = subprocess.run(
        [*as_user(uid), sys.executable, str(script), umask],
        env=site.env(VERL_SHIPPER_SOCKET=socket),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def _open_to_others(folder: Path) -> list[str]:
    """Files and folders that somebody else could reach and read or write. A closed folder closes what it holds."""
    mode = folder.lstat().st_mode
    if stat.S_ISLNK(mode):
        return []
    found = [f"{folder} {stat.S_IMODE(mode):o}"] if mode & 0o002 or (mode & 0o004 and stat.S_ISREG(mode)) else []
    if stat.S_ISDIR(mode) and mode & 0o001:
        for path in sorted(folder.iterdir()):
            found += _open_to_others(path)
    return found


@pytest.mark.parametrize(("uid", "umask"), [(TRAINER_UID, "077"), (TRAINER_UID, "000"), (0, "022")])
def test_p19_a_trainer_of_another_user_keeps_its_records_and_the_daemon_says_why(
    ours: Site, theirs: Site, uid: int, umask: str
) -> None:
    launcher = [*as_user(DAEMON_UID), *SHIPPER]
    arguments = [*ours.file_backend(), "--adopt", str(ours.spool), "--adopt", str(theirs.spool)]
    socket = ours.socket

    with Daemon(ours, *arguments, launcher=launcher) as daemon:
        _train(theirs, uid, umask, socket)
        assert not _open_to_others(theirs.spool)
        assert not _open_to_others(ours.spool)
        assert not _open_to_others(ours.state)

        def said() -> bool:
            told = shipper(ours, "status", "--state-dir", ours.state)
            text = told.stdout + told.stderr + daemon.words()
            return str(theirs.spool) in text and str(uid) in text

        wait_for(said, 30, f"status or the log names {theirs.spool} and its owner {uid}", pause_s=0.3)
        assert daemon.is_running()
        assert daemon.stop() < 10

    with Daemon(theirs, *theirs.file_backend(), name="root") as daemon:
        status = daemon.wait_settled(RECORDS)

    lines = oracle.read_lines(theirs.output("p19", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(100)], "file")
    oracle.assert_law(status, pending=0)


def test_a_daemon_of_the_same_other_user_delivers_and_keeps_text_private_in_folders_that_are_not(ours: Site) -> None:
    """Sibling: both are uid 1500, without a name in the user table; somebody made the folders beforehand, mode 0755."""
    for folder in (ours.spool, ours.state):
        folder.mkdir(mode=0o755)
        os.chown(folder, DAEMON_UID, DAEMON_UID)
    launcher = [*as_user(DAEMON_UID), *SHIPPER]

    with Daemon(ours, *ours.file_backend(), launcher=launcher) as daemon:
        _train(ours, DAEMON_UID, "022", ours.socket)
        daemon.wait_settled(RECORDS)
        assert not _open_to_others(ours.state)
        assert daemon.stop(number=signal.SIGINT) < 10

    lines = oracle.read_lines(ours.output("p19", "exp", "r1"))
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(100)], "file")


def test_a_spool_that_cannot_be_made_never_stops_training(theirs: Site) -> None:
    """Sibling: the spool's parent belongs to root; the trainer is told once and goes on."""
    (theirs.root / "closed").mkdir(mode=0o755)
    site = Site(theirs.root, spool=theirs.root / "closed" / "spool")

    _train(site, TRAINER_UID, "022", site.socket)

    assert not site.spool.exists()
