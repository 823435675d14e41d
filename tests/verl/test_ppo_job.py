"""A real verl job on the CPU, as a user types it: what the kit promises, shown with verl's own trackers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.verl_job import Finished, job_environment, make_inputs, metrics, run_job

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """One job for all tests below: two steps, validation before the first and after the last."""
    folder = tmp_path_factory.mktemp("job")
    inputs = make_inputs(folder)
    dumps = [f"trainer.validation_data_dir={folder}/val", f"trainer.rollout_data_dir={folder}/rollouts"]
    return folder, run_job(folder, inputs, dumps).check()


def test_each_step_and_the_validation_before_them_are_logged_once(job: tuple[Path, Finished]) -> None:
    folder, _ = job
    assert [step for step, _ in metrics(folder)] == [0, 1, 2]


def test_the_actor_is_trained(job: tuple[Path, Finished]) -> None:
    folder, _ = job
    for step, data in metrics(folder)[1:]:
        assert data["training/global_step"] == step
        assert data["actor/grad_norm"] > 0


def test_half_of_the_sampled_answers_are_right_and_all_greedy_ones(job: tuple[Path, Finished]) -> None:
    folder, _ = job
    before, first, last = (data for _, data in metrics(folder))
    assert first["critic/score/mean"] == 0.5
    assert before["val-core/sums/acc/mean@1"] == last["val-core/sums/acc/mean@1"] == 1


def test_both_agent_loops_run(job: tuple[Path, Finished]) -> None:
    folder, _ = job
    data = metrics(folder)[-1][1]
    assert (data["num_turns/min"], data["num_turns/max"]) == (2, 4)  # a question and its answer; a tool call between


def test_generations_are_readable(job: tuple[Path, Finished]) -> None:
    folder, _ = job
    for name in ("val/0.jsonl", "val/2.jsonl", "rollouts/1.jsonl", "rollouts/2.jsonl"):
        text = (folder / name).read_text()
        assert "The answer is " in text
        assert "<tool_call>" in text


def test_the_kit_leaves_the_tracing_of_rollouts_to_whoever_patches_it(tmp_path: Path) -> None:
    program = "import sys, verl, fake_engine; sys.exit('verl.utils.rollout_trace' in sys.modules)"
    env = job_environment(tmp_path, {"VERL_USE_EXTERNAL_PLUGINS": "none"})
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=120)
