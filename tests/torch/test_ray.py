"""Real Ray: the workers of one job are one run, and a client in a task's closure is a helper of it."""

from __future__ import annotations

import json

import pytest

from support.site import Site
from support.trainer import run_script

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

# RANK and WORLD_SIZE as Ray Train and verl set them for their workers; Slurm's as `ray start` below srun leaves them.
JOB = """
import json, os
os.environ |= {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
import ray
from verl_shipper_client import Client
from verl_shipper_client.torch import DistributedClient

ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
driver = Client("p", "e", run_id="driver", rank=0, world=1)

@ray.remote
class Worker:
    def found(self):
        client = DistributedClient("p", "e")
        client.log({"x": 1.0}, step=0)
        return [client.rank, client.world, client._is_head, client.run_id]

@ray.remote
def task(number):
    driver.log({"task": float(number)}, step=number)
    return [type(driver).__name__, driver.run_id, os.getpid(), id(driver)]

ranks = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
workers = [Worker.options(runtime_env={"env_vars": each}, num_cpus=0.5).remote() for each in ranks]
lone = Worker.remote()
print(json.dumps({
    "workers": ray.get([worker.found.remote() for worker in workers]),
    "lone": ray.get(lone.found.remote()),
    "tasks": ray.get([task.options(num_cpus=0.1).remote(number) for number in range(6)]),
}))
ray.shutdown()
driver.finish(timeout_s=0)
"""


def test_workers_of_a_ray_job_are_one_run_and_a_captured_client_is_its_helper(site: Site) -> None:
    env = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": "/tmp"}
    found = json.loads(run_script(site, JOB, env=env, timeout_s=100).stdout.splitlines()[-1])

    first, second = found["workers"]
    assert [first[:3], second[:3]] == [[0, 2, True], [1, 2, False]]
    assert first[3] == second[3]
    assert found["lone"][:2] == [0, 1], "an actor without a rank is no rank of Slurm's step"
    assert found["lone"][3] != first[3], "and a run of its own"
    assert {(name, run_id) for name, run_id, _, _ in found["tasks"]} == {("Helper", "driver")}
    by_process: dict[int, set[int]] = {}
    for _, _, pid, identity in found["tasks"]:
        by_process.setdefault(pid, set()).add(identity)
    assert all(len(helpers) == 1 for helpers in by_process.values()), "one helper a process, not one a task"
