"""What a user may log, made plain. The fast road is MessagePack itself; this file is what it calls for the rest.

    given                                             becomes
    Python int, float, bool, str, None, dict, list    itself
    NumPy scalar, 0-d or 1-element array or tensor    the Python number
    other Number (Decimal, Fraction)                  float
    int outside 64 bits                               nearest float; beyond float range Unsupported
    str with lone surrogates                          U+FFFD in their place, whole pairs joined
    anything else, nesting deeper than 32, a cycle    Unsupported, with the type's name

Works by duck typing: never imports torch or numpy. Must not know: files, sockets. Never raises on purpose; what a
foreign object raises while it is converted makes it Unsupported.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack

from verl_shipper_spool.record import UNSUPPORTED_EXT

DEPTH_MAX = 32
TEXT_CHARS_MAX = 1_000_000  # one text; a frame holds 16 MiB and UTF-8 needs up to 4 bytes a character
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


def to_plain(value: Any) -> Any:
    """MessagePack's hook for types it does not know."""
    try:
        return _number(value)
    except Exception as error:  # noqa: BLE001 - a foreign object may raise anything; it becomes a marker, counted later
        return unsupported(value, type(error).__name__)


def unsupported(value: object, why: str = "") -> msgpack.ExtType:
    """Marker that travels in place of a value; names its type and shape."""
    shape = getattr(value, "shape", None)
    size = f" {tuple(shape)}" if isinstance(shape, Iterable) else ""
    text = f"{type(value).__module__}.{type(value).__qualname__}{size}{' ' + why if why else ''}"
    return msgpack.ExtType(UNSUPPORTED_EXT, text.encode("utf-8", "replace")[:200])


def plain(value: Any, depth: int = 0) -> Any:
    """The slow road: a plain copy of any value, whatever MessagePack disliked about it."""
    if isinstance(value, str):
        return clean_text(value)
    if value is None or isinstance(value, (bool, bytes)):
        return value
    if isinstance(value, int):
        return _whole(value)
    if isinstance(value, float):
        return float(value)
    if depth >= DEPTH_MAX:
        return unsupported(value, f"nested deeper than {DEPTH_MAX}")
    if isinstance(value, Mapping):
        return {_key(key): plain(item, depth + 1) for key, item in list(value.items())}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    return to_plain(value)


def clean_text(text: str) -> str:
    """Text that every encoder takes: pairs of surrogates joined, lone ones visibly replaced."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def cut_text(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """At most `chars_max` characters of `text`, with a visible marker where it was cut."""
    if len(text) <= chars_max:
        return text
    return f"{text[:chars_max]} …[cut: {chars_max} of {len(text)} characters]"


def whole_step(step: Any) -> int | None:
    """The step as an int; None for what is no whole number of 64 bits."""
    if step is None or isinstance(step, bool):
        return None if step is None else int(step)
    try:
        number = int(step)
        return number if number == step and _INT_MIN <= number <= _INT_MAX else None
    except Exception:  # noqa: BLE001 - any object may be given; a step that is none is None, and visible as such
        return None


def _number(value: Any) -> Any:
    if hasattr(value, "item") and _count(value) == 1:
        item = value.item()
        if isinstance(item, (bool, float)):
            return item
        return _whole(item) if isinstance(item, int) else unsupported(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return {_key(key): item for key, item in list(value.items())}
    return unsupported(value)


def _count(value: Any) -> int:
    count = getattr(value, "numel", None)
    return int(count()) if callable(count) else int(getattr(value, "size", 1))


def _whole(value: int) -> Any:
    value = int(value)
    if _INT_MIN <= value <= _INT_MAX:
        return value
    try:
        return float(value)
    except OverflowError:
        return unsupported(value, "beyond float range")


def _key(key: Any) -> Any:
    if isinstance(key, str):
        return clean_text(key)
    if isinstance(key, tuple):
        return "/".join(clean_text(str(part)) for part in key)
    return clean_text(str(key))
