"""P22: the disk is full. `log()` neither raises nor blocks, what is missing is counted exactly, and space heals it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import oracle
from support.daemon import Daemon
from support.disk import require_disks, small_disk
from support.processes import wait_for
from support.site import Site
from support.trainer import Ledger, Trainer, counting_trainer, write_script

pytestmark = pytest.mark.alone

# Logs ~1 KiB records until the disk is full and for two seconds more, slowly until it gets a word, then 100 more.
TRAINER = """
import json, os, sys, time
from verl_shipper_client import Client

disk, ledger_path, full_path, go_path, report_path = sys.argv[1:]
ledger = os.open(ledger_path, os.O_WRONLY | os.O_APPEND)
pad = {f"key{number:03d}": number / 3 for number in range(62)}
client = Client("p22", "exp", run_id="r1", spool_dir=os.path.join(disk, "spool"))
worst_s = 0.0
count = 0

def log():
    global worst_s, count
    began_s = time.perf_counter()
    client.log({"n": float(count), **pad}, step=count)
    worst_s = max(worst_s, time.perf_counter() - began_s)
    os.write(ledger, b"%d %.6f\\n" % (count, time.time()))
    count += 1

def full():
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize < 8192 or status.f_favail == 0

full_at_s = None
while full_at_s is None or time.monotonic() - full_at_s < 2:
    log()
    if full_at_s is None and count % 20 == 0 and full():
        full_at_s = time.monotonic()
    if full_at_s is not None:
        time.sleep(0.001)
open(full_path, "w").close()
while not os.path.exists(go_path):
    log()
    time.sleep(0.05)
for _ in range(100):
    log()
    time.sleep(0.02)
client.finish(exit_code=0, timeout_s=10)
with open(report_path, "w") as report:
    json.dump({"count": count, "worst_s": worst_s}, report)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    require_disks()
    with small_disk(tmp_path) as path:
        yield path


@contextlib.contextmanager
def _trainer(site: Site, disk: Path) -> Iterator[tuple[Trainer, Ledger]]:
    ledger = Ledger(site.root / "ledger")
    names = [site.root / name for name in ("full", "go", "report.json")]
    with Trainer(site, write_script(site, TRAINER), disk, ledger.path, *names) as trainer:
        yield trainer, ledger


def _free_bytes(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def _check(site: Site, status: oracle.Status, trainer: Trainer) -> list[int]:
    """What is missing is what was counted; returns the values that arrived."""
    report = json.loads((site.root / "report.json").read_text())
    lines = oracle.read_lines(site.output("p22", "exp", "r1"))
    oracle.assert_once_in_order(lines, gaps=True)
    found = [int(value) for _, value in oracle.values(lines, "n")]
    missing = report["count"] - len(found)
    run = status["backends"]["file"]["runs"]["r1"]
    assert sum(run["dropped"].values()) == missing, f"{missing} are missing, told: {run['dropped']}"
    oracle.assert_law(status, pending=0)
    assert report["worst_s"] < 0.5, f"log() blocked for {report['worst_s']:.3f} s"
    warnings = [line for line in trainer.words().splitlines() if line.strip()]
    assert len(warnings) <= 2, f"a warning per cause, not per record: {len(warnings)} lines: {warnings[:3]}"
    return found


CAME = ["after the disk was full", "before, and was stopped"]


@pytest.mark.parametrize("came", CAME)
def test_p22_a_full_disk_costs_counted_records_and_heals(site: Site, disk: Path, came: str) -> None:
    site.spool = disk / "spool"
    daemon = Daemon(site, *site.file_backend())

    with contextlib.closing(daemon):
        if came.startswith("before"):
            daemon.start()
            daemon.pause()
        with _trainer(site, disk) as (trainer, ledger):
            wait_for((site.root / "full").exists, 60, "the disk is full")
            before_go = ledger.last()
            if came.startswith("before"):
                daemon.resume()
            else:
                daemon.start()
            wait_for(lambda: _free_bytes(disk) > 256 * 1024, 60, "the daemon took the records and space came back")
            (site.root / "go").touch()
            trainer.wait(timeout_s=30)
            status = daemon.wait_settled(before_go, timeout_s=60)

    found = _check(site, status, trainer)
    kept_before = [value for value in found if value <= before_go]
    assert len(kept_before) > 2500, f"only {len(kept_before)} records of 1 KiB fitted into 4 MiB"
    assert kept_before[:2500] == list(range(2500)), "records written before the limit are intact"
    end = ledger.last() + 1  # it went on logging while the daemon came
    assert found[-50:] == list(range(end - 50, end)), "after space returned records are kept again"
    assert sum(run["dropped"].get("disk_full", 0) for run in status["backends"]["file"]["runs"].values()) > 0


@pytest.mark.parametrize("came", CAME)
def test_p22_a_disk_full_run_that_is_killed_still_tells_its_losses(site: Site, disk: Path, came: str) -> None:
    """Sibling: the trainer never sees space again; it is killed while the disk is full."""
    site.spool = disk / "spool"
    daemon = Daemon(site, *site.file_backend())

    with contextlib.closing(daemon):
        if came.startswith("before"):
            daemon.start()
            daemon.pause()
        with _trainer(site, disk) as (trainer, ledger):
            wait_for((site.root / "full").exists, 60, "the disk is full")
            trainer.kill()
        logged = len(ledger.values())
        if came.startswith("before"):
            daemon.resume()
        else:
            daemon.start()
        status = daemon.wait_settled(logged, timeout_s=60)

    lines = oracle.read_lines(site.output("p22", "exp", "r1"))
    oracle.assert_once_in_order(lines, gaps=True)
    run = status["backends"]["file"]["runs"]["r1"]
    missing = logged - len(oracle.values(lines, "n"))
    assert sum(run["dropped"].values()) == missing, f"{missing} are missing, told: {run['dropped']}"
    oracle.assert_law(status, pending=0)


INODES = """
import os, sys, time
from verl_shipper_client import Client

disk, filler, go_path = sys.argv[1:]
client = Client("p22", "exp", run_id="r1", spool_dir=os.path.join(disk, "spool"))
for step in range(100):
    client.log({"n": float(step)}, step=step)
open(go_path + ".ready", "w").close()
while not os.path.exists(go_path):
    time.sleep(0.05)
time.sleep(1.5)
for step in range(100, 200):
    client.log({"n": float(step)}, step=step)
client.finish(exit_code=0, timeout_s=10)
"""


def test_a_disk_without_inodes_never_stops_training_and_heals(tmp_path: Path, site: Site) -> None:
    """Sibling: no stream can be begun for want of inodes; with inodes again records flow, and losses are told."""
    require_disks()
    with small_disk(tmp_path, size_mib=16, inodes=60) as disk, Daemon(site, *site.file_backend()) as daemon:
        fillers = []
        with contextlib.suppress(OSError):
            for number in range(100):
                path = disk / f"filler-{number}"
                path.touch()
                fillers.append(path)
        go = site.root / "go"
        env = {"VERL_SHIPPER_SOCKET": site.socket}
        with Trainer(site, write_script(site, INODES), disk, "-", go, env=env) as trainer:
            wait_for(go.with_name("go.ready").exists, 30, "the first hundred are logged")
            for path in fillers:
                path.unlink()
            go.touch()
            trainer.wait()
        assert "Traceback" not in trainer.words()
        status = daemon.wait_settled(100, timeout_s=30)

    lines = oracle.read_lines(site.output("p22", "exp", "r1"))
    found = [int(value) for _, value in oracle.values(lines, "n")]
    assert found[-100:] == list(range(100, 200)), "with inodes again, records are kept again"
    run = status["backends"]["file"]["runs"]["r1"]
    lost = 200 - len(found)
    assert sum(run["dropped"].values()) >= lost, f"{lost} are missing, told: {run['dropped']}"
    oracle.assert_law(status, pending=0)


def test_a_daemon_whose_own_disk_is_full_loses_nothing(tmp_path: Path, site: Site) -> None:
    """Sibling: the node spool has no room. The client's spool holds everything until there is some."""
    require_disks()
    ledger = Ledger(site.root / "ledger")
    with small_disk(tmp_path, size_mib=4) as disk:
        site.state = disk / "state"
        with Daemon(site, *site.file_backend()) as daemon:
            filler = disk / "filler"
            fd = os.open(filler, os.O_WRONLY | os.O_CREAT)
            with contextlib.suppress(OSError):
                while os.write(fd, bytes(4096)):
                    pass
            os.close(fd)
            with counting_trainer(site, ledger, count=2000, pace_s=0.001, pad_bytes=200) as trainer:
                trainer.wait(timeout_s=30)
            time.sleep(1)
            assert daemon.is_running(), daemon.words()
            filler.unlink()
            status = daemon.wait_settled(2002, timeout_s=60)

    lines = oracle.read_lines(site.output("count", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(2000)], "file")
    oracle.assert_law(status, pending=0)
