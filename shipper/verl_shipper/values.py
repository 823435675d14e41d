"""Values of a record as trackers can take them. Pure functions; nothing here raises, whatever a user logged.

`flatten_metrics` turns the body of a metrics record into numbers by flat name:

    {"a": {"b": 1.0}, 3: True, ("x", 1): [2.5]}   →   {"a/b": 1.0, "3": 1, "x/1": 2.5}

    value                               becomes             else counted as
    int, float (NaN and ±Inf too)       itself
    bool                                1 or 0
    list or tuple of one number         that number
    str                                                     text
    None                                                    none
    bytes, longer lists, markers, …                         not_a_number
    deeper than DEPTH_MAX                                   too_deep
    a dict or list inside itself                            inside_itself
    a flat name that is taken already                       key_clash   (the first in order keeps it)

`to_json` makes any value fit for strict JSON: NaN and infinities become words, bytes hexadecimal digits, a value that
could not travel its marker in angle brackets, a packed array a list. Half of a UTF-16 pair becomes U+FFFD everywhere.

Must not know: trackers, files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_shipper_spool.arrays import Floats, Ints
from verl_shipper_spool.record import Unsupported

DEPTH_MAX = 32
TOO_DEEP = "<too deep>"
# Words of the client's markers that tell more than "no number".
_MARKED = (("inside itself", "inside_itself"), ("nested deeper than", "too_deep"))
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Flattened:
    """`numbers` by flat name in the order they were logged; `ignored` counts the other values by reason."""

    numbers: dict[str, int | float]
    ignored: dict[str, int]


def flatten_metrics(body: Mapping[Any, Any]) -> Flattened:
    """Numbers of a metrics body, and a count of everything in it that is none."""
    flat = Flattened({}, {})
    _collect(body, "", 1, flat)
    return flat


def to_json(value: Any, depth: int = 0) -> Any:
    """`value` built from what strict JSON has: dict with string keys, list, str, int, finite float, bool, None."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else _word(value)
    if isinstance(value, bytes):
        return value.hex()
    if depth >= DEPTH_MAX:
        return TOO_DEEP
    if isinstance(value, Mapping):
        return _json_object(value, depth)
    if isinstance(value, list | tuple):
        return [to_json(element, depth + 1) for element in value]
    if isinstance(value, Ints | Floats):
        return to_json(value.tolist(), depth)
    return f"<{value.text}>" if isinstance(value, Unsupported) else f"<{type(value).__name__}>"


def visible(text: str) -> str:
    """`text` with U+FFFD where half of a UTF-16 pair stands alone; what comes out is always valid UTF-8."""
    return text if text.isascii() else LONE_SURROGATE.sub("\ufffd", text)


def key_text(key: Any, depth: int = 0) -> str:
    """Name of a key that need not be a string: 3 → "3", ("x", 1) → "x/1"."""
    if isinstance(key, str):
        return visible(key)
    if isinstance(key, tuple):
        return "/".join(key_text(part, depth + 1) for part in key) if depth < DEPTH_MAX else TOO_DEEP
    if isinstance(key, bytes):
        return key.decode("utf-8", "replace")
    return str(key) if key is None or isinstance(key, int | float) else f"<{type(key).__name__}>"


def _collect(body: Mapping[Any, Any], prefix: str, depth: int, flat: Flattened) -> None:
    numbers = flat.numbers
    for key, value in body.items():
        name = prefix + key_text(key)
        if isinstance(value, Mapping) and depth < DEPTH_MAX:
            _collect(value, f"{name}/", depth + 1, flat)
            continue
        number = _number(value)
        if isinstance(number, str):
            flat.ignored[number] = flat.ignored.get(number, 0) + 1
        elif name in numbers:
            flat.ignored["key_clash"] = flat.ignored.get("key_clash", 0) + 1
        else:
            numbers[name] = number


def _number(value: Any) -> int | float | str:
    """The number in `value`, or the reason why it has none."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float):
        return value
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], int | float):
        return _number(value[0])
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "too_deep"
    if isinstance(value, Unsupported):
        return next((reason for words, reason in _MARKED if words in value.text), "not_a_number")
    return "none" if value is None else "not_a_number"


def _word(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _json_object(value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, element in value.items():
        name = key_text(key)
        while name in result:  # 3 beside "3": both are kept
            name += "'"
        result[name] = to_json(element, depth + 1)
    return result
