"""Conversations as the GenAI conventions write them, from what people log. Pure; nothing here raises.

    {"role": "user", "content": "2+2?"}       →  {"role": "user", "parts": [{"type": "text", "content": "2+2?"}]}
    {"role": "assistant", "tool_calls": […]}  →  a part of type tool_call for each
    {"role": "tool", "content": "4"}          →  a part of type tool_call_response

What is none of these becomes a part of its own type with all its fields: nothing is left out.

Must not know: spans, trackers. Schemas: gen-ai-input-messages.json and gen-ai-output-messages.json of the semantic
conventions 1.41.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from verl_shipper.values import to_json

UNKNOWN = "unknown"  # the schema wants a reason, and nobody gave one
TOOL_CALL = "tool_call"
# The conventions' words for what servers answer.
REASONS = {
    "tool_calls": TOOL_CALL,
    "function_call": TOOL_CALL,
    "completed": "stop",
    "eos": "stop",
    "max_tokens": "length",
}
_PLAIN = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})


def are_messages(value: Any) -> bool:
    """Whether it is a conversation: a list of maps, each with a role."""
    return (
        isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) and "role" in each for each in value)
    )


def input_messages(value: Any) -> list[dict[str, Any]]:
    """A conversation, or the text of a prompt."""
    return [_message(each) for each in value] if are_messages(value) else [_of_text("user", value)]


def output_message(text: Any, calls: Any = (), reason: str | None = None) -> list[dict[str, Any]]:
    """What a model answered: a text, calls of tools, or both."""
    parts = [{"type": "text", "content": _text(text)}] if text not in (None, "") or not calls else []
    parts += [call_part(call) for call in calls]
    return [{"role": "assistant", "parts": parts, "finish_reason": reason or (TOOL_CALL if calls else UNKNOWN)}]


def finish_reason(value: Any) -> str | None:
    """The reason in the conventions' words; None where there is none."""
    return REASONS.get(value, value) if isinstance(value, str) and value else None


def call_part(call: Any) -> dict[str, Any]:
    """One call of a tool, in whatever shape it was logged."""
    call_id, name, arguments = call_of(call)
    return {"type": TOOL_CALL, "id": call_id, "name": name or UNKNOWN, "arguments": arguments}


def call_of(call: Any) -> tuple[str | None, str | None, Any]:
    """Id, name and arguments of a call: OpenAI's {"id", "function": {"name", "arguments"}}, or flat."""
    if not isinstance(call, Mapping):
        return None, None, to_json(call)
    inner = call.get("function")
    function: Mapping[Any, Any] = inner if isinstance(inner, Mapping) else call
    name = function.get("name") or (inner if isinstance(inner, str) else None)
    call_id = call.get("id") or call.get("tool_call_id")
    return _text_or_none(call_id), _text_or_none(name), arguments_of(function.get("arguments"))


def arguments_of(value: Any) -> Any:
    """Arguments as a value: models write them as JSON text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    return to_json(value)


def _message(message: Mapping[Any, Any]) -> dict[str, Any]:
    role = message.get("role")
    content = message.get("content")
    calls = message.get("tool_calls")
    parts: list[dict[str, Any]] = []
    if role == "tool":
        call_id = _text_or_none(message.get("tool_call_id"))
        parts.append({"type": "tool_call_response", "id": call_id, "response": to_json(content)})
    elif isinstance(content, list):
        parts += [_part(each) for each in content]
    elif content is not None:
        parts.append({"type": "text", "content": _text(content)})
    parts += [call_part(call) for call in calls] if isinstance(calls, list) else []
    made: dict[str, Any] = {"role": _text(role), "parts": parts}
    if message.get("name"):
        made["name"] = _text(message["name"])
    for key, value in to_json({key: value for key, value in message.items() if key not in _PLAIN}).items():
        made.setdefault(key, value)  # the schema allows more fields
    return made


def _part(part: Any) -> dict[str, Any]:
    """One piece of a content of many: text, image, …"""
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "content": _text(part["text"])}
    if isinstance(part, Mapping):
        return {"type": UNKNOWN, **to_json(part)}
    return {"type": "text", "content": _text(part)}


def _of_text(role: str, value: Any) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": _text(value)}]}


def _text(value: Any) -> str:
    plain = to_json(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)
