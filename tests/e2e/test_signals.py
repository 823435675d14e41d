"""Signals that launchers send: what ends a daemon in order, what is only passed on to its command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import oracle
from support.daemon import SHIPPER, Daemon, without_samples
from support.processes import wait_for
from support.site import Site
from support.trainer import write_script


def ignores_usr1(pid: int) -> bool:
    """Before its first line a process has not said so yet."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return bool(mask & 1 << (signal.SIGUSR1 - 1))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_daemon_ends_in_order_by_what_a_launcher_can_send(site: Site, number: signal.Signals) -> None:
    """srun makes a SIGKILL of a SIGTERM it is sent, and passes SIGUSR1 on."""
    with Daemon(site, *site.file_backend()) as daemon:
        daemon.wait_ready()
        daemon.stop(number=number)
        assert "Traceback" not in daemon.all_words()


def test_a_signal_to_the_whole_group_ends_no_lane_before_its_daemon(site: Site) -> None:
    with Daemon(site, *site.file_backend()) as daemon:
        daemon.wait_ready()
        wait_for(lambda: daemon.lanes() and all(map(ignores_usr1, daemon.lanes())), 30, "a lane is at work")
        for pid in daemon.lanes():
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGUSR2)
        before = daemon.lanes()
        daemon.stop(number=signal.SIGUSR1)
        assert before
        assert "lane" not in daemon.all_words()  # none was lost and started again


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_command_gets_the_signals_that_mean_something_to_it_and_goes_on(site: Site, number: signal.Signals) -> None:
    source = """
import signal, sys, time
from verl_shipper_client import Client

came = []
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda received, _frame: came.append(received))
client = Client("spine", "first", run_id="r1")
client.log({"loss": 1.0}, step=1)
open(sys.argv[1], "w").close()
while not came:
    time.sleep(0.05)
client.log({"signal": came[0]}, step=2)
"""
    up = site.root / "up"
    launcher = [
        *SHIPPER,
        "run",
        *without_samples([]),
        *site.file_backend(),
        "--",
        sys.executable,
        str(write_script(site, source)),
        str(up),
    ]
    with subprocess.Popen(launcher, env=site.env(), cwd=site.root, stderr=subprocess.PIPE, text=True) as process:
        wait_for(up.exists, 30, "the trainer has logged")
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)

    assert process.returncode == 0, errors
    lines = oracle.read_lines(site.output("spine", "first", "r1"))
    assert oracle.values(lines, "signal") == [(2, float(number))]
