"""Where no launcher says enough, ranks agree through the store of their process group: no collective, no waiting."""

from __future__ import annotations

import json
import socket
import sys
import time
import types
from typing import Any

import pytest

from support.site import Site
from support.trainer import run_script
from verl_shipper_client import launcher
from verl_shipper_client.torch import agreement, distributed

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

# Processes of mp.spawn find each other through a file. `late`: rank 0 comes much later; `alone`: rank 1 only.
SPAWN = """
import json, os, sys, time
import torch.distributed as dist
import torch.multiprocessing as mp
from verl_shipper_client.torch import DistributedClient

def rank_main(rank, folder, how):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    dist.barrier()
    found = None
    if how != "alone" or rank == 1:
        if how == "late" and rank == 0:
            time.sleep(3)
        began = time.monotonic()
        client, again, other = (DistributedClient("p", name) for name in ("e", "e", "other"))
        took_s = time.monotonic() - began
        client.log({"x": 1.0}, step=0)
        found = [client.rank, client.world, client._is_head, client.run_id, again.run_id, other.run_id, took_s]
        for each in (client, again, other):
            each.finish(timeout_s=0)
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(rank_main, (sys.argv[1], sys.argv[2]), nprocs=2)
"""
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}


def _spawn(site: Site, how: str, **env: str) -> list[Any]:
    run_script(site, SPAWN, site.root, how, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env})
    return [json.loads((site.root / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("how", ["at once", "late"])
def test_the_ranks_of_a_process_group_are_one_run_whenever_they_come(site: Site, how: str) -> None:
    first, second = _spawn(site, how)

    assert [first[:3], second[:3]] == [[0, 2, True], [1, 2, False]]
    assert first[3] == first[4] == second[3] == second[4], "the same names are the same run"
    assert first[5] == second[5] != first[3], "other names are another one"
    assert second[6] < 2, "no rank waits for another"


def test_a_rank_that_alone_makes_a_client_waits_for_nobody(site: Site) -> None:
    _, second = _spawn(site, "alone")

    assert second[:2] == [1, 2]
    assert second[6] < 2


@pytest.mark.parametrize("tasks", ["1", "2", "4"])
def test_a_process_group_that_says_otherwise_than_the_launcher_is_believed(site: Site, tasks: str) -> None:
    """A task of Slurm spawns its ranks by itself: all of them inherit the task's variables."""
    first, second = _spawn(site, "at once", **SRUN, SLURM_NTASKS=tasks)

    assert [first[:3], second[:3]] == [[0, 2, True], [1, 2, False]]
    assert first[3] == second[3]


def test_a_store_that_never_answers_costs_a_bounded_time_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], site: Site
) -> None:
    """Something listens at the address of torchrun's store, and is none."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        monkeypatch.setattr(agreement, "STORE_S", 2.0)
        for name, value in {
            launcher.TORCHRUN_ID: "none",
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(deaf.getsockname()[1]),
        }.items():
            monkeypatch.setenv(name, value)
        began_s = time.monotonic()

        client = distributed.DistributedClient("p", "e", spool_dir=site.spool)

        assert time.monotonic() - began_s < 15
        client.finish(timeout_s=0)
    assert len(client.run_id) == 16
    assert capfd.readouterr().err.count("rank 1 of 2 logs to a run of its own") == 1


@pytest.mark.parametrize(
    "variables",
    [{}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}],
    ids=["nothing", "no port", "no number"],
)
def test_an_address_that_is_none_is_no_agreement(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert agreement.run_id(("p", "e"), of_torchrun=True) == ""


def test_a_process_group_without_a_store_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(is_initialized=lambda: True, _get_default_store=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", module)

    assert agreement.run_id(("p", "e"), of_torchrun=False) == ""
