"""`ray.kill` right behind the last `Tracking.log`: no atexit, no `__del__`, and nothing is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.shipped import flush, spooling
from support.site import Site
from support.verl_job import KIT, job_environment, ray_folder, run_command

pytestmark = [pytest.mark.verl, pytest.mark.timeout(600)]


def test_the_last_step_and_the_final_validation_of_a_killed_runner_are_there(tmp_path: Path) -> None:
    site = Site(tmp_path / "site")
    environment = spooling(site, VERL_USE_EXTERNAL_MODULES="")
    with ray_folder() as ray:
        command = [sys.executable, str(KIT / "kill_runner.py"), str(ray)]
        finished = run_command(command, tmp_path, job_environment(tmp_path, environment)).check()
    assert "logged 5" in finished.output

    records = flush(site)
    assert [step for step, _ in records.metrics()] == [1, 2, 3, 4, 5, 5]
    assert records.metrics()[-1] == (5, {"val/score": 1.0})
    (table,) = records.of("generations")
    assert (table["step"], len(table["data"]["rows"])) == (5, 10)
    # Nobody said how it ended, and its process is gone: it has failed, at every tracker.
    assert [line["data"]["exit_code"] for line in records.of("run_finish")] == [None]
