"""Payloads of records whose values need a look first, and of whatever comes while the fast road is in use.

Must not know: streams, clients. Raises nothing that a value causes; a body of any kind becomes one.
"""

from __future__ import annotations

import time
from typing import Any

import msgpack

from verl_shipper_client.values import plain, to_plain
from verl_shipper_spool.record import RECORD_VERSION, RecordKind


def pack_apart(value: Any) -> bytes:
    """MessagePack of `value` by a packer of its own: the client's may be at work below us."""
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=to_plain)
    return packed


def pack_slowly(kind: RecordKind, seq: int, step: int | None, body: Any) -> bytes:
    """Payload of a record whose body may hold anything."""
    return pack_apart((RECORD_VERSION, int(kind), seq, step, time.time_ns(), body_of(body)))


def body_of(data: Any) -> dict[Any, Any]:
    """A record's body of whatever was logged; a lone value gets a name."""
    copied = plain(data)
    return copied if isinstance(copied, dict) else {"value": copied}
