"""P27: 429, and an expired key. Here the server's wish is followed, and an old key costs only time."""

from __future__ import annotations

import os
import time

from support import oracle
from support.daemon import shipper
from support.four_trackers import KEY, FourTrackers
from support.mlflow_server import MlflowServer
from support.site import Site
from support.trainer import run_script

TRAINER = """
import sys
from verl_shipper_client import Client

project, run_id, runs, first, last = sys.argv[1:]
clients = [Client(project, "exp", run_id=f"{run_id}{number}") for number in range(int(runs))]
for step in range(int(first), int(last)):
    for client in clients:
        client.log({"n": float(step)}, step=step)
for client in clients:
    client.finish(exit_code=0)
"""
IS_LONG = bool(os.environ.get("VERL_SHIPPER_TEST_LONG"))
RUNS = 32
PER_WINDOW = 50
WINDOW_S, RETRY_AFTER_S = (60, 7) if IS_LONG else (3, 2)
REFUSED_S = 90 if IS_LONG else 20
FRESH_KEY = {"wandb": "f" * 40, "swanlab": "fedcba9876543210fedcb"}


def test_p27a_32_runs_share_a_small_allowance_and_ask_nothing_before_its_time(
    site: Site, mlflow_server: MlflowServer
) -> None:
    with FourTrackers(site, mlflow_server, ["mlflow"], front=True) as trackers:
        front = trackers.servers["mlflow"]
        front.options(per_window=[PER_WINDOW, WINDOW_S, RETRY_AFTER_S])
        with trackers.daemon() as daemon:
            run_script(site, TRAINER, trackers.project, "r", RUNS, 0, 10)
            status = daemon.wait_settled(RUNS * 12, timeout_s=1200 if IS_LONG else 120)
            oracle.assert_law(status, pending=0)
            seen = front.state()["seen"]

        assert status["backends"]["mlflow"]["delivered"] == RUNS * 12
        for number in range(RUNS):
            trackers.assert_values(f"r{number}", "n", [(step, float(step)) for step in range(10)])
        limited_s = [request["time_s"] for request in seen if request["limited"]]
        assert limited_s, "the allowance was never used up"
        # Requests that were on their way when the answer came are nobody's fault.
        early = [
            (request["time_s"] - since_s, request["method"], request["path"])
            for since_s in limited_s
            for request in seen
            if 0.3 < request["time_s"] - since_s < RETRY_AFTER_S - 0.05
        ]
        assert not early, early[:8]


def test_p27b_an_expired_key_parks_and_the_new_one_goes_on_where_the_old_one_stopped(
    site: Site, mlflow_server: MlflowServer
) -> None:
    other = Site(site.root / "another-user")
    with FourTrackers(site, mlflow_server) as trackers, trackers.daemon() as daemon:
        run_script(site, TRAINER, trackers.project, "mine", 2, 0, 20)
        daemon.wait_settled(44, timeout_s=120)
        for name, key in FRESH_KEY.items():
            trackers.servers[name].options(api_key=key)
        expired_s = time.monotonic()
        run_script(site, TRAINER, trackers.project, "mine", 2, 20, 40)
        daemon.wait_settled(88, backends=["file", "mlflow"], timeout_s=60)
        status = daemon.wait_until(
            lambda told: all(told["backends"][name]["parked"] == 2 for name in FRESH_KEY), 120, "both keys are refused"
        )
        for name in FRESH_KEY:
            figures = status["backends"][name]
            assert (figures["delivered"], figures["dead_lettered"], figures["dropped"]) == (44, 0, {}), name
            assert "key refused" in figures["last_error"], figures["last_error"]
            assert str(trackers.key_file(name)) in figures["last_error"], figures["last_error"]
        words = shipper(site, "status", env={"COLUMNS": "400"}).stdout
        assert "PARKED: key refused" in words
        assert not any(key in words for key in (*KEY.values(), *FRESH_KEY.values()))

        # Somebody else on this machine has a key that is accepted.
        with FourTrackers(other, mlflow_server, ["file"]) as theirs:
            theirs.names, theirs.project = ["file", "wandb", "swanlab"], trackers.project
            theirs.servers |= {name: trackers.servers[name] for name in FRESH_KEY}
            for name, key in FRESH_KEY.items():
                theirs.put_key(name, key)
            with theirs.daemon() as others_daemon:
                run_script(other, TRAINER, trackers.project, "theirs", 1, 0, 20)
                others = others_daemon.wait_settled(22, timeout_s=60)
            oracle.assert_law(others, pending=0)
            theirs.assert_values("theirs0", "n", [(step, float(step)) for step in range(20)])

        time.sleep(max(expired_s + REFUSED_S - time.monotonic(), 0.0))  # for as long as the case says
        for name, key in FRESH_KEY.items():
            trackers.put_key(name, key)
        status = daemon.wait_settled(88, timeout_s=120)
        oracle.assert_law(status, pending=0)

        for name in trackers.names:
            assert status["backends"][name]["delivered"] == 88, name
        for number in range(2):
            trackers.assert_values(f"mine{number}", "n", [(step, float(step)) for step in range(40)])
