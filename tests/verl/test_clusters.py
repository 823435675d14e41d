"""Jobs on a Ray cluster that runs before they come: its workers know nothing of the shell that starts a job.

Two more real jobs, about five minutes: only with VERL_SHIPPER_TEST_LONG=1.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.shipped import Records, flush
from support.site import Site
from support.verl_job import Cluster, ray_cluster, run_job_on, submit_job_to

pytestmark = [
    pytest.mark.verl,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not os.environ.get("VERL_SHIPPER_TEST_LONG"), reason="long; set VERL_SHIPPER_TEST_LONG=1"),
]

WISHES = ['trainer.logger=["console","wandb"]', "actor_rollout_ref.rollout.trace.backend=weave"]


def check(records: Records) -> None:
    """Everything of the job is there, from all of its processes, as one run."""
    assert [step for step, _ in records.metrics()] == [0, 1, 2]
    assert sorted(line["step"] for line in records.of("generations")) == [0, 2]
    assert len(records.traces()) == 2 * 4 * 2 + 2 * 4
    assert len(records.runs()) == 1
    assert [line["data"]["exit_code"] for line in records.of("run_finish")] == [0]


def wishes_of(site: Site) -> dict[str, str]:
    return {"VERL_SHIPPER_SPOOL_DIR": str(site.spool), "VERL_SHIPPER_TAKEOVER": "1"}


@pytest.mark.parametrize("start", [run_job_on, submit_job_to], ids=["RAY_ADDRESS", "ray job submit"])
def test_a_job_on_a_cluster_that_runs_already_ships_from_all_of_its_processes(
    start: object, inputs: Path, tmp_path: Path
) -> None:
    site = Site(tmp_path / "site")
    with ray_cluster(tmp_path) as cluster:
        assert isinstance(cluster, Cluster)
        assert callable(start)
        start(cluster, tmp_path, inputs, WISHES, wishes_of(site)).check()
        check(flush(site))
