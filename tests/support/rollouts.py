"""Span records as a rollout logs them, for trackers of traces. Ids are frozen here, as they are at capture."""

from __future__ import annotations

import hashlib
from typing import Any

from support.batches import TIME_NS, item
from verl_shipper.backends.base import Item
from verl_shipper_spool.record import RecordKind


def span(ordinal: int, name: str = "agent_loop", *, step: int | None = 1, rank: int = 0, **body: Any) -> Item:
    """One span, the root of a trace of its own unless `body` says otherwise."""
    digest = hashlib.sha256(f"{ordinal}/{rank}".encode()).digest()
    times = {"start_ns": TIME_NS + ordinal, "end_ns": TIME_NS + ordinal + 1000}
    ids = {"trace_id": digest[:16], "span_id": digest[16:24], "parent_id": None}
    told: dict[str, Any] = {"name": name, "inputs": None, "outputs": None, "status": "ok", "attributes": {}}
    return item(RecordKind.SPAN, ids | times | told | body, ordinal=ordinal, step=step, rank=rank)


def rollout(first: int = 0) -> list[Item]:
    """Question, thought, call of a tool, its result, answer: one trace."""
    question = [{"role": "user", "content": "What is 2+2?"}]
    root = span(first, "agent_loop", inputs={"messages": question}, outputs={"response_text": "4", "reward": 1.0})
    trace = {"trace_id": root.record.body["trace_id"], "parent_id": root.record.body["span_id"]}
    params = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 64}
    asked = {"request_id": "r1", "prompt_ids": [1, 2, 3], "sampling_params": params}
    answered = {"token_ids": [7, 8], "log_probs": [-0.25, -0.5], "stop_reason": "completed"}
    calls = ["", [{"name": "calc", "arguments": '{"a": 2, "b": 2}'}]]
    root.record.body["attributes"] = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False, "reward": 1.0}
    return [
        span(first + 1, "LLMServerClient.generate", inputs=asked, outputs=answered, **trace),
        span(
            first + 2, "HermesToolParser.extract_tool_calls", inputs={"responses_ids": [7, 8]}, outputs=calls, **trace
        ),
        span(first + 3, "CalcTool.execute", inputs={"parameters": {"a": 2, "b": 2}}, outputs={"text": "4"}, **trace),
        span(first + 4, "LLMServerClient.generate", inputs=asked, outputs=answered, **trace),
        root,
    ]
