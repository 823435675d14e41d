"""Spans in OpenTelemetry's GenAI conventions: what a rollout becomes; that nothing is lost, nothing raised."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from support.batches import run_info
from verl_shipper.backends.otlp_messages import input_messages, output_message
from verl_shipper.backends.otlp_spans import request_of, span_of
from verl_shipper.values import to_json
from verl_shipper_spool.record import Unsupported

TRACE, SPAN, PARENT = b"t" * 16, b"s" * 8, b"p" * 8
START_NS = 1_790_000_000_123_456_789
MESSAGES = [{"role": "user", "content": "2+2?"}]
GENERATE = "LLMServerClient.generate"
PARAMS = {"temperature": 0.7, "top_p": 1.0, "max_tokens": 10, "stop": ["\n"], "logprobs": True}


def body(name: str = "s", inputs: Any = None, outputs: Any = None, **more: Any) -> dict[str, Any]:
    ids = {"trace_id": TRACE, "span_id": SPAN, "parent_id": PARENT}
    times = {"start_ns": START_NS, "end_ns": START_NS + 5}
    return {
        **ids,
        **times,
        "name": name,
        "inputs": inputs,
        "outputs": outputs,
        "status": "ok",
        "attributes": {},
        **more,
    }


def attributes(name: str = "s", inputs: Any = None, outputs: Any = None, **more: Any) -> dict[str, Any]:
    content = more.pop("content", True)
    span, _ = span_of(body(name, inputs, outputs, **more), step=3, rank=1, content=content)
    return {pair.key: _value(pair.value) for pair in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def message(role: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": role, "parts": list(parts), **more}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


# Spans of verl


def test_the_root_of_a_rollout_is_an_invoked_agent_with_its_conversation_and_reward() -> None:
    told = {"step": 7, "sample_index": 2, "rollout_n": 0, "validate": False, "uid": "u1", "reward": 1.0}
    extra = {"reward_extra_info": {"acc": 1}, "experiment_name": "e", "agent_name": "tool_agent"}

    found = attributes(
        "agent_loop", {"messages": MESSAGES}, {"response_text": "4", "reward": 1.0}, attributes=told | extra
    )

    assert json.loads(found.pop("gen_ai.input.messages")) == [message("user", text("2+2?"))]
    assert json.loads(found.pop("gen_ai.output.messages")) == [message("assistant", text("4"), finish_reason="unknown")]
    assert json.loads(found.pop("verl.reward_extra_info")) == {"acc": 1}
    assert json.loads(found.pop("verl.outputs")) == {"reward": 1.0}
    assert found == {f"verl.{name}": value for name, value in told.items()} | {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "verl",
        "gen_ai.agent.name": "tool_agent",
        "verl.agent_name": "tool_agent",
        "verl.experiment_name": "e",
        "verl.rank": 1,
    }


def test_an_agent_loop_is_named_by_its_class_and_counts_no_tokens_of_its_tools() -> None:
    found = attributes("ToolAgentLoop.run", {"messages": MESSAGES}, {"prompt_ids": [1, 2], "response_ids": [3]})

    assert found["gen_ai.agent.name"] == "ToolAgentLoop"
    assert (found["verl.prompt_ids"], found["verl.response_ids"]) == ("[1, 2]", "[3]")
    assert not [name for name in found if name.startswith("gen_ai.usage")]


def test_a_generation_of_ids_is_a_chat_with_its_parameters_and_tokens_used() -> None:
    inputs = {"request_id": "r1", "prompt_ids": [1, 2, 3], "sampling_params": PARAMS}
    outputs = {"token_ids": [5, 6], "log_probs": [-0.5, -math.inf], "stop_reason": "stop"}

    assert attributes(GENERATE, inputs, outputs, attributes={"model": "Qwen/Qwen3-8B"}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "verl",
        "gen_ai.conversation.id": "r1",
        "gen_ai.request.model": "Qwen/Qwen3-8B",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 10,
        "gen_ai.request.stop_sequences": ["\n"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ["stop"],
        "verl.sampling_params": '{"logprobs": true}',
        "verl.prompt_ids": "[1, 2, 3]",
        "verl.token_ids": "[5, 6]",
        "verl.log_probs": '[-0.5, "-Infinity"]',
        "verl.model": "Qwen/Qwen3-8B",
        "verl.step": 3,
        "verl.rank": 1,
    }


def test_a_generation_whose_ids_were_decoded_shows_texts_and_the_counts_it_was_given() -> None:
    inputs = {"prompt_text": "<user>2+2?", "sampling_params": {}}
    counts = {"prompt_tokens": 5, "response_tokens": 1}

    found = attributes(GENERATE, inputs, {"text": "4", "stop_reason": "length"}, attributes=counts)

    assert json.loads(found["gen_ai.input.messages"]) == [message("user", text("<user>2+2?"))]
    assert json.loads(found["gen_ai.output.messages"]) == [message("assistant", text("4"), finish_reason="length")]
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (5, 1)


def test_a_chat_is_a_call_to_somebody_and_everything_else_is_internal() -> None:
    kinds = {name: span_of(body(name), step=None, rank=0)[0].kind for name in (GENERATE, "agent_loop", "mine")}

    assert kinds == {GENERATE: 3, "agent_loop": 1, "mine": 1}


@pytest.mark.parametrize(
    ("name", "inputs", "tool", "arguments"),
    [
        ("CalcTool.execute", {"parameters": {"a": 1}}, "CalcTool", {"a": 1}),
        ("ToolAgentLoop._call_tool", {"tool_call": {"name": "calc", "arguments": '{"a": 1}'}}, "calc", {"a": 1}),
        ("x", {"tool_name": "calc", "arguments": {"a": 1}}, "calc", {"a": 1}),
        ("CalcTool.execute", {"name": "calc", "arguments": "not json"}, "calc", "not json"),
    ],
)
def test_a_call_of_a_tool_shows_name_arguments_and_result(name: str, inputs: Any, tool: str, arguments: Any) -> None:
    found = attributes(name, inputs, {"text": "3"})

    assert found["gen_ai.operation.name"] == "execute_tool"
    assert found["gen_ai.tool.name"] == tool
    assert json.loads(found["gen_ai.tool.call.arguments"]) == arguments
    assert json.loads(found["gen_ai.tool.call.result"]) == {"text": "3"}


def test_extracted_calls_of_tools_are_shown_as_the_answer_that_they_were_in() -> None:
    calls = [{"name": "calc", "arguments": '{"a": 1}'}, {"id": "c2", "function": {"name": "f", "arguments": None}}]

    found = attributes("HermesToolParser.extract_tool_calls", {"responses_ids": [1]}, ["let me see", calls])

    assert "gen_ai.operation.name" not in found
    assert json.loads(found["gen_ai.output.messages"]) == [
        message(
            "assistant",
            text("let me see"),
            {"type": "tool_call", "id": None, "name": "calc", "arguments": {"a": 1}},
            {"type": "tool_call", "id": "c2", "name": "f", "arguments": None},
            finish_reason="tool_call",
        )
    ]
    assert json.loads(found["verl.inputs"]) == {"responses_ids": [1]}


# Conversations


def test_every_shape_of_message_has_its_parts() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": '{"a": 1}'}}
    picture = {"type": "image_url", "image_url": {"url": "u"}}
    conversation = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "see"}, picture], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]

    assert input_messages(conversation) == [
        message("system", text("be brief")),
        message("user", text("see"), picture, name="ann"),
        message("assistant", {"type": "tool_call", "id": "c1", "name": "calc", "arguments": {"a": 1}}, reasoning="hm"),
        message("tool", {"type": "tool_call_response", "id": "c1", "response": "3"}),
    ]


def test_an_answer_of_nothing_is_still_an_answer() -> None:
    assert output_message("") == [message("assistant", text(""), finish_reason="unknown")]


# Spans of others


def test_an_unknown_span_keeps_everything_as_json_text_and_numbers_as_numbers() -> None:
    given = {"n": 1, "f": 0.5, "yes": True, "t": "x", "none": None, "big": 2**64, "deep": {"a": [1]}, 3: "three"}

    found = attributes("mine", {"x": Unsupported("object")}, b"\x00", attributes=given | {"http.method": "GET"})

    assert found == {
        "verl.n": 1,
        "verl.f": 0.5,
        "verl.yes": True,
        "verl.t": "x",
        "verl.none": "null",
        "verl.big": str(2**64),
        "verl.deep": '{"a": [1]}',
        "verl.3": "three",
        "http.method": "GET",
        "verl.inputs": '{"x": "<object>"}',
        "verl.outputs": '"00"',
        "verl.step": 3,
        "verl.rank": 1,
    }


def test_what_somebody_has_set_counts_before_what_is_found_out() -> None:
    given = {"gen_ai.operation.name": "text_completion", "step": 9, "verl.rank": 4}

    found = attributes(GENERATE, {"prompt_ids": [1]}, attributes=given)

    assert found["gen_ai.operation.name"] == "text_completion"
    assert (found["verl.step"], found["verl.rank"]) == (9, 4)


def test_two_attributes_never_share_a_name() -> None:
    assert attributes(attributes={"a": 1, "verl.a": 2})["verl.a'"] == 2


def test_a_failed_span_says_what_failed() -> None:
    span, _ = span_of(body(status="error", attributes={"error": "ValueError: no\ud83d"}), step=None, rank=0)

    assert (span.status.code, span.status.message) == (2, "ValueError: no\ufffd")
    found = {pair.key: pair.value.string_value for pair in span.attributes}
    assert found["error.type"] == "ValueError"
    assert attributes(status="error")["error.type"] == "_OTHER"


def test_without_content_only_what_is_no_text_of_anybody_remains() -> None:
    told = body(
        GENERATE,
        {"prompt_ids": [1], "messages": MESSAGES, "sampling_params": PARAMS, "other": "SECRET"},
        {"text": "SECRET", "stop_reason": "stop"},
        attributes={"gen_ai.input.messages": "SECRET", "step": 1},
    )

    span, left_out = span_of(told, step=1, rank=0, content=False)

    assert left_out == 3
    assert b"SECRET" not in span.SerializeToString()
    names = {pair.key for pair in span.attributes}
    assert {"gen_ai.usage.input_tokens", "gen_ai.response.finish_reasons", "gen_ai.request.temperature"} <= names


@pytest.mark.parametrize("broken", [{"trace_id": b""}, {"span_id": b"\0" * 8}, {"start_ns": None}, {"end_ns": -1}])
def test_a_span_that_cannot_be_one_is_a_value_error(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a span needs|not a time"):
        span_of(body(**broken), step=None, rank=0)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool", "assistant"]) | PLAIN},
    optional={
        "content": VALUES | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()})),
        "tool_calls": VALUES | st.lists(st.fixed_dictionaries({}, optional={"id": PLAIN, "function": VALUES})),
        "tool_call_id": PLAIN,
        "name": PLAIN,
        "parts": PLAIN,
        "other": VALUES,
    },
)
CONVERSATION = st.fixed_dictionaries({"messages": st.lists(MESSAGE, min_size=1, max_size=3)})
WORDS = st.sampled_from(
    [
        *("messages", "prompt_ids", "prompt_text", "sampling_params", "tool_call", "tool_name", "name", "arguments"),
        *("role", "token_ids", "text", "stop_reason", "tool_calls", "content", "request_id", "model", "log_probs"),
        *("function", "id", "type", "reward"),
    ]
)
ODD = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=12
)
NAMES = st.sampled_from(["agent_loop", GENERATE, "CalcTool.execute", "P.extract_tool_calls", "mine", ""])


@given(
    NAMES,
    CONVERSATION | ODD | VALUES,
    ODD | VALUES,
    st.dictionaries(st.text(max_size=8) | WORDS, ODD | VALUES, max_size=4),
)
def test_whatever_a_span_holds_becomes_one_whose_attributes_are_different(
    name: str, inputs: Any, outputs: Any, given_attributes: Any
) -> None:
    span, _ = span_of(body(name, inputs, outputs, attributes=given_attributes), step=2**63, rank=0)

    names = [pair.key for pair in span.attributes]
    assert len(set(names)) == len(names)
    assert span.FromString(span.SerializeToString()) == span
    shown = span.SerializeToString().decode("utf-8", "replace")
    for leaf in texts((inputs, outputs)):
        assert leaf in shown or json.dumps(leaf, ensure_ascii=False)[1:-1] in shown or leaf_is_json(leaf)


def texts(value: Any) -> list[str]:
    """Plain letters of every text in a value: those must be found again."""
    plain = to_json(value)
    if isinstance(plain, dict):
        plain = list(plain.values())
    if isinstance(plain, list):
        return [leaf for each in plain for leaf in texts(each)]
    return [plain] if isinstance(plain, str) and plain.isascii() and plain.isalpha() else []


def leaf_is_json(leaf: str) -> bool:
    """`true` as an argument is no text any more, and `NaN` is a word of ours."""
    try:
        json.loads(leaf)
    except ValueError:
        return False
    return True


# Requests

ANSWER = '[{"role": "assistant", "parts": [{"type": "text", "content": "4"}], "finish_reason": "unknown"}]'


def test_a_request_in_full() -> None:
    root, _ = span_of(body("mine", parent_id=None), step=None, rank=0)
    child, _ = span_of(body("agent_loop", None, "4"), step=2, rank=1)

    request = request_of([(0, root), (1, child), (0, root)], run_info(), {"service.name": "verl"})

    told = MessageToDict(request.FromString(request.SerializeToString()), preserving_proto_field_name=True)
    first, second = told["resource_spans"]
    assert [len(each["scope_spans"][0]["spans"]) for each in (first, second)] == [2, 1]
    assert second == {
        "resource": {
            "attributes": [
                {"key": "service.instance.id", "value": {"string_value": "run1/1"}},
                {"key": "verl_shipper.run_id", "value": {"string_value": "run1"}},
                {"key": "verl.project", "value": {"string_value": "project"}},
                {"key": "verl.experiment", "value": {"string_value": "experiment"}},
                {"key": "service.name", "value": {"string_value": "verl"}},
            ]
        },
        "schema_url": "https://opentelemetry.io/schemas/1.41.0",
        "scope_spans": [
            {
                "scope": {"name": "verl-shipper"},
                "schema_url": "https://opentelemetry.io/schemas/1.41.0",
                "spans": [
                    {
                        "trace_id": "dHR0dHR0dHR0dHR0dHR0dA==",
                        "span_id": "c3Nzc3Nzc3M=",
                        "parent_span_id": "cHBwcHBwcHA=",
                        "name": "agent_loop",
                        "kind": "SPAN_KIND_INTERNAL",
                        "start_time_unix_nano": str(START_NS),
                        "end_time_unix_nano": str(START_NS + 5),
                        "attributes": [
                            {"key": "verl.step", "value": {"int_value": "2"}},
                            {"key": "verl.rank", "value": {"int_value": "1"}},
                            {"key": "gen_ai.operation.name", "value": {"string_value": "invoke_agent"}},
                            {"key": "gen_ai.provider.name", "value": {"string_value": "verl"}},
                            {"key": "gen_ai.agent.name", "value": {"string_value": "agent_loop"}},
                            {"key": "gen_ai.output.messages", "value": {"string_value": ANSWER}},
                        ],
                        "status": {"code": "STATUS_CODE_OK"},
                    }
                ],
            }
        ],
    }
    assert first["scope_spans"][0]["spans"][0].get("parent_span_id") is None
