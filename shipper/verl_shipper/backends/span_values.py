"""Spans as every tracker of spans takes them: OpenTelemetry protobuf with the ids that were frozen at capture. Pure.

Must not know: trackers, batches, runs. On failure: ValueError for a span that cannot be one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from verl_shipper.values import to_json, visible
from verl_shipper_spool.arrays import Floats, Ints

SCOPE = "verl-shipper"
TIME_NS_MAX = 2**63 - 1
NUMBERS = frozenset({int, float})


def bare_span(body: Mapping[str, Any]) -> Any:
    """The OpenTelemetry span of a span record: ids, name, times, status; no attributes yet. Raises ValueError when ids
    or times are not what they must be."""
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    parent_id = b"" if body.get("parent_id") is None else id_of(body, "parent_id", 8)
    span = Span(trace_id=id_of(body, "trace_id", 16), span_id=id_of(body, "span_id", 8), parent_span_id=parent_id)
    span.name = visible(str(body.get("name") or "span"))
    span.start_time_unix_nano = time_ns(body.get("start_ns"))
    span.end_time_unix_nano = max(time_ns(body.get("end_ns")), span.start_time_unix_nano)
    span.status.code = Status.STATUS_CODE_ERROR if body.get("status") == "error" else Status.STATUS_CODE_OK
    return span


def json_text(value: Any) -> str:
    """A value as strict JSON. Thousands of numbers in a row, as rollouts have them, take the short road."""
    value = value.tolist() if isinstance(value, Ints | Floats) else value
    if isinstance(value, list) and NUMBERS.issuperset(map(type, value)):
        with contextlib.suppress(ValueError):  # one of them is not finite
            return json.dumps(value, allow_nan=False)
    return json.dumps(to_json(value), ensure_ascii=False)


def id_of(body: Mapping[str, Any], field: str, size_bytes: int) -> bytes:
    value = body.get(field)
    if isinstance(value, bytes) and len(value) == size_bytes and any(value):
        return value
    raise ValueError(f"a span needs a {field} of {size_bytes} bytes that are not all zero")


def time_ns(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= TIME_NS_MAX:
        raise ValueError(f"not a time in nanoseconds: {value!r:.40}")
    return value
