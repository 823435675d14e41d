"""Span records as OTLP takes them: a request of resources, each with its spans. Pure.

    trace id, span id, parent, times, status      frozen at capture: a repeat is the same span again
    gen_ai.*                                      what the span is in the GenAI conventions (otlp_genai.py)
    verl.<name>                                   attributes of the record; names with a dot stay as they are
    verl.step, verl.rank                          of the record, where its attributes have none
    resource                                      service.name and .instance.id, verl_shipper.run_id, verl.project,
                                                  verl.experiment, and what the settings add

Texts, flags and numbers stay what they are, everything else becomes JSON text. What somebody has set under a name of
the conventions counts before what is found out here.

Must not know: HTTP, batches. On failure: ValueError for a span that cannot be one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from verl_shipper.backends.base import RunInfo
from verl_shipper.backends.otlp_genai import CHAT, told_of
from verl_shipper.backends.span_values import SCOPE, bare_span, json_text
from verl_shipper.values import key_text, to_json, visible

SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
INT_MIN, INT_MAX = -(2**63), 2**63 - 1
ERROR_TYPE = re.compile(r"[A-Za-z_][\w.]*(?=:|$)")
CONTENT_NAMES = frozenset(
    {"gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.tool.definitions"}
    | {"gen_ai.tool.call.arguments", "gen_ai.tool.call.result"}
)
OTHER = "_OTHER"  # the conventions' word for an error without a name


def request_of(spans: Iterable[tuple[int, Any]], run: RunInfo, extra: Mapping[str, str]) -> Any:
    """The request that carries `spans` (rank, and what `span_of` has made); `extra` are more resource attributes."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    scopes: dict[int, Any] = {}
    for rank, span in spans:
        if rank not in scopes:
            carrier = request.resource_spans.add(schema_url=SCHEMA)
            for name, value in resource_of(run, rank, extra).items():
                _put(carrier.resource, name, value)
            scopes[rank] = carrier.scope_spans.add(schema_url=SCHEMA)
            scopes[rank].scope.name = SCOPE
        scopes[rank].spans.append(span)
    return request


def resource_of(run: RunInfo, rank: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Who speaks: one instance of the service for each rank of a run."""
    ours = {
        "service.instance.id": f"{run.run_id}/{rank}",
        "verl_shipper.run_id": run.run_id,
        "verl.project": run.project,
        "verl.experiment": run.experiment,
    }
    return {**ours, **extra}


def span_of(body: Mapping[str, Any], *, step: int | None, rank: int, content: bool = True) -> tuple[Any, int]:
    """The OTLP span of a span record, and how many values were left out of it because `content` is not wanted. Raises
    ValueError when ids or times are not what they must be."""
    span = bare_span(body)
    given = body.get("attributes")
    attributes: Mapping[Any, Any] = given if isinstance(given, Mapping) else {}
    inputs, outputs = body.get("inputs"), body.get("outputs")
    told = told_of(span.name, inputs, outputs, attributes)
    span.kind = span.SPAN_KIND_CLIENT if told.operation == CHAT else span.SPAN_KIND_INTERNAL
    named = _named(attributes)
    private = [name for name in named if name in CONTENT_NAMES and not content]
    for name in private:
        del named[name]
    found = {"verl.step": step, "verl.rank": rank} | told.plain | (told.content if content else {})
    if span.status.code == span.status.STATUS_CODE_ERROR:
        found |= _error(span, attributes.get("error"))
    for name, value in found.items():
        if value is not None:
            named.setdefault(name, value)
    for name, value in named.items():
        _put(span, name, value)
    left_out = 0 if content else sum(value is not None for value in (inputs, outputs))
    return span, left_out + len(private)


def _named(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """A record's attributes by the names that they get; two of them never share one."""
    named: dict[str, Any] = {}
    for key, value in attributes.items():
        name = key_text(key)
        name = name if "." in name.strip(".") else f"verl.{name}"
        while name in named:
            name += "'"
        named[name] = value
    return named


def _error(span: Any, text: Any) -> dict[str, Any]:
    plain = visible(text) if isinstance(text, str) else "" if text is None else json_text(text)
    span.status.message = plain
    found = ERROR_TYPE.match(plain)
    return {"error.type": found[0] if found else OTHER}


def _put(carrier: Any, name: str, value: Any) -> None:
    """One attribute in OpenTelemetry's own types."""
    pair = carrier.attributes.add(key=visible(name))
    if isinstance(value, bool):
        pair.value.bool_value = value
    elif isinstance(value, int) and INT_MIN <= value <= INT_MAX:
        pair.value.int_value = value
    elif isinstance(value, float):
        pair.value.double_value = value
    elif isinstance(value, str):
        pair.value.string_value = visible(value)
    elif isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        for each in value:
            pair.value.array_value.values.add(string_value=visible(each))
    else:
        pair.value.string_value = json_text(to_json(value))
