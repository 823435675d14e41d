"""Generations and spans at trackio: traces as verl itself makes them, whatever was logged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from support.batches import TIME_NS, batch, item, metrics, run_info
from support.memory import FakeMemory
from support.mlflow_trackers import own_environment
from support.trackio_reader import TrackioReader
from unit.shipper.trackio_bench import (
    away_from_home,
    backend,
    delivered,
    folder,
    made,
    memory,
    reader,
    span,
)
from verl_shipper.backends.trackio import TrackioBackend
from verl_shipper_spool.record import RecordKind, Unsupported

__all__ = ["away_from_home", "backend", "folder", "memory", "own_environment", "reader"]  # fixtures
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_environment")]
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1=?"}]


def test_generations_are_traces_as_verl_makes_them(backend: TrackioBackend, reader: TrackioReader) -> None:
    rows = [["1+1=", "2", 1.0], ["2+2=", "5", math.nan]]
    table = {"columns": ["input", "output", "score"], "rows": rows, "part": 0, "parts": 1, "call": 0}

    delivered(backend, batch(item(RecordKind.GENERATIONS, table, ordinal=0, step=40)))

    first, second = reader.traces(run_info())
    assert (first["key"], first["index"], first["step"]) == ("val/generations", 0, 40)
    assert first["messages"] == [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert first["metadata"] == {"source": "validation_generations", "sample_index": 0, "score": 1.0}
    assert second["metadata"]["sample_index"] == 1
    assert [found["id"] for found in reader.traces(run_info(), search="2+2")] == [second["id"]]


def test_a_table_of_other_columns_keeps_all_of_them(backend: TrackioBackend, reader: TrackioReader) -> None:
    table = {"columns": ["uid", "response", "prompt"], "rows": [["u1", "a", {"q": 1}, 7], ["u2"]], "part": 2, "call": 1}

    delivered(backend, batch(item(RecordKind.GENERATIONS, table, ordinal=0, step=1, rank=3)))

    first, second = reader.traces(run_info())
    assert [message["content"] for message in first["messages"]] == ['{"q": 1}', "a"]
    place = {"rank": 3, "call": 1, "part": 2, "source": "validation_generations"}
    assert first["metadata"] == {"uid": "u1", "column_4": 7, "sample_index": 0, **place}
    assert second["messages"] == [{"role": "user", "content": "u2"}]


def only(reader: TrackioReader) -> dict[str, Any]:
    (found,) = reader.traces(run_info())
    return found


def test_a_span_is_a_trace_with_its_chat_its_answer_and_all_that_is_known(
    backend: TrackioBackend, reader: TrackioReader
) -> None:
    attributes = {"uid": "u1", "reward": 1.0, "reward_extra_info": {"acc": 1}, "validate": False, "status": "mine"}
    outputs = {"response_text": "2", "reward": 1.0}

    delivered(backend, batch(span("agent_loop", inputs={"messages": CHAT}, outputs=outputs, attributes=attributes)))

    found = only(reader)
    assert (found["key"], found["step"]) == ("rollout_trace/agent_loop", 5)
    assert found["messages"] == [*CHAT, {"role": "assistant", "content": "2"}]
    assert found["metadata"] == {
        "step": 5,
        "experiment_name": "experiment",
        "op": "agent_loop",
        "uid": "u1",
        "reward": 1.0,
        "reward_extra_info": {"acc": 1},
        "validate": False,
        "user.status": "mine",
        "trace_id": "01" * 16,
        "span_id": "02" * 8,
        "parent_id": "03" * 8,
        "start_ns": TIME_NS,
        "end_ns": TIME_NS + 1_500_000,
        "duration_ms": 1.5,
        "status": "success",
        "output": {"reward": 1.0},
    }


@pytest.mark.parametrize(
    ("inputs", "outputs", "contents"),
    [
        ({"kwargs": {"raw_prompt": CHAT, "index": 3}}, {"text": "2"}, ["be brief", "1+1=?", "2"]),
        ({"prompt_ids": [1]}, {"prompt_text": "1+1=?", "answer": "2"}, ["1+1=?", "2"]),
        ({"a": 1}, {"b": [2]}, ["verl rollout trace operation: Tool.run", '{"a": 1}', '{"b": [2]}']),
        ({"a": 1}, "done", ["verl rollout trace operation: Tool.run", '{"a": 1}', "done"]),
        ({"messages": ["no", {"no": "role"}]}, None, None),
        (None, None, ["verl rollout trace operation: Tool.run", "{}"]),
    ],
)
def test_question_and_answer_are_found_where_verl_puts_them(
    inputs: Any, outputs: Any, contents: list[str] | None, backend: TrackioBackend, reader: TrackioReader
) -> None:
    delivered(backend, batch(span("Tool.run", inputs=inputs, outputs=outputs)))

    told = [message["content"] for message in only(reader)["messages"]]
    assert told == (contents or [told[0], '{"messages": ["no", {"no": "role"}]}'])


def test_long_lists_of_numbers_are_told_by_their_length_unless_they_are_wanted(
    folder: Path, memory: FakeMemory, reader: TrackioReader
) -> None:
    outputs = {"response_text": "2", "response_ids": list(range(65)), "mask": [1] * 64, "words": ["a"] * 65}

    outcome = delivered(made(folder, memory), batch(span("a", outputs=outputs)))
    whole = delivered(made(folder, memory, numbers_max=65), batch(span("b", 1, outputs=outputs)))

    first, second = (found["metadata"]["output"] for found in reader.traces(run_info()))
    assert first == {"response_ids": "<65 numbers>", "mask": [1] * 64, "words": ["a"] * 65}
    assert second["response_ids"] == list(range(65))
    assert (outcome.ignored, whole.ignored) == ({"long_list": 1}, {})


def test_a_hostile_span_is_shown_and_spoils_nothing_beside_it(backend: TrackioBackend, reader: TrackioReader) -> None:
    bad = {"trace_id": None, "span_id": 7, "start_ns": "then", "end_ns": 2**70, "status": Unsupported("object")}
    odd = {"inputs": {3: 10**5000}, "outputs": b"\xff", "attributes": [1], **bad}
    far = item(RecordKind.SPAN, {"name": "t", "start_ns": 0, "end_ns": 2**70}, ordinal=2, step=None, time_ns=-(2**70))

    outcome = delivered(backend, batch(span("cut \ud83d/é x", 0, **odd), metrics(1), far))

    assert {found["key"] for found in reader.traces(run_info())} == {"rollout_trace/cut___é_x", "rollout_trace/t"}
    assert reader.numbers(run_info()) == [{"n": 1, "step": 1}]
    assert outcome.ignored == {"no_step": 1}


def test_a_span_without_a_step_stands_at_the_one_of_its_attributes(
    backend: TrackioBackend, reader: TrackioReader
) -> None:
    outcome = delivered(backend, batch(span("x", step=None, attributes={"step": 9})))

    assert only(reader)["step"] == 9
    assert not outcome.ignored
