"""Power failures of the host: an ext4 image with the spool and the daemon's state is cut off without flushing.

What the daemon had acknowledged or delivered is there afterwards, once. What had only been logged may lose its last
second. Nothing that a power failure leaves behind (NUL tails, empty files) keeps the daemon from starting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support import oracle
from support.daemon import Daemon
from support.disk import PowerLossDisk, require_disks
from support.processes import descendants, wait_for, wait_gone
from support.seeds import seeded
from support.site import Site
from support.spools import segments
from support.trainer import Ledger, counting_trainer

pytestmark = pytest.mark.alone

# The promise is one second; the margin is for a machine of two cores that also runs the trainer and the daemon.
LOST_S_MAX = 1.0 + 1.5
PACE_S = 0.001


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[PowerLossDisk]:
    require_disks()
    with PowerLossDisk(tmp_path / "d") as made:
        yield made


@dataclass
class Evidence:
    """What may never be taken back: ids seen at the destination, and how many records the status called logged."""

    ids: set[str] = field(default_factory=set)
    logged: int = 0
    values: set[int] = field(default_factory=set)  # logged so long ago that they must be on the disk


def _survived(site: Site, evidence: Evidence) -> None:
    lines = oracle.read_lines(site.output("count", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    ids = {line.id for line in lines}
    missing = evidence.ids - ids
    assert not missing, f"{len(missing)} delivered records are gone: {sorted(missing)[:5]}"
    found = {int(value) for _, value in oracle.values(lines, "n")}
    lost = sorted(evidence.values - found)
    assert not lost, f"{len(lost)} records older than {LOST_S_MAX} s are lost: {lost[:5]} .. {lost[-5:]}"


def _cut_power(disk: PowerLossDisk, daemon: Daemon, *trainers: int) -> None:
    """The moment itself: the disk first, then the processes, as nothing that runs may save anything any more."""
    pids = [*trainers, *([daemon.pid, *descendants(daemon.pid)] if daemon.is_running() else [])]
    disk.fail_power()
    for pid in pids:
        os.kill(pid, 9)
    if daemon.process is not None:
        daemon.process.wait(timeout=10)
    wait_gone(pids, 10)
    disk.unmount()
    disk.mount()


def test_what_was_acknowledged_survives_20_power_failures_once(tmp_path: Path, disk: PowerLossDisk) -> None:
    rng = seeded("power loss")
    site = Site(tmp_path, spool=disk.path / "spool", state=disk.path / "state")
    ledger = Ledger(tmp_path / "ledger")
    daemon = Daemon(site, *site.file_backend())
    evidence = Evidence()

    try:
        for round_number in range(20):
            daemon.start()  # it starts each time, whatever the failure before has left
            if round_number:
                daemon.wait_settled(evidence.logged)
                _survived(site, evidence)
            first = ledger.last() + 2
            with counting_trainer(site, ledger, first=first, pace_s=PACE_S) as trainer:
                ledger.wait_for(first)
                time.sleep(rng.uniform(0.1, 1.0) if round_number % 7 else LOST_S_MAX + 0.5)
                if rng.random() < 0.5:
                    status = daemon.status()
                    evidence.logged = status["backends"]["file"]["logged"]
                delivered = oracle.complete_lines(site.output("count", "exp", "r1"))
                evidence.ids |= {line.id for line in delivered}
                old_s = time.time() - LOST_S_MAX
                evidence.values |= {value for value, time_s in ledger.entries() if value >= first and time_s < old_s}
                _cut_power(disk, daemon, trainer.pid)
        daemon.start()
        status = daemon.wait_settled(evidence.logged)
        _survived(site, evidence)
        oracle.assert_law(status, pending=0)
    finally:
        daemon.close()


@pytest.mark.parametrize("pad_bytes", [0, 8000], ids=["small", "many segments"])
def test_without_a_daemon_a_power_failure_costs_at_most_the_last_second(
    tmp_path: Path, disk: PowerLossDisk, pad_bytes: int
) -> None:
    site = Site(tmp_path, spool=disk.path / "spool", state=disk.path / "state")
    ledger = Ledger(tmp_path / "ledger")
    daemon = Daemon(site, *site.file_backend())
    evidence = Evidence()

    try:
        for _ in range(2):
            first = ledger.last() + 2
            with counting_trainer(site, ledger, first=first, pace_s=PACE_S, pad_bytes=pad_bytes) as trainer:
                ledger.wait_for(first)
                time.sleep(LOST_S_MAX + 1.5)
                old_s = time.time() - LOST_S_MAX
                evidence.values |= {value for value, time_s in ledger.entries() if value >= first and time_s < old_s}
                _cut_power(disk, daemon, trainer.pid)
        daemon.start()
        status = daemon.wait_settled()
        _survived(site, evidence)
        oracle.assert_law(status, pending=0)
    finally:
        daemon.close()


def test_output_that_status_calls_delivered_survives_on_the_same_disk(tmp_path: Path, disk: PowerLossDisk) -> None:
    rng = seeded("power loss, output too")
    site = Site(tmp_path, spool=disk.path / "spool", state=disk.path / "state")
    site.out = disk.path / "out"
    ledger = Ledger(tmp_path / "ledger")
    daemon = Daemon(site, *site.file_backend())
    output = site.output("count", "exp", "r1")
    delivered = 0

    try:
        for round_number in range(4):
            daemon.start()
            if round_number:
                daemon.wait_settled(delivered)
                lines = oracle.read_lines(output)
                oracle.assert_once_in_order(lines)
                assert len(lines) >= delivered, f"{delivered} were delivered, {len(lines)} are left"
            first = ledger.last() + 2
            with counting_trainer(site, ledger, first=first, pace_s=PACE_S) as trainer:
                ledger.wait_for(first)
                time.sleep(rng.uniform(0.1, 1.0))
                delivered = daemon.status()["backends"]["file"]["delivered"]
                _cut_power(disk, daemon, trainer.pid)
    finally:
        daemon.close()


@pytest.mark.parametrize("tail", ["nul", "empty", "nul header", "empty header"])
def test_what_a_power_failure_leaves_in_a_client_spool_is_survived(site: Site, tail: str) -> None:
    """The same damage by hand, so that it happens for certain: 4096 NULs behind the last frame, files of 0 bytes."""
    ledger = Ledger(site.root / "ledger")
    counting_trainer(site, ledger, run_id="hurt", count=100, pace_s=0).wait()
    counting_trainer(site, ledger, run_id="sound", first=100, count=100, pace_s=0).wait()
    hurt = site.stream_folders()[0]
    last = segments(hurt)[-1]
    if tail == "nul":
        last.write_bytes(last.read_bytes() + bytes(4096))
    elif tail == "empty":
        last.write_bytes(b"")
    elif tail == "nul header":
        (hurt / "stream").write_bytes(bytes(4096))
    else:
        (hurt / "stream").write_bytes(b"")

    with Daemon(site, *site.file_backend()) as daemon:
        daemon.wait_until(
            lambda _: len(oracle.complete_lines(site.output("count", "exp", "sound"))) == 102, 30, "the sound run"
        )
        if tail == "nul":
            output = site.output("count", "exp", "hurt")
            wait_for(lambda: len(oracle.complete_lines(output)) == 102, 30, "the run with the NUL tail")
        status = daemon.wait_settled(102)

    oracle.assert_law(status)
    assert hurt.exists() or tail in ("nul", "empty"), "a stream that nobody could read must be kept"
