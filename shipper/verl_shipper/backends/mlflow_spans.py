"""Spans as MLflow takes them: OpenTelemetry protobuf with the ids that were frozen at capture. Pure.

    trace_id (16 bytes), span_id (8)         MLflow upserts by them, so a repeat changes nothing
    mlflow.spanInputs, mlflow.spanOutputs    JSON text
    mlflow.spanType                          what kind of step it is, by the attribute `span_type`
    mlflow.traceTag.<name>                   on the root span only: becomes a tag of the trace (`tags.step = '7'`)

A server takes the message by POST /v1/traces (MLflow >= 3.4), a database store as the SDK's own span objects.

Must not know: batches, runs. On failure: ValueError for a span that cannot be one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_shipper.backends.span_values import SCOPE, bare_span, json_text
from verl_shipper.values import to_json, visible

TAGGED = ("step", "sample_index", "rollout_n", "validate", "experiment_name", "uid", "reward")
SPAN_TYPES = {"agent": "AGENT", "chat": "LLM", "tool": "TOOL", "parser": "PARSER", "chain": "CHAIN"}
TAG_PREFIX = "mlflow.traceTag."


def request_of(spans: list[Any]) -> Any:
    """The OTLP request that carries `spans` (made by `span_of`)."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    scope.scope.name = SCOPE
    scope.spans.extend(spans)
    return request


def span_of(body: Mapping[str, Any], *, step: int | None, rank: int, experiment: str) -> Any:
    """The OpenTelemetry span of a span record. Raises ValueError when ids or times are not what they must be."""
    span = bare_span(body)
    given = body.get("attributes")
    attributes: Mapping[Any, Any] = given if isinstance(given, Mapping) else {}
    texts = attribute_texts(attributes)
    span_type = SPAN_TYPES.get(str(attributes.get("span_type")))
    if span_type is not None:
        texts["mlflow.spanType"] = json_text(span_type)
    usage = token_usage(attributes) if span_type == SPAN_TYPES["chat"] else None
    if usage is not None:
        texts["mlflow.chat.tokenUsage"] = json_text(usage)
    inputs, outputs = body.get("inputs"), body.get("outputs")
    for name, value in (("mlflow.spanInputs", inputs), ("mlflow.spanOutputs", answered(inputs, outputs))):
        if value is not None:  # a given null would show as text
            texts[name] = json_text(value)
    if not span.parent_span_id:
        texts |= trace_tags(attributes, step, rank, experiment)
        texts[f"{TAG_PREFIX}mlflow.traceName"] = json_text(span.name)
    for key, text in texts.items():
        pair = span.attributes.add()
        pair.key = key
        pair.value.string_value = text
    return span


def token_usage(attributes: Mapping[Any, Any]) -> dict[str, int] | None:
    """What a call of the model has read and written; MLflow adds it up over a trace."""
    read, written = attributes.get("prompt_tokens"), attributes.get("response_tokens")
    if type(read) is not int or type(written) is not int:
        return None
    return {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}


def answered(inputs: Any, outputs: Any) -> Any:
    """Outputs with the answer to a conversation as a message of it: as such MLflow shows it."""
    if not isinstance(inputs, Mapping) or not isinstance(outputs, Mapping):
        return outputs
    text = outputs.get("response_text")
    if not isinstance(text, str) or "messages" not in inputs or "messages" in outputs:
        return outputs
    rest = {key: value for key, value in outputs.items() if key != "response_text"}
    return {"messages": [{"role": "assistant", "content": text}], **rest}


def attribute_texts(attributes: Mapping[Any, Any]) -> dict[str, str]:
    """Attributes as JSON text; MLflow's own names stay MLflow's."""
    names = ((visible(str(key)), value) for key, value in attributes.items())
    return {f"user.{name}" if name.startswith("mlflow.") else name: json_text(value) for name, value in names if name}


def trace_tags(attributes: Mapping[Any, Any], step: int | None, rank: int, experiment: str) -> dict[str, str]:
    """What verl's own tracing makes tags of. Tags are strings, encoded once more as JSON."""
    values = {"step": step, "experiment_name": experiment, "rank": rank}
    values |= {name: attributes[name] for name in TAGGED if attributes.get(name) is not None}
    return {
        f"{TAG_PREFIX}{name}": json_text(str(to_json(value))) for name, value in values.items() if value is not None
    }
