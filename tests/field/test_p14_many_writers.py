"""P14: one run, many ranks and nodes. Here all of them are one run at every tracker, and nobody is refused."""

from __future__ import annotations

import contextlib

import pytest

from support import oracle
from support.four_trackers import FourTrackers
from support.mlflow_server import MlflowServer
from support.site import Site
from support.trainer import Trainer, write_script

TRAINER = """
import sys
from verl_shipper_client import Client

project, number, steps = sys.argv[1:]
client = Client(project, "exp", config={"lr": 0.5, "from": "all"})
for step in range(int(steps)):
    client.log({f"rank/{number}": step + int(number) / 16}, step=step)
client.finish(exit_code=0)
"""
RUN = "job-4711"


def _second(site: Site) -> Site:
    """Another node: its own spool and state. Home and file system are shared, as on a cluster."""
    other = Site(site.root / "node-2")
    other.home, other.out = site.home, site.out
    return other


@pytest.mark.parametrize(("variable", "writers", "steps"), [("SLURM_PROCID", 4, 50)])
def test_p14_all_ranks_of_two_nodes_are_one_run(
    site: Site, mlflow_server: MlflowServer, variable: str, writers: int, steps: int
) -> None:
    other = _second(site)
    script = write_script(site, TRAINER)
    per_node = writers * (steps + 2)

    with (
        FourTrackers(site, mlflow_server) as trackers,
        trackers.daemon("--set", "sampling.rank=all") as first,
        trackers.daemon("--set", "sampling.rank=all", site=other) as second,
        contextlib.ExitStack() as started,
    ):
        trainers = [
            started.enter_context(
                Trainer(
                    node,
                    script,
                    trackers.project,
                    number,
                    steps,
                    env={"VERL_SHIPPER_RUN_ID": RUN, variable: str(number)},
                )
            )
            for number, node in enumerate([site] * writers + [other] * writers)
        ]
        for trainer in trainers:
            trainer.wait()
        told = [daemon.wait_settled(per_node, timeout_s=200) for daemon in (first, second)]
        for status in told:
            oracle.assert_law(status, pending=0)

        for name in trackers.names:
            assert trackers.runs(name) == 1, name
            assert sum(status["backends"][name]["delivered"] for status in told) == 2 * per_node, name
            for number in range(2 * writers):
                expected = [(step, step + number / 16) for step in range(steps)]
                key = f"rank/{number}/rank{number}" if number else "rank/0"
                oracle.assert_exactly(trackers.values(name, RUN, key), expected, f"{name} {number}")
            shown = trackers.config(name, RUN)
            assert str(shown.get("lr")) == "0.5", (name, shown)
        assert not told[0]["backends"]["mlflow"]["ignored_values"], "the same config again is no news"
        assert trackers.mlflow.run(RUN)["info"]["status"] == "FINISHED"
        wandb = trackers.wandb_run(RUN)
        assert (wandb["conflicts"], wandb["gaps"], wandb["created"], wandb["state"]) == (0, 0, 1, "finished")
        (swanlab,) = trackers.servers["swanlab"].state()["runs"].values()
        assert (swanlab["doubles"], swanlab["state"]) == (0, "FINISHED")
        refused = [request for server in trackers.servers.values() for request in server.requests() if request["fault"]]
        assert not refused
