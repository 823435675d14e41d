"""The mlflow backend against a real server and a real database: what arrives, once, and how it looks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from support.batches import STREAM, TIME_NS, batch, item, metrics
from support.memory import FakeMemory
from support.mlflow_trackers import TestTracker, delivered, empty_database, origin, own_environment, tracker
from verl_shipper.backends.base import Batch, Item, Reject
from verl_shipper_spool.record import RecordKind, Unsupported

__all__ = ["empty_database", "origin", "own_environment", "tracker"]  # fixtures
# MLflow's own imports warn of much that is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = {"optim": {"lr": 1e-6}, "none": None, "long": "x" * 7000, "swanlab": {"api_key": "SENTINEL"}}


def start(ordinal: int = 0, config: dict[str, Any] | None = None, **place: Any) -> Item:
    return item(
        RecordKind.RUN_START, {"config": CONFIG if config is None else config}, ordinal=ordinal, step=None, **place
    )


def finish(ordinal: int, exit_code: int | None, **place: Any) -> Item:
    body = {"exit_code": exit_code, "reason": "finish"} | place.pop("body", {})
    return item(RecordKind.RUN_FINISH, body, ordinal=ordinal, step=None, **place)


def generations(ordinal: int, step: int | None, **place: Any) -> Item:
    body = {"columns": ["input", "output", "score"], "rows": [["q", "a \ud83d", 0.5]], "part": 0, "parts": 1, "call": 0}
    return item(RecordKind.GENERATIONS, body, ordinal=ordinal, step=step, **place)


def span(ordinal: int, trace: int, number: int, parent: int | None = None, **body: Any) -> Item:
    at_ns = TIME_NS + ordinal * 1_000_000
    body = {
        "trace_id": trace.to_bytes(16, "big"),
        "span_id": number.to_bytes(8, "big"),
        "parent_id": None if parent is None else parent.to_bytes(8, "big"),
        "name": "agent_loop" if parent is None else "generate",
        "start_ns": at_ns,
        "end_ns": at_ns + 5_000_000,
        "inputs": {"prompt": "你好"},
        "outputs": [1, 2],
        "status": "ok",
        "attributes": {"sample_index": 3, "validate": False},
    } | body
    return item(RecordKind.SPAN, body, ordinal=ordinal, step=7)


def everything() -> Batch:
    return batch(
        start(0),
        *(metrics(ordinal, {"loss": 1.0 / ordinal, "a": {"b": ordinal}}) for ordinal in range(1, 21)),
        generations(21, 10),
        item(RecordKind.TEXT, {"note": "some text"}, ordinal=22, step=10),
        span(23, trace=1, number=1),
        span(24, trace=1, number=2, parent=1),
        span(25, trace=2, number=3),
        finish(26, 0),
    )


def test_the_same_batch_three_times_is_there_once(tracker: TestTracker) -> None:
    """Commit lost, daemon killed and restarted, lane state lost: nothing doubles."""
    memory = FakeMemory()
    sent = everything()

    delivered(tracker.opened(memory), sent)
    delivered(tracker.opened(memory), sent, memory)
    delivered(tracker.opened(FakeMemory()), sent)

    run = tracker.run()
    assert tracker.points("loss") == [(step, 1.0 / step) for step in range(1, 21)]
    assert tracker.points("a/b") == [(step, float(step)) for step in range(1, 21)]
    assert tracker.artifacts("val_generations") == ["val_generations/step_10.json"]
    assert tracker.artifacts("text/note") == ["text/note/step_10.txt"]
    assert len(tracker.traces()) == 2
    assert run.info.status == "FINISHED"
    assert run.data.params["optim/lr"] == "1e-06"


def test_a_run_carries_its_name_its_id_and_the_times_of_capture(tracker: TestTracker) -> None:
    delivered(tracker.opened(), everything())

    run = tracker.run()
    assert run.info.run_name == "experiment"
    assert run.data.tags["verl_shipper.run_id"] == "run1"
    assert run.info.start_time == TIME_NS // 1_000_000
    assert run.info.end_time == TIME_NS // 1_000_000 + 26_000
    history = tracker.client.get_metric_history(run.info.run_id, "loss")
    assert {point.timestamp - TIME_NS // 1_000_000 - point.step * 1000 for point in history} == {0}


def test_params_are_flat_visible_cut_and_without_secrets(tracker: TestTracker) -> None:
    many = {f"k{number}": number for number in range(250)}

    delivered(tracker.opened(), batch(start(config=CONFIG | {"many": many, "odd(1)": "", "": 3})))

    params = tracker.run().data.params
    assert params["none"] == "None"
    assert params["long"].endswith("[cut by verl-shipper]")
    assert params["swanlab/api_key"] == "[redacted]"
    assert params["odd_1_"] == ""
    assert params["unnamed"] == "3"
    assert {params[f"many/k{number}"] for number in range(250)} == {str(number) for number in range(250)}


def test_a_changed_param_keeps_its_old_value_and_stops_nothing(
    tracker: TestTracker, caplog: pytest.LogCaptureFixture
) -> None:
    many = {f"k{number}": number for number in range(120)}
    delivered(tracker.opened(), batch(start(config={"lr": 1, "long": "x" * 7000} | many)))

    outcome = delivered(tracker.opened(), batch(start(1, {"lr": 2, "long": "x" * 7000, "new": 3} | many), metrics(2)))

    assert outcome.ignored == {"param_changed": 1}
    assert [record.message.count("params lr") for record in caplog.records if "old values" in record.message] == [1]
    assert tracker.points("n") == [(2, 2.0)]
    params = tracker.run().data.params
    assert (params["lr"], params["new"], params["k119"]) == ("1", "3", "119")


def test_numbers_keep_what_mlflow_can_keep(tracker: TestTracker) -> None:
    body = {"nan": math.nan, "up": math.inf, "down": -math.inf, "big": 10**30, "yes": True, "u64": 2**64}

    delivered(tracker.opened(), batch(metrics(0, body)))

    ((_, nan),) = tracker.points("nan")
    assert math.isnan(nan)
    assert tracker.points("up")[0][1] > 1e308
    assert tracker.points("down")[0][1] < -1e308
    assert tracker.points("big") == [(0, 1e30)]
    assert tracker.points("u64") == [(0, 2.0**64)]
    assert tracker.points("yes") == [(0, 1.0)]


def test_what_mlflow_cannot_show_is_counted_and_costs_its_neighbours_nothing(tracker: TestTracker) -> None:
    body = {"ok": 1, "text": "x", "none": None, "tensor": Unsupported("Tensor"), "huge": 10**400}

    outcome = delivered(tracker.opened(), batch(metrics(0, body), metrics(1, {"late": 2}, step=None)))

    assert outcome.ignored == {"text": 1, "none": 1, "not_a_number": 1, "too_large": 1, "no_step": 1}
    assert tracker.points("ok") == [(0, 1.0)]
    assert tracker.points("late") == [(0, 2.0)]


@pytest.mark.parametrize("step", [2**31, 2**53 + 1, 2**62, 2**63 - 1, -1, -(2**63)])
def test_every_step_of_64_bits_arrives(tracker: TestTracker, step: int) -> None:
    delivered(tracker.opened(), batch(metrics(0, {"n": 1}, step=step)))

    assert tracker.points("n") == [(step, 1.0)]


def test_a_step_beyond_64_bits_is_refused_alone(tracker: TestTracker) -> None:
    outcome = tracker.opened().upload(batch(metrics(0), metrics(1, step=2**63), metrics(2)))

    reason = f"step {2**63} does not fit into 64 bits"
    assert outcome == Reject(reason, [1], {1: reason})
    assert tracker.points("n") == [(0, 0.0), (2, 2.0)]


def test_names_that_mlflow_refuses_are_renamed_and_nothing_beside_them_is_lost(tracker: TestTracker) -> None:
    names = ["timing(s)/gen", "val/pass@8", "train/lr(1e-3)", "/lead", "../up", "a//b", "a/b", "k" * 300, "奖励/均值"]
    names += ["val/😀", "a(b)", "a[b]", "Aa", "aa", "", " lead", "ok"]

    outcome = delivered(tracker.opened(), batch(metrics(0, {name: number for number, name in enumerate(names)})))

    shown = tracker.run().data.metrics
    assert outcome.ignored == {}
    assert sorted(shown.values()) == [float(number) for number in range(len(names))]
    assert (shown["ok"], shown["val/pass_at_8"], shown["奖励/均值"]) == (16.0, 1.0, 8.0)


def test_renaming_is_the_same_after_a_restart(tracker: TestTracker) -> None:
    memory = FakeMemory()
    delivered(tracker.opened(memory), batch(metrics(0, {"a(b)": 1, "a[b]": 2})), memory)

    delivered(tracker.opened(memory), batch(metrics(1, {"a[b]": 4, "a(b)": 3})), memory)

    histories = sorted(tracker.points(name) for name in tracker.run().data.metrics)
    assert histories == [[(0, 1.0), (1, 3.0)], [(0, 2.0), (1, 4.0)]]


def test_more_metrics_than_a_request_takes_arrive(tracker: TestTracker) -> None:
    body = {f"layer.{number}/grad": number for number in range(1300)}

    delivered(tracker.opened(), batch(metrics(0, body), metrics(1, body)))

    assert len(tracker.run().data.metrics) == 1300
    assert tracker.points("layer.1299/grad") == [(0, 1299.0), (1, 1299.0)]


def test_generations_are_a_file_per_step_rank_and_writer(tracker: TestTracker, tmp_path: Path) -> None:
    memory = FakeMemory()
    delivered(
        tracker.opened(memory), batch(generations(0, 40), generations(1, 40, rank=2), generations(2, None)), memory
    )

    delivered(tracker.opened(memory), batch(generations(0, 40, stream_id="7" * 32)), memory)

    assert tracker.artifacts("val_generations") == [
        "val_generations/no_step.json",
        "val_generations/step_40.json",
        "val_generations/step_40.rank_2.json",
        "val_generations/step_40.writer_77777777.json",
    ]
    rows = json.loads(tracker.artifact("val_generations/step_40.json", tmp_path))
    assert rows == [{"input": "q", "output": "a \ufffd", "score": 0.5}]


def test_texts_are_files_below_their_key(tracker: TestTracker, tmp_path: Path) -> None:
    record = item(RecordKind.TEXT, {"../prompt/a:b#?": "héllo \ud83d", "n": 3}, ordinal=0, step=2)

    delivered(tracker.opened(), batch(record))

    plain, odd = sorted(tracker.artifacts("text"), key=len)
    assert plain == "text/n/step_2.txt"
    assert tracker.artifact(plain, tmp_path) == "3"
    assert tracker.artifact(odd, tmp_path) == "héllo \ufffd"


def test_spans_are_found_by_their_tags_and_by_their_run(tracker: TestTracker) -> None:
    delivered(tracker.opened(), batch(span(0, trace=5, number=1), span(1, trace=5, number=2, parent=1)))

    (found,) = tracker.traces(filter_string="tags.step = '7'")
    assert found.info.trace_id == f"tr-{5:032x}"
    assert found.info.state.value == "OK"
    assert {key: found.info.tags[key] for key in ("step", "sample_index", "validate", "experiment_name", "rank")} == {
        "step": "7",
        "sample_index": "3",
        "validate": "False",
        "experiment_name": "experiment",
        "rank": "0",
    }
    root, child = sorted(found.data.spans, key=lambda shown: shown.span_id)
    assert (root.name, root.inputs, root.outputs) == ("agent_loop", {"prompt": "你好"}, [1, 2])
    assert child.parent_id == root.span_id
    assert root.start_time_ns == TIME_NS
    assert len(tracker.traces(run_id=tracker.run().info.run_id)) == 1


def test_a_child_may_come_in_an_earlier_batch_than_its_root(tracker: TestTracker) -> None:
    backend = tracker.opened()
    delivered(backend, batch(span(1, trace=6, number=2, parent=1)))

    delivered(backend, batch(span(0, trace=6, number=1, status="error")))

    (found,) = tracker.traces(filter_string="tags.step = '7'")
    assert len(found.data.spans) == 2
    assert found.info.state.value == "ERROR"


def test_a_span_without_ids_is_refused_alone(tracker: TestTracker) -> None:
    outcome = tracker.opened().upload(batch(span(0, trace=8, number=1), span(1, trace=0, number=2), metrics(2)))

    assert isinstance(outcome, Reject)
    assert outcome.items == [1]
    assert len(tracker.traces()) == 1
    assert tracker.points("n") == [(2, 2.0)]


@pytest.mark.parametrize(("exit_code", "status"), [(0, "FINISHED"), (3, "FAILED"), (None, "FAILED")])
def test_the_exit_code_decides_the_status(tracker: TestTracker, exit_code: int | None, status: str) -> None:
    backend = tracker.opened()
    delivered(backend, batch(start(0)))
    running = tracker.run().info.status

    delivered(backend, batch(finish(1, exit_code)))

    assert (running, tracker.run().info.status) == ("RUNNING", status)


@pytest.mark.parametrize("place", [{"rank": 1}, {"body": {"forked": True}}])
def test_only_rank_zero_itself_speaks_for_the_run(tracker: TestTracker, place: dict[str, Any]) -> None:
    delivered(tracker.opened(), batch(start(0), finish(1, 3, **place)))

    assert tracker.run().info.status == "RUNNING"


def test_a_resumed_run_runs_again_and_an_old_finish_that_comes_late_changes_nothing(tracker: TestTracker) -> None:
    memory = FakeMemory()
    delivered(tracker.opened(memory), batch(start(0), finish(1, 1)), memory)
    delivered(tracker.opened(memory), batch(start(0, stream_id="7" * 32, time_ns=TIME_NS + 10**12)), memory)
    resumed = tracker.run().info.status

    delivered(tracker.opened(memory), batch(finish(2, None, stream_id=STREAM)), memory)

    assert (resumed, tracker.run().info.status) == ("RUNNING", "RUNNING")


def test_late_records_of_a_finished_run_arrive(tracker: TestTracker) -> None:
    backend = tracker.opened()
    delivered(backend, batch(start(0), finish(1, 0)))

    delivered(backend, batch(metrics(2)))

    assert tracker.points("n") == [(2, 2.0)]
    assert tracker.run().info.status == "FINISHED"


def test_an_empty_record_is_delivered(tracker: TestTracker) -> None:
    assert delivered(tracker.opened(), batch(metrics(0, {}))).ignored == {}
