"""Records for tests of sampling, bodies nobody should write, and what a sampler says of a stream."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from verl_shipper.policy.sampling import Sampling
from verl_shipper.policy.stream_sampler import Decision, StreamSampler, Writer
from verl_shipper_spool.record import Record, RecordKind, Unsupported, decode_record, encode_record

NESTED: Any = 1.0
for _ in range(40):
    NESTED = {"k": NESTED}
ABYSS: Any = 1
for _ in range(1000):  # as deep as MessagePack carries
    ABYSS = {"k": ABYSS}
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**64 - 1, -(2**63), 0.5, math.nan, math.inf, -math.inf, "", "text", b"", b"\xff"),
    *([], [1], [[2]], {}, {"a": 1}, {("x", 1): {3: b"k"}}, Unsupported("Tensor"), NESTED, ABYSS, [ABYSS]),
)
ODD_KEYS: tuple[Any, ...] = ("a", "", "val/x", b"\xff", 3, True, None, math.nan, ("x", ("y", 1)), Unsupported("k"))
ODD_BODIES: tuple[dict[Any, Any], ...] = (
    *({}, {key: index for index, key in enumerate(ODD_KEYS)}, dict.fromkeys(ODD_KEYS, ABYSS)),
    *({"a": value} for value in ODD_VALUES),
    {"a/b": 1, "a": {"b": 2, "": {}}, ("a", "b"): 3},
)


def record(kind: RecordKind, body: Mapping[Any, Any], step: int | None = None, seq: int = 0) -> Record:
    return Record(kind, seq, step, 1, dict(body))


def metrics(step: int | None, body: Mapping[Any, Any] | None = None, **values: Any) -> Record:
    return record(RecordKind.METRICS, {**(body or {}), **values}, step)


def part(step: int | None, inputs: Iterable[str], number: int = 0, parts: int = 1, call: int = 0) -> Record:
    """A part of a validation's table."""
    rows = [[text, f"answer to {text}", 1.0] for text in inputs]
    body = {"columns": ["input", "output", "score"], "rows": rows, "part": number, "parts": parts, "call": call}
    return record(RecordKind.GENERATIONS, body, step)


def span(step: int | None, trace: int, sample: Any = None, **body: Any) -> Record:
    attributes = {} if sample is None else {"sample_index": sample}
    values = {"trace_id": trace.to_bytes(16, "big"), "name": "turn", "attributes": attributes, **body}
    return record(RecordKind.SPAN, values, step)


def sampler(writer: Writer | None = None, **values: Any) -> StreamSampler[int]:
    return StreamSampler(Sampling.of(values), writer or Writer())


def judged(made: StreamSampler[int], stream: Iterable[Record | None], *, end: bool = True) -> list[Decision[int]]:
    """What becomes of a stream; tags are the places in it."""
    decisions: list[Decision[int]] = []
    for tag, each in enumerate(stream):
        made.offer(tag, each)
        decisions += made.decided()
    if end:
        made.end()
        decisions += made.decided()
    return decisions


def kept(decisions: Iterable[Decision[int]]) -> list[int]:
    """Tags of what is delivered."""
    return [decision.tag for decision in decisions if decision.record is not None or decision.rows]


def bodies(decisions: Iterable[Decision[int]]) -> list[dict[Any, Any]]:
    return [decision.record.body for decision in decisions if decision.record is not None]


def travelled(each: Record) -> Record:
    """As it comes out of a spool."""
    return decode_record(encode_record(each))
