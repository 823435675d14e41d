"""verl's Tracking and its two table loggers, changed: what is shipped, what stays verl's, and that nothing breaks."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import pytest

from unit.client.spooled import records
from unit.client.verl.stand_in import Tracker, tracking_module
from verl_shipper_client.verl import job, tracking
from verl_shipper_client.verl.job import JOB, Job
from verl_shipper_client.verl.tracking import choose, counts_text
from verl_shipper_spool.record import Record, RecordKind

CONFIG = {"trainer": {"project_name": "p", "experiment_name": "e"}, "actor": {"lr": 1e-6}}


@pytest.fixture
def verl() -> types.ModuleType:
    module = tracking_module()
    tracking.patch(module)
    return module


def kinds(spool: Path) -> list[RecordKind]:
    return [record.kind for record in shipped(spool)]


def shipped(spool: Path) -> list[Record]:
    return sorted(records(spool), key=lambda record: record.seq) if spool.exists() else []


def test_a_job_that_names_us_ships_its_metrics_beside_its_other_trackers(
    verl: types.ModuleType, fresh_job: Path
) -> None:
    tracker = verl.Tracking("p", "e", ["console", "wandb", "shipper"], CONFIG)
    tracker.log({"loss": 0.5}, step=3)

    start, metrics = shipped(fresh_job)
    assert (start.body["project"], start.body["experiment"], start.body["config"]) == ("p", "e", CONFIG)
    assert (metrics.step, metrics.body) == (3, {"loss": 0.5})
    assert [tracker.logger[name].calls for name in ("console", "wandb")] == [[(3, {"loss": 0.5})]] * 2


@pytest.mark.parametrize("loggers", ["shipper", ["shipper"], ("console", "shipper")])
def test_the_list_of_trackers_may_have_any_shape(verl: types.ModuleType, fresh_job: Path, loggers: Any) -> None:
    verl.Tracking("p", "e", loggers, CONFIG).log({"loss": 0.5}, 1)
    assert kinds(fresh_job) == [RecordKind.RUN_START, RecordKind.METRICS]


def test_a_job_that_does_not_name_us_is_left_alone_and_told_once(
    verl: types.ModuleType, fresh_job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        verl.Tracking("p", "e", ["console", "wandb"], CONFIG).log({"loss": 0.5}, 1)
    assert not fresh_job.exists()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "put shipper into trainer.logger" in told[0]


@pytest.mark.parametrize("by", ["variable", "configuration"])
def test_a_takeover_ships_instead_of_calling(
    verl: types.ModuleType, fresh_job: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    config: dict[str, Any] = {"trainer": {"shipper": {"takeover": True}}} if by == "configuration" else {}
    if by == "variable":
        monkeypatch.setenv("VERL_SHIPPER_TAKEOVER", "1")
    tracker = verl.Tracking("p", "e", ["console", "wandb", "mlflow"], config)
    tracker.log({"loss": 0.5}, 1)
    left = verl.ValidationGenerationsLogger("p", "e").log(["console", "wandb"], [("q", "a", 1.0)], 1)

    assert list(tracker.logger) == ["console"]
    assert left == ["console"]
    assert kinds(fresh_job) == [RecordKind.RUN_START, RecordKind.METRICS, RecordKind.GENERATIONS]


def test_a_tracker_that_raises_does_not_take_our_record_with_it(verl: types.ModuleType, fresh_job: Path) -> None:
    tracker = verl.Tracking("p", "e", ["wandb", "shipper"], CONFIG)
    Tracker.broken = True
    with pytest.raises(RuntimeError):  # verl's own tracker, verl's own behaviour
        tracker.log({"loss": 0.5}, step=1)
    assert kinds(fresh_job) == [RecordKind.RUN_START, RecordKind.METRICS]


def test_a_call_for_one_tracker_is_for_that_one_only(verl: types.ModuleType, fresh_job: Path) -> None:
    tracker = verl.Tracking("p", "e", ["console", "shipper"], CONFIG)
    tracker.log({"a": 1}, 1, backend=["console"])
    tracker.log({"b": 1}, 1, backend=["shipper"])
    assert [record.body for record in shipped(fresh_job)[1:]] == [{"b": 1}]
    assert tracker.logger["console"].calls == [(1, {"a": 1})]


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_finish_says_how_the_run_ended(verl: types.ModuleType, fresh_job: Path, exit_code: int) -> None:
    tracker = verl.Tracking("p", "e", "shipper", CONFIG)
    tracker.finish(exit_code=exit_code)
    assert shipped(fresh_job)[-1].body == {"exit_code": exit_code, "reason": "finish"}
    assert tracker.finished == [exit_code]


def test_an_object_that_is_dropped_says_nothing_about_the_run(verl: types.ModuleType, fresh_job: Path) -> None:
    tracker = verl.Tracking("p", "e", "shipper", CONFIG)
    tracker.__del__()
    assert tracker.finished == [0]  # verl's own cleaning up
    assert kinds(fresh_job) == [RecordKind.RUN_START]


def test_validations_are_shipped_from_a_process_that_has_no_tracking(verl: types.ModuleType, fresh_job: Path) -> None:
    verl.ValidationGenerationsLogger("p", "e").log(["wandb", "shipper"], [("q", "a", 1.0)], 7)
    start, table = shipped(fresh_job)
    assert start.body["forked"] is True  # a word of its own, and not the run's beginning
    assert (table.kind, table.step, table.body["rows"]) == (RecordKind.GENERATIONS, 7, [["q", "a", 1.0]])


def test_the_table_of_filtered_rewards_is_a_table_with_a_name(verl: types.ModuleType, fresh_job: Path) -> None:
    left = verl.DapoFilteredRewardTableLogger("p", "e").log(["console", "shipper"], {1.0: 3, 0.0: 12}, 5)
    _, table = shipped(fresh_job)
    assert left == ["console"]
    assert table.body["name"] == "training/filter_groups/filtered_reward_counts"
    assert (table.body["columns"], table.body["rows"]) == (["step", "reward_counts"], [[5, "0:12, 1:3"]])


def test_being_changed_twice_is_being_changed_once(fresh_job: Path) -> None:
    module = tracking_module()
    tracking.patch(module)
    tracking.patch(module)
    module.Tracking("p", "e", "shipper", CONFIG).log({"a": 1}, 1)
    assert kinds(fresh_job) == [RecordKind.RUN_START, RecordKind.METRICS]
    assert module.Tracking.supported_backend.count("shipper") == 1


def test_our_own_fault_costs_the_job_nothing(
    verl: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(JOB, "head", fail)
    tracker = verl.Tracking("p", "e", ["console", "shipper"], CONFIG)
    tracker.log({"a": 1}, 1)
    tracker.finish(exit_code=0)
    assert tracker.logger["console"].calls == [(1, {"a": 1})]
    assert "ZeroDivisionError: ours; the job goes on without it" in capsys.readouterr().err


@pytest.mark.parametrize("config", [None, {}, {"trainer": None}, {"trainer": {"shipper": None}}, "text", [1]])
def test_a_configuration_of_any_shape_begins_a_run(verl: types.ModuleType, fresh_job: Path, config: Any) -> None:
    verl.Tracking("p", "e", "shipper", config).log({"a": 1}, 1)
    assert kinds(fresh_job) == [RecordKind.RUN_START, RecordKind.METRICS]


def test_a_second_run_of_one_process_is_another_run(verl: types.ModuleType, fresh_job: Path) -> None:
    for _ in range(2):
        tracker = verl.Tracking("p", "e", "shipper", CONFIG)
        tracker.log({"a": 1}, 1)
        tracker.finish(exit_code=0)
    assert kinds(fresh_job).count(RecordKind.RUN_START) == 2


def test_what_is_not_ours_stays_the_same_object() -> None:
    loggers = ["console", "wandb"]
    assert choose(loggers, takeover=False).left is loggers
    assert choose(loggers, takeover=True).left == ["console"]


def test_counts_are_told_smallest_reward_first() -> None:
    assert counts_text({"1.5": "2", 0: 7}) == "0:7, 1.5:2"


def test_a_takeover_ships_a_job_that_lists_nothing_but_the_console(
    verl: types.ModuleType, fresh_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_SHIPPER_TAKEOVER", "1")
    tracker = verl.Tracking("p", "e", ["console"], {})
    tracker.log({"a": 1}, 1)
    verl.ValidationGenerationsLogger("p", "e").log(["console"], [("q", "a", 1.0)], 1)
    assert tracker.logger["console"].calls == [(1, {"a": 1})]
    assert kinds(fresh_job) == [RecordKind.RUN_START, RecordKind.METRICS, RecordKind.GENERATIONS]


def test_each_tracking_ends_its_own_run(verl: types.ModuleType, fresh_job: Path) -> None:
    first, second = (verl.Tracking("p", name, "shipper", {}) for name in ("a", "b"))
    first.finish(exit_code=0)
    second.log({"m": 2}, 2)
    second.finish(exit_code=1)
    ends = [record.body["exit_code"] for record in shipped(fresh_job) if record.kind is RecordKind.RUN_FINISH]
    assert sorted(ends) == [0, 1]


def test_a_tracking_that_ships_can_be_copied(verl: types.ModuleType, fresh_job: Path) -> None:
    tracker = verl.Tracking("p", "e", ["console", "shipper"], CONFIG)
    copied = copy.deepcopy(tracker)
    copied.log({"a": 1}, 1)  # the console's copy; the run has one voice
    assert kinds(fresh_job) == [RecordKind.RUN_START]


def test_a_name_that_is_none_is_verls_affair(verl: types.ModuleType, fresh_job: Path) -> None:
    tracker = verl.Tracking("p", "e", "shipper", CONFIG)
    tracker.log({"a": 1}, 1, backend=5)
    tracker.log({"b": 1}, 2)
    assert [record.step for record in shipped(fresh_job)[1:]] == [2]


def test_names_of_a_recipe_do_not_part_a_run_from_its_traces(
    verl: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def run_id(project: str, experiment: str) -> str:
        seen.append((project, experiment))
        return "run1"

    monkeypatch.setattr(job, "job_run_id", run_id)
    verl.Tracking("p", "e_2026", "shipper", CONFIG)
    assert JOB.helper("p", "e") is JOB.heads()[0]
    elsewhere = Job()  # a rollout worker, which has the configuration only
    elsewhere.note(CONFIG)
    assert elsewhere.helper("p", "e").run_id == JOB.heads()[0].run_id == "run1"
    assert seen == [("p", "e"), ("p", "e")]
