"""What a traced call of verl looks like in a span: its name, its kind, its inputs and outputs without what is heavy.

    generate              chat      one turn of the model; None and empty inputs are left out
    extract_tool_calls    parser    content and tool calls; the ids it read are those of the turn before it
    execute, _call_tool   tool      arguments, response, reward
    run                   agent     an agent loop; the mask as runs
    anything else         chain     all arguments, all it returns

Models of pydantic and dataclasses become dicts, as deep as DEPTH; images, videos and tensors travel as a marker with
their type and shape (values.py). Pure. Must not know: spans, verl. Never raises for what a call may hold.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from verl_shipper_client.values import cut_text
from verl_shipper_client.verl.trajectory import runs_of

DEPTH = 8  # a conversation has images five levels down
KINDS = {"generate": "chat", "extract_tool_calls": "parser", "execute": "tool", "_call_tool": "tool", "run": "agent"}
TOOL_CALL = "_call_tool"
_LEAVES = frozenset({int, float, bool, type(None)})
BYTES_SHOWN_MAX = 1024
DATA_URL_CHARS_MAX = 1024
_ALREADY_TOLD = ("raw_prompt", "reward_extra_info")  # at the root


@dataclass(frozen=True, slots=True)
class Describe:
    """How calls of one function are shown. `names`: of its positional parameters, without self."""

    name: str
    method: str
    names: tuple[str, ...]

    @property
    def span_type(self) -> str:
        return KINDS.get(self.method, "chain")

    @property
    def is_turn(self) -> bool:
        return self.method == "generate"

    @property
    def is_run(self) -> bool:
        return self.method == "run"

    @property
    def is_parser(self) -> bool:
        return self.method == "extract_tool_calls"

    def outputs(self, result: Any) -> Any:
        """What a call has returned."""
        if self.is_run:
            return _run_outputs(result[-1] if isinstance(result, list) and result else result)
        if self.is_parser and isinstance(result, (list, tuple)) and len(result) == 2:
            return {"content": fields_of(result[0]), "tool_calls": fields_of(result[1], DEPTH)}
        if self.span_type == "tool" and isinstance(result, (list, tuple)) and result:
            shown = {"response": fields_of(result[0], DEPTH), "reward": scalar(result[1] if len(result) > 1 else None)}
            return _without_nothing({**shown, "metrics": fields_of(result[2], DEPTH) if len(result) > 2 else None})
        shown = fields_of(result, DEPTH)
        return _without_nothing(shown) if isinstance(shown, dict) else shown


def describe_op(func: Any) -> Describe:
    """Look at a function once, not at every call."""
    try:
        parameters = list(inspect.signature(func).parameters.values())[1:]
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method = getattr(func, "__name__", "call")
    name = getattr(func, "__qualname__", method)
    return Describe(name, method, tuple(each.name for each in parameters if each.kind in kinds))


def call_of(describe: Describe, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and inputs of the span of one call."""
    if describe.method == TOOL_CALL:
        return _tool_call(args[0] if args else kwargs.get("tool_call"))
    names = describe.names + tuple(f"argument {number + 1}" for number in range(len(describe.names), len(args)))
    inputs = {**dict(zip(names, args, strict=False)), **kwargs}
    if describe.is_parser:
        ids = inputs.pop("responses_ids", None)
        inputs.pop("tools", None)  # the schemas of all tools, the same every time
        return describe.name, {"response_tokens": len(ids)} if hasattr(ids, "__len__") else {}
    return describe.name, _without_nothing(_each(inputs.items(), DEPTH))


def fields_of(value: Any, depth: int = 1) -> Any:
    """A model or a dataclass as a dict, so far down; everything else as it is, and so what cannot be looked into."""
    try:
        return _fields_of(value, depth)
    except Exception:  # noqa: BLE001 - a dataset may hold any object; values.py makes a marker of it
        return value


def _fields_of(value: Any, depth: int) -> Any:
    if isinstance(value, (str, bytes)):
        return _short(value)
    if value is None or isinstance(value, (str, int, float)) or depth <= 0:
        return value
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (int, float)):
            return value  # ids or numbers: thousands of them, looked at by nobody here
        return [fields_of(element, depth - 1) for element in value]
    if isinstance(value, (dict, Mapping)):
        return _each(value.items(), depth - 1)
    if hasattr(type(value), "model_fields") or hasattr(type(value), "__fields__"):
        return _each(vars(value).items(), depth - 1)
    if is_dataclass(value) and not isinstance(value, type):
        names = value.__dataclass_fields__
        return _each(((name, getattr(value, name, None)) for name in names), depth - 1)
    if getattr(getattr(value, "dtype", None), "kind", None) == "O" and hasattr(value, "tolist"):
        return fields_of(value.tolist(), depth)  # verl keeps messages in arrays of objects
    return value


def _each(items: Iterable[tuple[Any, Any]], depth: int) -> dict[Any, Any]:
    """`fields_of` of each, without asking for what is plain: most of it is."""
    return {key: value if type(value) in _LEAVES else fields_of(value, depth) for key, value in items}


def _short(value: str | bytes) -> Any:
    """An image in the middle of a conversation as a note that it is one; a text as far as a record can hold it."""
    if isinstance(value, bytes):
        return value if len(value) <= BYTES_SHOWN_MAX else f"<{len(value)} bytes>"
    if len(value) > DATA_URL_CHARS_MAX and value.startswith("data:"):
        return f"<{value[: value.find(',') if ',' in value[:100] else 30]}, {len(value)} characters>"
    return cut_text(value)


def scalar(value: Any) -> Any:
    """The value itself, or the first element of an array: verl's default trainer gives a whole batch's step."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value


def number_of(value: Any) -> Any:
    """A reward as a number, whatever it comes in; what is none as it is."""
    return scalar(value) if hasattr(value, "tolist") else value


def is_nothing(value: Any) -> bool:
    """None, or an empty container; an array does not say so by its truth."""
    return value is None or (isinstance(value, (dict, list, tuple)) and not value)


def is_same_list(left: Any, right: Any) -> bool:
    """Whether two lists hold the same; arrays and tensors in them have an opinion of their own about that."""
    try:
        return type(left) is list and type(right) is list and bool(left == right)
    except Exception:  # noqa: BLE001 - any object may be given
        return False


def _run_outputs(result: Any) -> Any:
    shown = fields_of(result, DEPTH)
    if not isinstance(shown, dict):
        return shown
    if "response_mask" in shown:
        shown["response_mask_runs"] = runs_of(shown.pop("response_mask"))
    extra = shown.get("extra_fields")
    if isinstance(extra, dict):
        shown["extra_fields"] = {key: value for key, value in extra.items() if key not in _ALREADY_TOLD}
    return _without_nothing(shown)


def _tool_call(call: Any) -> tuple[str, dict[str, Any]]:
    name = getattr(call, "name", None) or "unknown"
    arguments = getattr(call, "arguments", None)
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else as the model wrote it
            arguments = json.loads(arguments)
    inputs = {"arguments": arguments, "tool_call_id": getattr(call, "tool_call_id", None)}
    return f"tool {name}", _without_nothing(inputs)


def _without_nothing(values: dict[Any, Any]) -> dict[Any, Any]:
    """verl passes a dozen arguments of which most are None."""
    return {key: value for key, value in values.items() if not is_nothing(value)}
