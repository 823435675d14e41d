"""A real supervised training on the CPU, as a user types it: torchrun, two ranks, no Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.shipped import flush, spooling
from support.site import Site
from support.verl_job import metrics, run_sft

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]


def test_the_rank_that_logs_is_one_run_with_every_step_and_a_good_end(inputs: Path, tmp_path: Path) -> None:
    site = Site(tmp_path / "site")
    run_sft(tmp_path, inputs, ['trainer.logger=["console","file","shipper"]'], spooling(site)).check()

    records, theirs = flush(site), metrics(tmp_path)
    assert [step for step, _ in theirs] == [1, 1, 2, 2]  # training and validation of each step
    assert [(step, set(data)) for step, data in records.metrics()] == [(step, set(data)) for step, data in theirs]
    assert all(data["train/grad_norm"] > 0 for _, data in records.metrics()[::2])
    assert len(records.runs()) == 1
    assert [line["data"]["exit_code"] for line in records.of("run_finish")] == [0]
