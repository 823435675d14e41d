"""Payloads of records whose values need a look first, and of whatever comes while the fast road is in use.

Must not know: streams, clients. Raises nothing that a value causes; a body of any kind becomes one.
"""

from __future__ import annotations

import time
from typing import Any

import msgpack

from verl_shipper_client.device import Reading
from verl_shipper_client.held import Unfinished
from verl_shipper_client.values import Take, is_on_device, plain, to_plain, whole_step
from verl_shipper_spool.record import RECORD_VERSION, RecordKind
from verl_shipper_spool.redact import redact


def pack_apart(value: Any) -> bytes:
    """MessagePack of `value` by a packer of its own: the client's may be at work below us."""
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=to_plain)
    return packed


def pack_slowly(kind: RecordKind, seq: int, step: Any, body: Any, *, wait: bool = False) -> bytes | Unfinished:
    """Payload of a record whose body may hold anything; an unfinished record when some of it is still on a device.

    `wait`: for the device instead.
    """
    time_ns = time.time_ns()
    reading = Reading()
    copied = body_of(body, None if wait else reading.take)
    step = reading.take(step) if is_on_device(step) and not wait else whole_step(step)
    if reading.is_empty:
        return pack_apart((RECORD_VERSION, int(kind), seq, step, time_ns, copied))
    reading.start()
    return Unfinished(kind, seq, step, time_ns, copied, reading)


def body_of(data: Any, take: Take | None = None) -> dict[Any, Any]:
    """A record's body of whatever was logged; a lone value gets a name."""
    copied = plain(data, take)
    return copied if isinstance(copied, dict) else {"value": copied}


def shown_config(config: Any) -> dict[str, Any]:
    """A run's configuration as it travels: plain, a mapping, without its secrets."""
    shown = redact(plain(config))
    if isinstance(shown, dict):
        return shown
    return {} if shown is None else {"config": shown}


def early_step(step: Any) -> Any:
    """The step as an int or None; as it is when it is still on a device."""
    return step if is_on_device(step) else whole_step(step)
