"""A TaskRunner that logs its last step and its final validation and is killed right then, as Ray ends an actor.

    python kill_runner.py RAY_FOLDER

Prints what the actor had logged when `ray.kill` took it.
"""

from __future__ import annotations

import sys
from typing import Any

import ray

STEPS = 5


@ray.remote
class TaskRunner:
    """As verl's: Tracking lives in an actor."""

    def train(self) -> int:
        from verl.utils.tracking import Tracking, ValidationGenerationsLogger

        config: dict[str, Any] = {"trainer": {"project_name": "sums", "experiment_name": "killed"}}
        self.tracking = Tracking("sums", "killed", ["console", "shipper"], config)
        for step in range(1, STEPS + 1):
            self.tracking.log({"actor/loss": 1.0 / step, "training/global_step": step}, step=step)
        samples = [(f"What is {number}?", f"It is {number}.", 1.0) for number in range(10)]
        ValidationGenerationsLogger("sums", "killed").log(["console", "shipper"], samples, STEPS)
        self.tracking.log({"val/score": 1.0}, step=STEPS)
        return STEPS


if __name__ == "__main__":
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=sys.argv[1]
    )
    runner = TaskRunner.remote()  # type: ignore[attr-defined]
    print("logged", ray.get(runner.train.remote()), flush=True)
    ray.kill(runner)
