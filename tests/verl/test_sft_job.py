"""A real supervised training on the CPU, as a user types it, with verl's own trackers."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.verl_job import make_inputs, metrics, run_sft

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]


def test_one_of_two_ranks_logs_each_step_and_each_validation(tmp_path: Path) -> None:
    run_sft(tmp_path, make_inputs(tmp_path)).check()
    logged = metrics(tmp_path)
    assert [step for step, _ in logged] == [1, 1, 2, 2]
    assert all(data["train/grad_norm"] > 0 for _, data in logged[::2])
    assert all(data["val/loss"] > 0 for _, data in logged[1::2])
