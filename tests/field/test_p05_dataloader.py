"""P05 with a real DataLoader: workers by fork, spawn and forkserver log to the run, hang never, harm nothing."""

from __future__ import annotations

import pytest

from support import oracle
from support.daemon import Daemon
from support.site import Site
from support.trainer import run_script

pytestmark = [pytest.mark.torch, pytest.mark.alone, pytest.mark.timeout(280)]

# Every repeat has four new workers; each takes one sample, logs once and ends. Then the parent goes on.
TRAIN = """
import os, sys, warnings
import torch
from torch.utils.data import DataLoader, Dataset
from verl_shipper_client import Client

warnings.simplefilter("ignore")
method, repeats = sys.argv[1], int(sys.argv[2])

class Samples(Dataset):
    def __init__(self, client, first):
        self.client, self.first = client, first

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.client.log({"child": float(self.first + index)}, step=self.first + index)
        return torch.tensor([os.getpid()])

if __name__ == "__main__":
    torch.set_num_threads(1)
    client = Client("p05", "exp", run_id="r1")
    for repeat in range(repeats):
        client.log({"parent": float(repeat)}, step=repeat)
        loader = DataLoader(Samples(client, repeat * 4), batch_size=1, num_workers=4, multiprocessing_context=method)
        pids = {int(batch) for batch in loader}
        assert len(pids) == 4 and os.getpid() not in pids, pids
    for step in range(repeats, repeats + 100):
        client.log({"parent": float(step)}, step=step)
    client.finish(exit_code=0)
"""
# Workers that stay: one stream each for all epochs.
PERSISTENT = """
import os, sys
import torch
from torch.utils.data import DataLoader, Dataset
from verl_shipper_client import Client

class Samples(Dataset):
    def __init__(self, client):
        self.client, self.calls = client, 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.calls += 1
        self.client.log({f"child/{index}": float(self.calls)}, step=self.calls)
        return index

if __name__ == "__main__":
    client = Client("p05", "exp", run_id="r1")
    loader = DataLoader(
        Samples(client), batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context=sys.argv[1]
    )
    for epoch in range(5):
        assert len(list(loader)) == 2
        client.log({"epoch": float(epoch)}, step=epoch)
    del loader
    client.finish(exit_code=0)
"""


@pytest.mark.parametrize(("method", "repeats"), [("fork", 20), ("spawn", 1), ("forkserver", 2)])
def test_p05_workers_of_a_dataloader_that_log_once_deliver_and_harm_nothing(
    site: Site, method: str, repeats: int
) -> None:
    logged = repeats * 5 + 102

    with Daemon(site, *site.file_backend()) as daemon:
        run_script(site, TRAIN, method, repeats, timeout_s=200, env={"OMP_NUM_THREADS": "1"})
        status = daemon.wait_settled(logged)

    lines = oracle.read_lines(site.output("p05", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    parents, children = repeats + 100, repeats * 4
    oracle.assert_exactly(oracle.values(lines, "parent"), [(n, float(n)) for n in range(parents)], "parent")
    oracle.assert_exactly(oracle.values(lines, "child"), [(n, float(n)) for n in range(children)], "children")
    assert len(oracle.of_kind(lines, "run_start")) == 1, "a worker is not a new start of the run"
    assert len(oracle.of_kind(lines, "run_finish")) == 1, "the end of a worker is not the end of the run"
    oracle.assert_law(status, pending=0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_p05_workers_that_stay_have_one_stream_each_for_all_epochs(site: Site, method: str) -> None:
    with Daemon(site, *site.file_backend()) as daemon:
        run_script(site, PERSISTENT, method, timeout_s=120, env={"OMP_NUM_THREADS": "1"})
        daemon.wait_settled(27)

    lines = oracle.read_lines(site.output("p05", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    streams = {line.stream_id for line in lines if any(key.startswith("child") for key in line.data)}
    assert len(streams) == 2
    assert len(lines) == 27


def test_p05_workers_without_a_daemon_end_at_once_and_are_found_later(site: Site) -> None:
    """Sibling: an epoch must not wait at its end for a daemon that is not there."""
    run_script(site, TRAIN, "forkserver", 3, timeout_s=100, env={"OMP_NUM_THREADS": "1"})

    with Daemon(site, *site.file_backend()) as daemon:
        daemon.wait_settled(117)

    lines = oracle.read_lines(site.output("p05", "exp", "r1"))
    oracle.assert_exactly(oracle.values(lines, "child"), [(n, float(n)) for n in range(12)], "children")
