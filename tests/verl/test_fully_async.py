"""Fully async training: metrics come from one actor, validations from another, where verl itself drops them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from support.shipped import Records, flush, spooling
from support.site import Site
from support.verl_job import run_fully_async

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Job:
    folder: Path
    records: Records


@pytest.fixture(scope="module")
def job(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("async")
    site = Site(folder / "site")
    # The takeover is wished in the configuration: it has to reach the actor that has no Tracking.
    wishes = ['trainer.logger=["console","wandb"]', "+trainer.shipper.takeover=true"]
    run_fully_async(folder, inputs, wishes, spooling(site)).check()
    return Job(folder, flush(site))


def test_every_log_of_a_step_is_there_and_none_replaces_another(job: Job) -> None:
    assert not (job.folder / "metrics.jsonl").exists()  # nothing but us was called
    assert [step for step, _ in job.records.metrics()] == [0, 0, 1, 1, 2, 2, 2]


def test_validations_arrive_though_they_come_from_the_rollouter(job: Job) -> None:
    tables = job.records.of("generations")
    # Before the first step and after each of two; the rollouter counts samples, so two of them may have one step.
    assert len({(line["step"], line["data"]["call"]) for line in tables}) == len(tables) == 3
    for line in tables:
        assert all("The answer is" in output for _, output, _ in line["data"]["rows"])


def test_both_actors_are_one_run_that_has_succeeded(job: Job) -> None:
    assert len(job.records.runs()) == 1
    assert [line["data"]["exit_code"] for line in job.records.of("run_finish")] == [0]
