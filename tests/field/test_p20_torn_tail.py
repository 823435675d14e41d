"""P20: a torn last record. Whatever byte the writer was killed at, all before it arrive, and all that follow."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from support import oracle
from support.daemon import Daemon
from support.seeds import seeded
from support.site import Site
from support.spools import clone_stream, flip_byte, frames, segments
from support.trainer import run_script

pytestmark = pytest.mark.alone

FIRST = """
import os
from verl_shipper_client import Client

client = Client("p20", "exp", run_id="model")
for step in range(1000):
    client.log({"n": float(step)}, step=step)
os._exit(0)
"""
RESUMED = """
import sys
from verl_shipper_client import Client

clients = [Client("p20", "exp", run_id=run_id) for run_id in sys.argv[1:]]
for client in clients:
    for step in range(1000, 1010):
        client.log({"n": float(step)}, step=step)
for client in clients:
    client.finish(exit_code=0, timeout_s=20)
"""
# start + 999 + start of the second life + 10 + finish
RECORDS = 1 + 999 + 1 + 10 + 1


@pytest.fixture
def model(site: Site) -> Path:
    """The stream of a writer that was killed behind its 1000th record, moved out of the spool."""
    run_script(site, FIRST)
    (folder,) = site.stream_folders()
    kept = site.root / "model"
    shutil.move(folder, kept)
    return kept


def _deliver(site: Site, run_ids: list[str]) -> tuple[oracle.Status, str]:
    with Daemon(site, *site.file_backend()) as daemon:
        run_script(site, RESUMED, *run_ids, timeout_s=120)
        status = daemon.wait_until(
            lambda status: (
                all(
                    status["backends"]["file"]["runs"].get(run_id, {"delivered": 0})["delivered"] >= RECORDS
                    for run_id in run_ids
                )
                and status["backends"]["file"]["pending"] == 0
            ),
            timeout_s=90,
            what="every run has all its records",
        )
        assert daemon.is_running()
        return status, daemon.words()


def _assert_run(site: Site, run_id: str, whole: int) -> None:
    lines = oracle.read_lines(site.output("p20", "exp", run_id))
    oracle.assert_once_in_order(lines)
    expected = [(n, float(n)) for n in [*range(whole), *range(1000, 1010)]]
    oracle.assert_exactly(oracle.values(lines, "n"), expected, run_id)


def test_p20_every_cut_of_the_last_record_costs_that_record_only(site: Site, model: Path) -> None:
    last = frames(segments(model)[-1])[-1]
    cuts = range(last.start, last.end)
    run_ids = [f"cut-{cut - last.start:03d}" for cut in cuts]
    for cut, run_id in zip(cuts, run_ids, strict=True):
        with open(segments(clone_stream(model, site.spool, run_id))[-1], "r+b") as file:
            file.truncate(cut)

    status, words = _deliver(site, run_ids)

    for run_id in run_ids:
        _assert_run(site, run_id, 999)
    oracle.assert_law(status, pending=0)
    torn = [line for line in words.splitlines() if "torn" in line]
    assert len(torn) == len(run_ids) - 1, f"{len(torn)} lines speak of torn records, {len(run_ids) - 1} were torn"
    assert all(str(last.start) in line for line in torn), f"the offset {last.start} is not told: {torn[0]}"


def test_p20_strange_bytes_behind_the_last_record_cost_nothing(site: Site, model: Path) -> None:
    rng = seeded("p20 tails")
    start = segments(model)[-1].read_bytes()[:100]
    tails = {
        "random": rng.randbytes(37),
        "zeros": bytes(4096),
        "magic": b"\xf5vs\x01" + rng.randbytes(30),
        "repeat": start,  # old bytes again, as a reused block would show them
        "ones": b"\xff" * 5000,
    }
    for name, tail in tails.items():
        with open(segments(clone_stream(model, site.spool, name))[-1], "ab") as file:
            file.write(tail)

    status, _ = _deliver(site, list(tails))

    for name in tails:
        lines = oracle.read_lines(site.output("p20", "exp", name))
        doubles = [line for line in lines if lines.count(line) > 1]
        assert not doubles, f"{name}: old bytes were read again: {doubles[:3]}"
        _assert_run(site, name, 1000)
    oracle.assert_law(status, pending=0)


def test_a_damaged_last_record_is_dropped_and_its_neighbours_are_not(site: Site, model: Path) -> None:
    """Sibling: the last record has its length but not its bytes."""
    rng: random.Random = seeded("p20 flips")
    last = frames(segments(model)[-1])[-1]
    run_ids = []
    for offset in sorted(rng.sample(range(last.start, last.end), 12)):
        run_ids.append(f"flip-{offset - last.start:03d}")
        flip_byte(segments(clone_stream(model, site.spool, run_ids[-1]))[-1], offset)

    status, _ = _deliver(site, run_ids)

    for run_id in run_ids:
        _assert_run(site, run_id, 999)
    oracle.assert_law(status, pending=0)
