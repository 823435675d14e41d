"""What a span of a rollout is in OpenTelemetry's GenAI conventions. Pure; nothing here raises.

Followed are the semantic conventions 1.41.0, the last release with GenAI in them; what is used of them has the same
names in GenAI semantic conventions 0.1.0, where they live now.

    span of verl                          gen_ai.operation.name    carries
    agent_loop, …AgentLoop.run            invoke_agent             agent's name, messages in and out
    LLMServer….generate                   chat                     request parameters, tokens used, messages, reason
    …Tool.execute, …call_tool             execute_tool             tool's name, arguments, result
    …extract_tool_calls                   none: nobody is asked    the answer, taken apart into text and calls

Any other span is told by what it holds: a prompt and sampling parameters make a chat, a tool's name a tool.

    verl.inputs, verl.outputs             what of inputs and outputs has no place there, as JSON text
    verl.<name>                           token ids and log-probabilities, as JSON text

Content (what may be private: messages, arguments, results, ids, rests) is kept apart, so that it can be left out.
Must not know: protobuf, settings, trackers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.backends.otlp_messages import (
    are_messages,
    arguments_of,
    call_of,
    finish_reason,
    input_messages,
    output_message,
)
from verl_shipper.backends.span_values import json_text
from verl_shipper.values import to_json, visible

CHAT, TOOL, AGENT = "chat", "execute_tool", "invoke_agent"
PROVIDER = "verl"  # who runs the model is not known here; the conventions allow a name of one's own
AGENT_NAME = re.compile(r"(?:^|\.)(\w*AgentLoop\w*)\.run$|^(agent_loop)$")
CHAT_NAME = re.compile(r"(?:LLMServer\w*|(?:^|\.)\w*ServerManager)\.generate$")
TOOL_NAME = re.compile(r"(?:^|\.)(\w*Tool\w*)\.execute$|(?:^|\.)_?call_tool$|^tool (.+)$")
KINDS = {"agent": AGENT, "chat": CHAT, "tool": TOOL}  # what a span says of itself, in its attribute `span_type`
EXTRACT_NAME = re.compile(r"(?:^|\.)extract_tool_calls$")
# sampling parameter → attribute and type; a value of another type stays with the rest
REQUEST: dict[str, tuple[str, type]] = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", float),
    "frequency_penalty": ("frequency_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "max_tokens": ("max_tokens", int),
    "max_new_tokens": ("max_tokens", int),
    "max_completion_tokens": ("max_tokens", int),
    "seed": ("seed", int),
    "n": ("choice.count", int),
    "stop": ("stop_sequences", list),
}
PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "input_ids")
PROMPT_TEXTS = ("messages", "raw_prompt", "prompt_text", "prompt", "input_text")
ANSWER_IDS = ("token_ids", "response_ids", "output_ids")
ANSWER_TEXTS = ("text", "response_text", "output_text", "response")
REASONS = ("stop_reason", "finish_reason")
BULKY = ("log_probs", "logprobs", "response_mask", "response_logprobs", "routed_experts")
TOOL_NAMES = ("tool_name", "name")
TOOL_ARGUMENTS = ("arguments", "parameters", "tool_args")
MODELS = ("model", "model_name", "model_path")
INPUT_COUNTS = ("input_tokens", "prompt_tokens", "prompt_length", "num_prompt_tokens")
OUTPUT_COUNTS = ("output_tokens", "completion_tokens", "response_tokens", "response_length", "num_output_tokens")


@dataclass(slots=True)
class Told:
    """Attributes of a span by name. Values are what OpenTelemetry knows: text, bool, int, float, list of texts."""

    operation: str | None = None
    plain: dict[str, Any] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Side:
    """Inputs or outputs while they are taken apart; `rest` is what nobody has taken."""

    rest: Any

    def take(self, *names: str) -> Any:
        """The first of these that is there and not None; taken out."""
        for name in names:
            if isinstance(self.rest, dict) and self.rest.get(name) is not None:
                return self.rest.pop(name)
        return None

    def has(self, *names: str) -> bool:
        return isinstance(self.rest, dict) and any(self.rest.get(name) is not None for name in names)


def told_of(name: str, inputs: Any, outputs: Any, attributes: Mapping[Any, Any]) -> Told:
    """Everything that the conventions know of a span, and the rests."""
    sides = _Side(_copy(inputs)), _Side(_copy(outputs))
    kind = attributes.get("span_type")
    told = Told((KINDS.get(kind) if isinstance(kind, str) else None) or operation_of(name, *sides))
    if told.operation is not None:
        told.plain["gen_ai.operation.name"] = told.operation
    if told.operation in (CHAT, AGENT):
        told.plain["gen_ai.provider.name"] = PROVIDER
        _model(told, sides[0], attributes)
    if told.operation == AGENT:
        _agent(told, name, attributes)
        reward = sides[1].rest.get("reward") if isinstance(sides[1].rest, dict) else None
        if isinstance(reward, int | float):
            told.plain["verl.reward"] = reward  # it is no content, and stays with the other outputs, too
    if told.operation == TOOL:
        _tool(told, name, *sides)
    elif told.operation is not None:
        _request(told, sides[0])
        _prompt(told, sides[0])
        _answer(told, sides[1])
        _counts(told, attributes)
    elif EXTRACT_NAME.search(name):
        _extracted(told, sides[1])
    for where, side in zip(("inputs", "outputs"), sides, strict=True):
        if side.rest is not None and side.rest != {}:
            told.content[f"verl.{where}"] = json_text(side.rest)
    return told


def operation_of(name: str, inputs: _Side, outputs: _Side) -> str | None:
    """What a span does, by its name or by what it holds; None for anything else."""
    if EXTRACT_NAME.search(name):
        return None
    if AGENT_NAME.search(name):
        return AGENT
    if CHAT_NAME.search(name):
        return CHAT
    if TOOL_NAME.search(name) or inputs.has("tool_name", "tool_call"):
        return TOOL
    asks = inputs.has(*PROMPT_IDS, *PROMPT_TEXTS)
    return CHAT if asks and (inputs.has("sampling_params") or outputs.has(*ANSWER_IDS)) else None


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _model(told: Told, inputs: _Side, attributes: Mapping[Any, Any]) -> None:
    model = next((attributes[name] for name in MODELS if isinstance(attributes.get(name), str)), None)
    if model is None and isinstance(inputs.rest, dict) and isinstance(inputs.rest.get("model"), str):
        model = inputs.take("model")
    if model:
        told.plain["gen_ai.request.model"] = model


def _agent(told: Told, name: str, attributes: Mapping[Any, Any]) -> None:
    found = AGENT_NAME.search(name)
    given = attributes.get("agent_name")
    told.plain["gen_ai.agent.name"] = given if isinstance(given, str) and given else (found and (found[1] or found[2]))


def _request(told: Told, inputs: _Side) -> None:
    if isinstance(inputs.rest, dict) and isinstance(inputs.rest.get("request_id"), str):
        told.plain["gen_ai.conversation.id"] = inputs.take("request_id")  # verl's is one for all turns of a trajectory
    given = inputs.rest.get("sampling_params") if isinstance(inputs.rest, dict) else None
    if not isinstance(given, Mapping):
        return
    inputs.take("sampling_params")
    rest = dict(given)
    for name, (attribute, kind) in REQUEST.items():
        value = _typed(given.get(name), kind)
        if value is not None and told.plain.setdefault(f"gen_ai.request.{attribute}", value) == value:
            del rest[name]
    if rest:
        told.plain["verl.sampling_params"] = json_text(rest)


def _typed(value: Any, kind: type) -> Any:
    """A value as the conventions want it; None when it is none such."""
    if kind is list:
        texts = [value] if isinstance(value, str) else value
        is_texts = isinstance(texts, list) and bool(texts) and all(isinstance(each, str) for each in texts)
        return [visible(each) for each in texts] if is_texts else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if kind is int:
        return int(value) if isinstance(value, int) and -(2**63) <= value < 2**63 else None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _prompt(told: Told, inputs: _Side) -> None:
    if isinstance(inputs.rest, list | str) and (are_messages(inputs.rest) or isinstance(inputs.rest, str)):
        told.content["gen_ai.input.messages"] = json_text(input_messages(inputs.rest))
        inputs.rest = None
        return
    _ids(told, inputs, PROMPT_IDS, "gen_ai.usage.input_tokens")
    for name in PROMPT_TEXTS:
        value = inputs.rest.get(name) if isinstance(inputs.rest, dict) else None
        if isinstance(value, str) or are_messages(value):
            told.content["gen_ai.input.messages"] = json_text(input_messages(inputs.take(name)))
            return


def _answer(told: Told, outputs: _Side) -> None:
    reason = _reason(told, outputs)
    _ids(told, outputs, ANSWER_IDS, "gen_ai.usage.output_tokens")
    _ids(told, outputs, PROMPT_IDS, "gen_ai.usage.input_tokens")
    for name in BULKY:
        if outputs.has(name):
            told.content[f"verl.{name}"] = json_text(outputs.take(name))
    if isinstance(outputs.rest, str):
        text, outputs.rest = outputs.rest, None
    else:
        told_text = [name for name in ANSWER_TEXTS if outputs.has(name) and isinstance(outputs.rest[name], str)]
        text = outputs.take(*told_text[:1])
    calls = outputs.rest.get("tool_calls") if isinstance(outputs.rest, dict) else None
    calls = outputs.take("tool_calls") if isinstance(calls, list) and calls else ()
    if text is not None or calls:
        told.content["gen_ai.output.messages"] = json_text(output_message(text, calls, reason))


def _reason(told: Told, outputs: _Side) -> str | None:
    for name in REASONS:
        reason = finish_reason(outputs.rest.get(name)) if isinstance(outputs.rest, dict) else None
        if reason is not None:
            outputs.take(name)
            told.plain["gen_ai.response.finish_reasons"] = [visible(reason)]
            return reason
    return None


def _ids(told: Told, side: _Side, names: tuple[str, ...], count: str) -> None:
    """Token ids under any of these names: counted, and kept as content."""
    for name in names:
        if not side.has(name):
            continue
        ids = side.rest[name]
        ids = ids if isinstance(ids, list) else to_json(ids)
        if isinstance(ids, list) and set(map(type, ids)) <= {int}:
            side.take(name)
            if told.operation == CHAT:  # an agent's answer holds what its tools said, too
                told.plain.setdefault(count, len(ids))
            told.content[f"verl.{name}" + ("'" if f"verl.{name}" in told.content else "")] = json_text(ids)


def _counts(told: Told, attributes: Mapping[Any, Any]) -> None:
    """Numbers of tokens that were counted where the ids are no longer."""
    for names, attribute in ((INPUT_COUNTS, "input_tokens"), (OUTPUT_COUNTS, "output_tokens")):
        count = next((attributes[name] for name in names if type(attributes.get(name)) is int), None)
        if count is not None and 0 <= count < 2**63:
            told.plain[f"gen_ai.usage.{attribute}"] = count  # the ids may be only those that are new


def _tool(told: Told, name: str, inputs: _Side, outputs: _Side) -> None:
    found = TOOL_NAME.search(name)
    call = call_of(inputs.take("tool_call"))
    given = next((key for key in TOOL_NAMES if inputs.has(key) and isinstance(inputs.rest[key], str)), None)
    called = call.name or (inputs.take(given) if given else None) or (found and (found[1] or found[2])) or name
    told.plain["gen_ai.tool.name"] = called
    told.plain["gen_ai.tool.type"] = "function"
    call_id = call.id or inputs.take("tool_call_id", "id")
    if call_id is not None:
        told.plain["gen_ai.tool.call.id"] = call_id if isinstance(call_id, str) else json_text(call_id)
    arguments = arguments_of(inputs.take(*TOOL_ARGUMENTS)) if call.arguments is None else call.arguments
    if arguments is not None:
        told.content["gen_ai.tool.call.arguments"] = json_text(arguments)
    if call.rest:
        told.content["verl.tool_call"] = json_text(call.rest)
    if outputs.rest is not None:
        told.content["gen_ai.tool.call.result"] = json_text(outputs.rest)
        outputs.rest = None


def _extracted(told: Told, outputs: _Side) -> None:
    """[text, [calls]], as verl's parsers of tool calls give it, or the same with names."""
    match outputs.rest:
        case [content, list(calls)] if content is None or isinstance(content, str):
            told.content["gen_ai.output.messages"] = json_text(output_message(content, calls))
            outputs.rest = None
        case {"content": content, "tool_calls": list(calls)} if content is None or isinstance(content, str):
            told.content["gen_ai.output.messages"] = json_text(output_message(content, calls))
            outputs.take("content")
            outputs.take("tool_calls")
