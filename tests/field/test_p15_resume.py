"""P15: resume after a kill. Here the run goes on where it was, and what is logged again follows a rule that is told."""

from __future__ import annotations

from support import oracle
from support.four_trackers import FourTrackers
from support.mlflow_server import MlflowServer
from support.site import Site
from support.trainer import run_script

TRAINER = """
import json, os, signal, sys
from verl_shipper_client import Client

project, config, life, first, last, ends = sys.argv[1:]
config = {**json.loads(config), "long": "x" * 7000} if life != "0" else json.loads(config)
client = Client(project, "exp", config=config)
for step in range(int(first), int(last) + 1):
    client.log({"loss": step + int(life) / 8, f"life/{life}": float(step)}, step=step)
if ends == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
client.finish(exit_code=0)
"""
# Each life: first step, last step. The last one ends well, the others by kill -9.
LIVES = {
    "published": [(0, 60), (41, 90)],
    "from the start": [(0, 20), (0, 30)],
    "three times": [(5, 30), (11, 40), (8, 50)],
}


def test_p15_a_resumed_run_goes_on_and_what_it_repeats_is_kept_or_counted(
    site: Site, mlflow_server: MlflowServer
) -> None:
    logged = 0
    with FourTrackers(site, mlflow_server) as trackers, trackers.daemon() as daemon:
        for life in range(3):
            for name, lives in LIVES.items():
                if life < len(lives):
                    first, last = lives[life]
                    is_end = life == len(lives) - 1
                    config = f'{{"lr": {0.5 + life}, "same": 1}}'
                    run_script(
                        site, TRAINER, trackers.project, config, life, first, last, "well" if is_end else "killed",
                        env={"VERL_SHIPPER_RUN_ID": name.replace(" ", "-")}, code=0 if is_end else -9,
                    )  # fmt: skip
                    logged += last - first + 2 + is_end
            if life == 1:  # sibling: the daemon dies, too, with some of it under way
                daemon.kill()
                daemon.start()
            status = daemon.wait_settled(logged, timeout_s=120)
        oracle.assert_law(status, pending=0)
        for name, lives in LIVES.items():
            _assert_run(trackers, status, name.replace(" ", "-"), lives)


def _assert_run(trackers: FourTrackers, status: oracle.Status, run_id: str, lives: list[tuple[int, int]]) -> None:
    steps = [(life, step) for life, (first, last) in enumerate(lives) for step in range(first, last + 1)]
    everything = [(step, step + life / 8) for life, step in steps]
    trackers.assert_values(run_id, "loss", everything, ["file", "mlflow", "wandb"])
    top, first_wins = -1, []
    for step, value in everything:
        if step > top:
            first_wins.append((step, value))
            top = step
    trackers.assert_values(run_id, "loss", first_wins, ["swanlab"])
    late = status["backends"]["swanlab"]["runs"][run_id]["ignored_values"]
    assert sum(late.values()) == len(everything) - len(first_wins), late
    assert late.keys() <= {"late_step", "same_step"}
    for life in range(len(lives)):
        trackers.assert_values(run_id, f"life/{life}", [(step, float(step)) for of, step in steps if of == life])

    mlflow = status["backends"]["mlflow"]["runs"][run_id]
    assert mlflow["ignored_values"].get("param_changed", 0) >= 1, mlflow
    assert trackers.config("mlflow", run_id)["lr"] == "0.5", "MLflow keeps the first value"
    for name in ("file", "wandb", "swanlab"):
        assert trackers.config(name, run_id)["lr"] == 0.5 + len(lives) - 1, name
        assert trackers.config(name, run_id)["long"].startswith("x" * 100), name
    assert trackers.mlflow.run(run_id)["info"]["status"] == "FINISHED"
    assert trackers.wandb_run(run_id)["state"] == "finished"
    for name in trackers.names:
        figures = status["backends"][name]["runs"][run_id]
        assert figures["delivered"] == figures["logged"], (name, figures)
