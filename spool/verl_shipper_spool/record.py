"""A record: what one `log()` call froze. MessagePack both ways, and the vocabulary of the product.

    payload = [version=1, kind, seq, step, time_ns, body]

    kind  name         body
    1     run_start    {project, experiment, config, node, rank, world}
    2     metrics      {key: value}                                           as the user gave it, see values below
    3     generations  {columns: [str], rows: [[...]], part, parts, call}     one call may be cut into several parts;
                       {…, name}                                              a table that is no validation has a name
    4     span         {trace_id: bin16, span_id: bin8, parent_id: bin8|nil, name, start_ns, end_ns,
                        inputs, outputs, status, attributes}
    5     text         {key: str}
    6     file         {file_id: bin16, name, purpose, offset, data: bin}      a part of a file, see file_parts.py
                       {…, size, sha256: bin32}                               its last part
    7     run_finish   {exit_code: int|nil, reason: str}
    8     system       {node: str, values: {name: number}}                    a node's own facts at `time_ns`, no step

`seq` counts the records of one writer process over both of its streams, from 0. `step` is an int or nil. `time_ns` is
the wall clock at capture. Every id that a tracker later uses to refuse doubles comes from these fields.

Loss payload (frame type 02): [version=1, first ordinal, ordinal behind the last, class, reason].

Values: what MessagePack cannot carry is replaced at capture by an `Unsupported` marker (extension type 1, UTF-8
text that names the type), so that one strange value never costs its neighbours and can still be counted. Arrays of
token ids and log-probabilities are extension types 2 and 3 (arrays.py).

Must not know: files, frames, trackers. On bytes it cannot read: CorruptionError.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import msgpack

from verl_shipper_spool.arrays import Floats, Ints
from verl_shipper_spool.errors import CorruptionError

RECORD_VERSION = 1
UNSUPPORTED_EXT, INTS_EXT, FLOATS_EXT = 1, 2, 3
_FLOAT_S = 1  # msgpack: timestamps (ours never write one) are read as seconds since the epoch


class RecordKind(enum.IntEnum):
    """What a record is about. The numbers are the format."""

    RUN_START = 1
    METRICS = 2
    GENERATIONS = 3
    SPAN = 4
    TEXT = 5
    FILE = 6
    RUN_FINISH = 7
    SYSTEM = 8


KIND_NAME = {kind: kind.name.lower() for kind in RecordKind}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Marker of a value that cannot travel; `text` names its type (and shape)."""

    text: str


@dataclass(frozen=True, slots=True)
class Record:
    """One captured record. `time_ns` is wall time at capture; `body` depends on `kind` (table above)."""

    kind: RecordKind
    seq: int
    step: int | None
    time_ns: int
    body: dict[Any, Any]


@dataclass(frozen=True, slots=True)
class Loss:
    """Records `first` .. `end - 1` of the stream never reached it; `reason` says why."""

    first: int
    end: int
    record_class: str
    reason: str

    @property
    def count(self) -> int:
        return self.end - self.first


def encode_record(record: Record) -> bytes:
    """MessagePack payload of a record whose values are already plain (the client has its own fast road)."""
    return _pack([RECORD_VERSION, int(record.kind), record.seq, record.step, record.time_ns, record.body])


def decode_record(payload: bytes) -> Record:
    """Record of a payload. Raises CorruptionError when the payload is not format v1."""
    fields = _unpack(payload)
    if not isinstance(fields, list) or len(fields) < 6 or fields[0] != RECORD_VERSION:
        raise CorruptionError("not a version 1 record")
    _version, kind, seq, step, time_ns, body = fields[:6]
    try:
        known = RecordKind(kind)
    except ValueError as error:
        raise CorruptionError(f"unknown record kind {kind!r}") from error
    if not isinstance(body, dict) or not isinstance(seq, int) or not isinstance(time_ns, int):
        raise CorruptionError("record fields have wrong types")
    if step is not None and not isinstance(step, int):
        raise CorruptionError(f"step is {type(step).__name__}, not int")
    return Record(known, seq, step, time_ns, body)


def encode_loss(loss: Loss) -> bytes:
    return _pack([RECORD_VERSION, loss.first, loss.end, loss.record_class, loss.reason])


def decode_loss(payload: bytes) -> Loss:
    """Loss of a payload. Raises CorruptionError when the payload is not format v1."""
    match _unpack(payload):
        case [1, *fields]:
            return loss_of(fields)
        case other:
            raise CorruptionError(f"not a version 1 loss: {other!r:.80}")


def loss_of(fields: object) -> Loss:
    """Loss of [first ordinal, ordinal behind the last, class, reason, …]. Raises CorruptionError."""
    match fields:
        case [int(first), int(end), str(record_class), str(reason), *_] if 0 <= first < end:
            return Loss(first, end, record_class, reason)
        case _:
            raise CorruptionError(f"not a loss: {fields!r:.80}")


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=_plain)
    return packed


def extension(value: object) -> msgpack.ExtType | None:
    """What stands in a record for one of our own kinds of value; None for any other."""
    if isinstance(value, Unsupported):
        return msgpack.ExtType(UNSUPPORTED_EXT, value.text.encode("utf-8", "replace"))
    if isinstance(value, Ints):
        return msgpack.ExtType(INTS_EXT, value.content)
    return msgpack.ExtType(FLOATS_EXT, value.content) if isinstance(value, Floats) else None


def _plain(value: object) -> object:
    made = extension(value)
    if made is None:
        raise TypeError(f"not plain: {type(value).__name__}")
    return made


def _ext(code: int, data: bytes) -> Unsupported | Ints | Floats:
    if code == INTS_EXT:
        return Ints(data)
    if code == FLOATS_EXT:
        return Floats(data)
    text = data.decode("utf-8", "replace") if code == UNSUPPORTED_EXT else f"extension type {code}"
    return Unsupported(text)


def _pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map whose keys may be arrays (tuples at the writer): what the client can write, we can read."""
    return {_hashable(key): value for key, value in pairs}


def _hashable(key: Any) -> Any:
    return tuple(_hashable(part) for part in key) if isinstance(key, list) else key


def _unpack(payload: bytes) -> Any:
    try:
        return msgpack.unpackb(payload, raw=False, strict_map_key=False, ext_hook=_ext, timestamp=_FLOAT_S)
    except Exception:  # noqa: BLE001 - odd map keys and broken text need the slow road; msgpack has no common base
        return _unpack_slow(payload)


def _unpack_slow(payload: bytes) -> Any:
    try:
        return msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=False,
            ext_hook=_ext,
            timestamp=_FLOAT_S,
            object_pairs_hook=_pairs,
            unicode_errors="replace",
        )
    except Exception as error:
        raise CorruptionError(f"payload is not MessagePack: {error}") from error
