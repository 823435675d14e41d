"""verl's older trainer, which never says how it ended, in a real job that names us beside verl's own `file` logger.

No daemon is there: the records wait in the spool and are flushed when the job is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.shipped import Records, flush, spooling
from support.site import Site
from support.verl_job import metrics, run_job

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]

OVERRIDES = [
    "trainer.use_v1=False",
    'trainer.logger=["console","file","shipper"]',
    "actor_rollout_ref.rollout.trace.backend=shipper",
    "actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker=1",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
]


@dataclass(frozen=True)
class Job:
    """A job that is over."""

    folder: Path
    records: Records
    output: str


@pytest.fixture(scope="module")
def job(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("older")
    site = Site(folder / "site")
    dumps = [f"trainer.validation_data_dir={folder}/val"]
    finished = run_job(folder, inputs, [*OVERRIDES, *dumps], spooling(site)).check()
    return Job(folder, flush(site), finished.output)


def test_metrics_are_those_of_verls_own_file_logger(job: Job) -> None:
    theirs, ours = metrics(job.folder), job.records.metrics()
    assert [step for step, _ in ours] == [step for step, _ in theirs] == [0, 1, 2]
    for (_, data), (_, own) in zip(ours, theirs, strict=True):
        numbers = {key: value for key, value in own.items() if isinstance(value, int | float)}
        assert {key: value for key, value in data.items() if value != "NaN"} == pytest.approx(numbers, nan_ok=True)
        assert all(own[key] is None for key, value in data.items() if value == "NaN")  # verl writes null


def test_the_training_is_real_and_half_of_its_answers_are_right(job: Job) -> None:
    before, first, last = (data for _, data in job.records.metrics())
    assert first["actor/grad_norm"] > 0
    assert math.isclose(first["critic/score/mean"], 0.5)
    assert before["val-core/sums/acc/mean@1"] == last["val-core/sums/acc/mean@1"] == 1


def test_trainer_and_workers_are_one_run_that_has_succeeded(job: Job) -> None:
    assert len(job.records.runs()) == 1
    starts = job.records.of("run_start")
    assert sorted(bool(start["data"].get("forked")) for start in starts) == [False, True, True]
    (finish,) = job.records.of("run_finish")
    assert finish["data"]["exit_code"] == 0


def test_validations_are_verls_own_samples(job: Job) -> None:
    tables = {line["step"]: line["data"]["rows"] for line in job.records.of("generations")}
    assert sorted(tables) == [0, 2]
    dumped = (job.folder / "val" / "2.jsonl").read_text()
    assert all("The answer is" in output and score == 1.0 for _, output, score in tables[2])
    assert dumped.count("The answer is") >= len(tables[2]) == 2


def test_verls_own_choice_of_samples_is_kept(job: Job) -> None:
    roots = [trace[-1]["attributes"] for trace in job.records.traces()]
    trained = [root for root in roots if root["validate"] is False]
    for step in (1, 2):  # one sample for each of two workers, with both of its rollouts
        of_step = [root for root in trained if root["step"] == step]
        assert len({root["sample_index"] for root in of_step}) == 2
        assert len(of_step) == 4
        assert {root["rollout_n"] for root in of_step} == {0, 1}


def test_every_trace_is_whole_and_its_tokens_are_written_once(job: Job) -> None:
    for spans in job.records.traces():
        root = spans[-1]
        assert root["parent_id"] is None
        assert root["attributes"]["reward"] in (0.0, 1.0)
        by_id = {span["span_id"]: span for span in spans}
        assert all(span["parent_id"] in by_id for span in spans[:-1])
        run = next(span for span in spans if span["name"].endswith(".run"))
        turns = [span for span in spans if span["name"].endswith(".generate")]
        assert "response_ids" not in run["outputs"]
        written = sum(len(span["inputs"].get("prompt_ids", [])) + len(span["outputs"]["token_ids"]) for span in turns)
        assert written == run["attributes"]["prompt_tokens"] + run["attributes"]["response_tokens"]
        for span in turns:
            assert len(span["outputs"]["log_probs"]) == len(span["outputs"]["token_ids"])
