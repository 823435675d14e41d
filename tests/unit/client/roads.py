"""The two roads of a value from log() to the daemon, and foreign types that travel on them.

Must not know: files, sockets. On failure: AssertionError when a value costs its neighbour.
"""

from __future__ import annotations

import enum
from typing import Any

import msgpack

from verl_shipper_client.values import plain, to_plain
from verl_shipper_spool.record import Record, RecordKind, decode_record


class Colour(enum.IntEnum):
    RED = 3


class Kind(enum.Enum):
    RED = "r"
    BLUE = "b"


def packed(body: Any) -> bytes:
    """Payload of a record by the fast road. Raises where the slow road is needed."""
    payload: bytes = msgpack.packb((1, 2, 0, 0, 1, body), use_bin_type=True, default=to_plain)
    return payload


def by_fast_road(value: Any) -> Any:
    """What arrives of a value when MessagePack itself is tried first, as log() does."""
    try:
        return _arrived(packed({"value": value, "good": 1.5}))
    except (TypeError, ValueError, OverflowError):
        return by_slow_road(value)


def by_slow_road(value: Any) -> Any:
    return _arrived(packed(plain({"value": value, "good": 1.5})))


def _arrived(payload: bytes) -> Any:
    record: Record = decode_record(payload)
    assert record.kind is RecordKind.METRICS
    assert record.body["good"] == 1.5
    return record.body["value"]
