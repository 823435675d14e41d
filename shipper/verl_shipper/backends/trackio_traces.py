"""Generations and spans as traces of trackio: messages that a person reads, and metadata. Pure.

    generations   [user: input, assistant: output], score and other columns as metadata; one trace a row
    span          messages  of `inputs`: messages, else raw_prompt, else the prompt's text, else the inputs as JSON;
                            then the answer of `outputs`: response_text, text or answer, else the outputs as JSON
                  metadata  attributes (step, uid, reward, …), ids in hexadecimal digits, times, duration_ms, status,
                            and what is left of inputs and outputs

Keys and shapes are those of verl's own trackio logger, so both look the same there. trackio keeps the metadata of a
trace four times (row, search text, its index, file), hence nothing stands in it that the messages say, and long lists
of numbers are replaced by their length.

Must not know: the store. Never raises.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_shipper.backends.base import Item
from verl_shipper.values import key_text, to_json, visible

TYPE = "trackio.trace"
SPAN_PREFIX = "rollout_trace/"
ANSWERS = ("response_text", "text", "answer")
QUESTIONS = ("messages", "raw_prompt")
INPUTS, OUTPUTS = ("input", "prompt"), ("output", "response")
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class Shown:
    """Values as a trace shows them; what it leaves out is counted in `ignored`."""

    numbers_max: int
    ignored: Counter[str]

    def value(self, value: Any) -> Any:
        """`value` for trackio's JSON, long lists of numbers by their length."""
        return self._short(to_json(value))

    def text(self, value: Any) -> str:
        return visible(value) if isinstance(value, str) else json.dumps(self.value(value), ensure_ascii=False)

    def _short(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._short(element) for key, element in value.items()}
        if not isinstance(value, list):
            return self.fit(value)
        if len(value) > self.numbers_max and all(isinstance(element, int | float) for element in value):
            self.ignored["long_list"] += 1
            return f"<{len(value)} numbers>"
        return [self._short(element) for element in value]

    @staticmethod
    def fit(value: Any) -> Any:
        """Integers beyond 64 bits, which trackio's JSON does not carry, as text."""
        if isinstance(value, dict):
            return {key: Shown.fit(element) for key, element in value.items()}
        if isinstance(value, list):
            return [Shown.fit(element) for element in value]
        is_large = isinstance(value, int) and not INTEGER_MIN <= value <= INTEGER_MAX
        return hex(value) if is_large else value  # decimal digits of a huge one would raise


def generation_traces(item: Item, shown: Shown) -> list[dict[str, Any]]:
    """One trace for each row of a generations record."""
    body = item.record.body
    columns, rows = body.get("columns"), body.get("rows")
    names = [key_text(name) for name in columns] if isinstance(columns, list) else []
    place = {"rank": item.rank, "call": body.get("call"), "part": body.get("part")}
    told = {name: shown.value(number) for name, number in place.items() if number}
    return [
        _generation(names, row if isinstance(row, list | tuple) else [row], {"sample_index": index, **told}, shown)
        for index, row in enumerate(rows if isinstance(rows, list) else [])
    ]


def span_key(body: Mapping[Any, Any]) -> str:
    """Name of the trace of a span, as verl makes it."""
    name = visible(str(body.get("name") or "span"))
    return SPAN_PREFIX + "".join(sign if sign.isalnum() or sign in "._-" else "_" for sign in name)


def span_trace(item: Item, experiment: str, shown: Shown) -> dict[str, Any]:
    """The trace of a span record."""
    body = item.record.body
    inputs, outputs = _mapping(body.get("inputs"), "input"), _mapping(body.get("outputs"), "output")
    question = _question(inputs, outputs, str(body.get("name") or "span"), shown)
    answer = _answer(outputs, shown)
    metadata = _about(item, experiment, shown)
    # What the messages say is taken out of inputs and outputs by now.
    for name, rest in (("inputs", inputs), ("output", outputs)):
        if rest:
            metadata[name] = shown.value(rest)
    return _trace([*question, *answer], metadata)


def _generation(names: list[str], row: Iterable[Any], told: dict[str, Any], shown: Shown) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for index, cell in enumerate(row):
        name = names[index] if index < len(names) else f"column_{index + 1}"
        while name in cells:
            name += "'"
        cells[name] = cell
    messages = []
    for role, wanted in (("user", INPUTS), ("assistant", OUTPUTS)):
        chosen = next((name for name in wanted if name in cells), next(iter(cells), None))
        if chosen is not None:
            messages.append({"role": role, "content": shown.text(cells.pop(chosen))})
    rest = {name: shown.value(cell) for name, cell in cells.items()}
    return _trace(messages, {**rest, "source": "validation_generations", **told})


def _about(item: Item, experiment: str, shown: Shown) -> dict[str, Any]:
    """Attributes and all that a span is besides inputs and outputs; of two of a name ours keeps it."""
    body = item.record.body
    start_ns, end_ns = body.get("start_ns"), body.get("end_ns")
    ours: dict[str, Any] = {
        "op": visible(str(body.get("name") or "span")),
        "status": "error" if body.get("status") == "error" else "success",
        **{name: _hex(body.get(name)) for name in ("trace_id", "span_id", "parent_id")},
        "start_ns": start_ns,
        "end_ns": end_ns,
    }
    if isinstance(start_ns, int) and isinstance(end_ns, int):
        ours["duration_ms"] = round(max(end_ns - start_ns, 0) / 1e6, 3) if end_ns - start_ns < 2**63 else None
    if item.rank:
        ours["rank"] = item.rank
    attributes = body.get("attributes")
    given = shown.value(attributes) if isinstance(attributes, Mapping) else {}
    named = {f"user.{name}" if name in (*ours, "inputs", "output") else name: value for name, value in given.items()}
    fallback = {"step": item.record.step, "experiment_name": visible(experiment)}
    return {**fallback, **named, **{name: shown.value(value) for name, value in ours.items() if value is not None}}


def _question(inputs: dict[Any, Any], outputs: dict[Any, Any], name: str, shown: Shown) -> list[dict[str, Any]]:
    kwargs = inputs.get("kwargs")
    for place in (inputs, kwargs if isinstance(kwargs, Mapping) else {}):
        for key in QUESTIONS:
            messages = _messages(place.get(key), shown)
            if messages:
                if place is inputs:
                    inputs.pop(key)
                else:
                    inputs["kwargs"] = {other: value for other, value in place.items() if other != key}
                return messages
    for place in (inputs, outputs):
        if isinstance(place.get("prompt_text"), str):
            return [{"role": "user", "content": visible(place.pop("prompt_text"))}]
    content = shown.text(dict(inputs))
    inputs.clear()
    system = f"verl rollout trace operation: {visible(name)}"
    return [{"role": "system", "content": system}, {"role": "user", "content": content}]


def _answer(outputs: dict[Any, Any], shown: Shown) -> list[dict[str, Any]]:
    for key in ANSWERS:
        if isinstance(outputs.get(key), str) and outputs[key]:
            return [{"role": "assistant", "content": visible(outputs.pop(key))}]
    if not outputs:
        return []
    content = shown.text(outputs["output"] if outputs.keys() == {"output"} else dict(outputs))
    outputs.clear()
    return [{"role": "assistant", "content": content}]


def _messages(value: Any, shown: Shown) -> list[dict[str, Any]]:
    """Messages in the shape of a chat; empty when there are none."""
    if not isinstance(value, list | tuple):
        return []
    return [shown.value(one) for one in value if isinstance(one, Mapping) and isinstance(one.get("role"), str)]


def _mapping(value: Any, name: str) -> dict[Any, Any]:
    """A copy that may be taken apart. What is no mapping gets a name."""
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else {name: value}


def _hex(value: Any) -> str | None:
    return value.hex() if isinstance(value, bytes) else None


def _trace(messages: list[dict[str, Any]], metadata: dict[str, Any]) -> dict[str, Any]:
    return {"_type": TYPE, "messages": messages, "metadata": metadata, "spans": []}
