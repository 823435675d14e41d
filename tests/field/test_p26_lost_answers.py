"""P26: the answer is lost after the server accepted. Here every point is there once, however often that happens."""

from __future__ import annotations

import pytest

from servers.faults import Fault, Rule
from support import oracle
from support.four_trackers import FourTrackers
from support.mlflow_server import MlflowServer
from support.site import Site
from support.trainer import run_script

TRAINER = """
import sys
from verl_shipper_client import Client

project, run_id, count = sys.argv[1:]
with Client(project, "exp", run_id=run_id, config={"lr": 0.5}) as client:
    for step in range(int(count)):
        client.log({"n": float(step), "twice": 1.0}, step=step)
    client.log_generations([("q", "a", 1.0)], step=5)
    client.log_text("note", "kept", step=6)
"""
# The requests that write, by path and content: those that carry data, then the others, whose answers are lost once.
DATA = {"mlflow": "POST|PUT|PATCH", "wandb": "file_stream|PUT", "swanlab": "house/metrics|objects"}
OTHERS = {"wandb": ("graphql", "mutation"), "swanlab": ("(experiment|profile|state|series)$", "")}


@pytest.mark.parametrize(("fault", "each", "count"), [(Fault.SWALLOW, 2, 300)], ids=["cut"])
def test_p26_answers_that_are_lost_double_nothing(
    site: Site, mlflow_server: MlflowServer, fault: Fault, each: int, count: int
) -> None:
    with FourTrackers(site, mlflow_server, front=True) as trackers:
        for name, server in trackers.servers.items():
            path, part = OTHERS.get(name, ("no others", ""))
            server.rules(Rule(fault, path=DATA[name], each=each), Rule(fault, path=path, contains=part, each=1))
        with trackers.daemon() as daemon:
            run_script(site, TRAINER, trackers.project, "r1", count)
            status = daemon.wait_settled(count + 4, timeout_s=200)
            oracle.assert_law(status, pending=0)

        for name in trackers.names:
            assert status["backends"][name]["delivered"] == count + 4, name
            assert not status["backends"][name]["ignored_values"], name
            assert trackers.runs(name) == 1, name
            assert [step for step, _ in trackers.tables(name, "r1")] == [5], name
            assert trackers.texts(name, "r1") == [(6, "kept")], name
        trackers.assert_values("r1", "n", [(step, float(step)) for step in range(count)])
        trackers.assert_values("r1", "twice", [(step, 1.0) for step in range(count)])
        for name, server in trackers.servers.items():
            assert any(request["fault"] == fault.value for request in server.requests()), name
        wandb = trackers.wandb_run("r1")
        assert (wandb["conflicts"], wandb["gaps"], wandb["lines"]) == (0, 0, count + 2)
        (swanlab,) = trackers.servers["swanlab"].state()["runs"].values()
        assert swanlab["doubles"] == 0
