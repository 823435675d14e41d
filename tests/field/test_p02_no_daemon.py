"""P02: the helper process is absent at start, or dies in the middle, and takes the job with it. Not here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support import oracle
from support.daemon import Daemon, shipper
from support.site import Site
from support.trainer import Ledger, counting_trainer, run_script

pytestmark = pytest.mark.alone

ALONE = """
import time
from verl_shipper_client import Client

began_s = time.perf_counter()
client = Client("count", "exp", run_id="r1", config={"lr": 1e-4})
made_s = time.perf_counter() - began_s
for step in range(100):
    client.log({"n": float(step)}, step=step)
client.finish(exit_code=0)
assert made_s < 2, made_s
"""


def test_p02a_without_a_daemon_the_records_wait_on_disk_for_a_later_one(site: Site) -> None:
    run_script(site, ALONE)
    told = shipper(site, "cat", site.spool)
    kept = [json.loads(line) for line in told.stdout.splitlines()]
    assert sum(record["kind"] == "metrics" for record in kept) == 100

    with Daemon(site, *site.file_backend()) as daemon:
        status = daemon.wait_settled(102)

    lines = oracle.read_lines(site.output("count", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(100)], "file")
    oracle.assert_law(status, pending=0)


def test_p02b_a_daemon_killed_in_the_middle_is_not_noticed_by_training(site: Site) -> None:
    ledger = Ledger(site.root / "ledger")
    daemon = Daemon(site, *site.file_backend()).start()

    with daemon, counting_trainer(site, ledger, count=200, pace_s=0.02) as trainer:
        ledger.wait_for(50)
        daemon.kill()
        ledger.wait_for(120)
        daemon.start()
        trainer.wait()
        status = daemon.wait_settled(202)

    assert "Error" not in trainer.words()
    lines = oracle.read_lines(site.output("count", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(200)], "file")
    oracle.assert_law(status, pending=0)


def test_a_socket_without_anybody_behind_it_is_as_good_as_none(site: Site) -> None:
    """Sibling: the socket's file is there, its owner is not; and something else sits where the socket should be."""
    os.makedirs(os.path.dirname(site.socket))
    Path(site.socket).write_text("no socket")

    run_script(site, ALONE)
    with Daemon(site, *site.file_backend()) as daemon:
        daemon.wait_settled(102)

    lines = oracle.read_lines(site.output("count", "exp", "r1"))
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(100)], "file")
