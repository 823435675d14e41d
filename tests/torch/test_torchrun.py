"""Real torchrun: all ranks of a job are one run, through restarts; two jobs never are."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import oracle
from support.daemon import Daemon
from support.site import Site
from support.torchrun import one_node, run_jobs, two_nodes
from support.trainer import write_script

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

# No process group is ever made, and no rank waits for another.
TRAIN = """
import os, sys, time
from verl_shipper_client.torch import DistributedClient

with DistributedClient("p", "e", config={"lr": 0.5}) as client:
    for step in range(3):
        client.log({f"loss/{client.rank}": float(step)}, step=step)
"""
# The second rank dies in the first attempt, while the first one is at work; on another node that one dies, too, as it
# would in its next collective: an agent whose own workers are well does not look at the others'.
FAIL_ONCE = """
import os, sys, time
from verl_shipper_client.torch import DistributedClient

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
client = DistributedClient("p", "e")
client.log({f"attempt/{client.rank}": float(attempt)}, step=attempt)
if attempt == 0:
    if client.rank == 1 or os.environ["LOCAL_WORLD_SIZE"] == "1":
        os._exit(3)
    time.sleep(100)  # torchrun ends it
client.finish(exit_code=0)
"""


def _runs(site: Site) -> list[Path]:
    return sorted((site.out / "p").glob("*.jsonl"))


def _arguments(site: Site) -> list[str]:
    return [*site.file_backend(), "--set", "sampling.rank=all"]


def test_two_ranks_on_one_node_are_one_run_with_one_begin_and_one_end(site: Site) -> None:
    with Daemon(site, *_arguments(site)) as daemon:
        run_jobs(site, [one_node(write_script(site, TRAIN))])
        status = daemon.wait_settled(9)

    (path,) = _runs(site)
    lines = oracle.read_lines(path)
    starts = oracle.of_kind(lines, "run_start")
    assert [line.rank for line in starts if not line.data.get("forked")] == [0]
    assert [(line.rank, line.data["exit_code"]) for line in oracle.of_kind(lines, "run_finish")] == [(0, 0)]
    for rank in range(2):
        expected = [(step, float(step)) for step in range(3)]
        oracle.assert_exactly(oracle.values(lines, f"loss/{rank}/rank{rank}"), expected, f"rank {rank}")
    oracle.assert_law(status, pending=0)


def test_two_jobs_at_once_under_the_same_names_are_two_runs(site: Site) -> None:
    script = write_script(site, TRAIN)

    with Daemon(site, *_arguments(site)) as daemon:
        run_jobs(site, [one_node(script), one_node(script)])
        daemon.wait_settled(18)

    assert len(_runs(site)) == 2
    assert all({line.rank for line in oracle.read_lines(path)} == {0, 1} for path in _runs(site))


def test_two_nodes_are_one_run(site: Site) -> None:
    with Daemon(site, *_arguments(site)) as daemon:
        run_jobs(site, two_nodes(write_script(site, TRAIN)))
        daemon.wait_settled(9)

    (path,) = _runs(site)
    assert {line.rank for line in oracle.read_lines(path)} == {0, 1}


@pytest.mark.parametrize("nodes", [1, 2])
def test_workers_that_are_started_again_continue_the_run(site: Site, nodes: int) -> None:
    script = write_script(site, FAIL_ONCE)
    jobs = [one_node(script, "--max-restarts", "1")] if nodes == 1 else two_nodes(script, "--max-restarts", "1")

    with Daemon(site, *_arguments(site)) as daemon:
        run_jobs(site, jobs)
        daemon.wait_settled(9)

    (path,) = _runs(site)
    lines = oracle.read_lines(path)
    for rank in range(2):
        oracle.assert_exactly(oracle.values(lines, f"attempt/{rank}/rank{rank}"), [(0, 0.0), (1, 1.0)], f"rank {rank}")
