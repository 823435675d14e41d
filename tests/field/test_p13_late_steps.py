"""P13: steps arriving out of order are dropped. Here each stands at its own step; what cannot is counted."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from support import oracle
from support.four_trackers import FourTrackers
from support.mlflow_server import MlflowServer
from support.site import Site
from support.trainer import Trainer, run_script, write_script

TRAINER = """
import json, sys, time
from verl_shipper_client import Client

project, run_id, place, key, hold_s, steps = sys.argv[1:]
began_s = time.monotonic()
with Client(project, "exp", run_id=run_id) as client:
    for step in json.loads(steps):
        due_s = began_s + float(hold_s) + 0.02 * step * (float(hold_s) > 0)
        time.sleep(max(due_s - time.monotonic(), 0.0))
        client.log({key: step / 2}, step=step)
        if place == "0":
            time.sleep(0.02)
"""
TRAINED = list(range(1, 101))
JUDGED = list(range(10, 101, 10))
HELD_S = 3.0


def _points(steps: list[int]) -> list[tuple[int | None, Any]]:
    return [(step, step / 2) for step in steps]


def test_p13_records_that_were_held_back_stand_at_their_own_step(site: Site, mlflow_server: MlflowServer) -> None:
    script = write_script(site, TRAINER)
    # Siblings: an evaluation with a counter of its own, and one whose order nobody knows.
    shuffled = random.Random(13).sample(range(2, 400), 200)

    with FourTrackers(site, mlflow_server) as trackers, trackers.daemon() as daemon:
        project = trackers.project
        with (
            Trainer(site, script, project, "held", 0, "loss", 0, json.dumps(TRAINED)) as first,
            Trainer(site, script, project, "held", 1, "val/acc", HELD_S, json.dumps(JUDGED)) as second,
            Trainer(
                site, script, project, "odd", 0, "loss", 0, json.dumps([step + 10_000 for step in TRAINED])
            ) as third,
            Trainer(site, script, project, "odd", 3, "eval/count", 0, json.dumps(list(range(20)))) as fourth,
            Trainer(site, script, project, "odd", 5, "eval/any", 0, json.dumps(shuffled)) as fifth,
        ):
            for trainer in (first, second, third, fourth, fifth):
                trainer.wait()
        status = daemon.wait_settled(110 + 4 + 320 + 6, timeout_s=120)
        oracle.assert_law(status, pending=0)

        trackers.assert_values("held", "loss", _points(TRAINED))
        trackers.assert_values("held", "val/acc", _points(JUDGED))
        trackers.assert_values("odd", "loss", _points([step + 10_000 for step in TRAINED]))
        trackers.assert_values("odd", "eval/count", _points(list(range(20))))
        trackers.assert_values("odd", "eval/any", _points(shuffled), ["file", "mlflow", "wandb"])
        _assert_rest_is_counted(trackers, status, "odd", "eval/any", shuffled)
        for name in trackers.names:
            assert status["backends"][name]["delivered"] == 440, name
            assert not status["backends"][name]["runs"]["held"]["ignored_values"], name


def test_p13_a_spool_that_is_brought_later_is_shown_at_its_own_steps(
    site: Site, mlflow_server: MlflowServer, tmp_path: Path
) -> None:
    """The folder of a second process is adopted when the first has long been delivered. Sibling: both use one name."""
    late = tmp_path / "late-spool"
    elsewhere = {"VERL_SHIPPER_SPOOL_DIR": str(late)}
    beside = [step + 1 for step in JUDGED[:-1]]

    with FourTrackers(site, mlflow_server) as trackers, trackers.daemon() as daemon:
        project = trackers.project
        for run_id in ("late", "same"):
            run_script(site, TRAINER, project, run_id, 0, "loss", 0, json.dumps(TRAINED))
        daemon.wait_settled(204, timeout_s=120)
        daemon.stop()
        run_script(site, TRAINER, project, "late", 1, "val/acc", 0, json.dumps(JUDGED), env=elsewhere)
        run_script(site, TRAINER, project, "same", 1, "loss", 0, json.dumps(beside), env=elsewhere)
        daemon.arguments += ["--adopt", str(late)]
        daemon.start()
        status = daemon.wait_settled(204 + 14 + 9, timeout_s=120)
        oracle.assert_law(status, pending=0)

        trackers.assert_values("late", "loss", _points(TRAINED))
        trackers.assert_values("late", "val/acc", _points(JUDGED))
        trackers.assert_values("same", "loss", _points(TRAINED + beside), ["file", "mlflow", "wandb"])
        _assert_rest_is_counted(trackers, status, "same", "loss", TRAINED + beside)


def _assert_rest_is_counted(
    trackers: FourTrackers, status: oracle.Status, run_id: str, key: str, steps: list[int]
) -> None:
    """SwanLab takes only what is above the last step of its key: the rest is counted, and nothing is made up."""
    found = trackers.values("swanlab", run_id, key)
    counted = status["backends"]["swanlab"]["runs"][run_id]["ignored_values"]
    assert len(set(found)) == len(found), found
    assert set(found) <= set(_points(steps))
    assert len(found) + sum(counted.values()) == len(steps), counted
    assert counted.keys() <= {"late_step", "same_step"}
