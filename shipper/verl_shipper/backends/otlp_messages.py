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
from dataclasses import dataclass
from typing import Any

from verl_shipper.values import to_json

UNKNOWN = "unknown"  # the schema wants a reason, and nobody gave one
TOOL_CALL = "tool_call"
# The conventions' words for what servers answer. verl's "completed" stands for both "stop" and "length", and stays.
REASONS = {"tool_calls": TOOL_CALL, "function_call": TOOL_CALL}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `rest` is what of it has no place in the conventions."""

    id: str | None
    name: str | None
    arguments: Any
    rest: Mapping[Any, Any]


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
    found = call_of(call)
    return {"type": TOOL_CALL, "id": found.id, "name": found.name or UNKNOWN, "arguments": found.arguments} | {
        f"call_{key}": value for key, value in to_json(found.rest).items()
    }


def call_of(call: Any) -> Call:
    """A call: OpenAI's {"id", "function": {"name", "arguments"}}, or flat."""
    if not isinstance(call, Mapping):
        return Call(None, None, to_json(call), {})
    rest = dict(call)
    function = rest.pop("function") if isinstance(rest.get("function"), Mapping) else {}
    inner = {**function} or rest
    name = _text_or_none(inner.pop("name", None))
    arguments = arguments_of(inner.pop("arguments", None))
    call_id = _text_or_none(rest.pop("id", None))
    if rest.get("type") in ("function", TOOL_CALL):
        del rest["type"]
    if inner is not rest and inner:
        rest["function"] = inner
    return Call(call_id, name, arguments, rest)


def arguments_of(value: Any) -> Any:
    """Arguments as a value: models write them as JSON text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    return to_json(value)


def _message(message: Mapping[Any, Any]) -> dict[str, Any]:
    rest = dict(message)
    role, content, calls = rest.pop("role"), rest.pop("content", None), rest.get("tool_calls")
    parts: list[dict[str, Any]] = []
    if role == "tool":
        call_id = _text_or_none(rest.pop("tool_call_id", None))
        parts.append({"type": "tool_call_response", "id": call_id, "response": to_json(content)})
    elif isinstance(content, list):
        parts += [_part(each) for each in content]
    elif content is not None:
        parts.append({"type": "text", "content": _text(content)})
    if isinstance(calls, list) or calls is None:
        parts += [call_part(call) for call in rest.pop("tool_calls", None) or ()]
    made: dict[str, Any] = {"role": _text(role), "parts": parts}
    for key, value in to_json(rest).items():  # the schema allows more fields
        made[f"{key}'" if key in made else key] = value
    return made


def _part(part: Any) -> dict[str, Any]:
    """One piece of a content of many: text, image, …"""
    if not isinstance(part, Mapping):
        return {"type": "text", "content": _text(part)}
    if part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        named = {key: value for key, value in part.items() if key not in ("type", "text", "content")}
        more = {"text_content": part["content"]} if "content" in part else {}
        return {**to_json(named | more), "type": "text", "content": _text(part["text"])}
    plain = to_json(part)
    return plain if isinstance(plain.get("type"), str) else {"type": UNKNOWN, "part": plain}


def _of_text(role: str, value: Any) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": _text(value)}]}


def _text(value: Any) -> str:
    plain = to_json(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)
