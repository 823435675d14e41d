"""What a user may log, made plain.

    given                                             becomes
    Python int, float, bool, str, None, dict, list    itself
    NumPy scalar, 0-d or 1-element array or tensor    the Python number; of a tensor on a device, see device.py
    other Number (Decimal, Fraction)                  float
    int outside 64 bits                               nearest float
    str with lone surrogates                          U+FFFD in their place, whole pairs joined
    key that is neither text nor number               its text; a tuple's parts joined with "/"
    second key of the same text                       (text,): the daemon counts it as a clash
    anything else, a number beyond float range, a
    masked element, a time, nesting deeper than 32,
    a cycle, more than a million values               Unsupported, with the type's name

Two roads: MessagePack itself, which calls `to_plain` for single numbers it does not know; and `plain`, a copy of the
whole record, as soon as anything else is in it.

Works by duck typing: never imports torch or numpy. Must not know: files, sockets. `to_plain` raises what is for the
slow road, nothing else here raises: what a foreign object raises while it is converted makes that object Unsupported
and costs its neighbours nothing.
"""

from __future__ import annotations

import itertools
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from verl_shipper_spool.arrays import Floats, Ints
from verl_shipper_spool.record import Unsupported, extension

OUR_OWN = (Unsupported, Ints, Floats)
DEPTH_MAX = 32
VALUES_MAX = 1_000_000  # of one record on the slow road; a knot of references may have no end
TEXT_CHARS_MAX = 1_000_000  # one text; a frame holds 16 MiB and UTF-8 needs up to 4 bytes a character
STEP_MAX = 2**63 - 1  # what trackers can hold
Take = Callable[[Any], Any]
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_MARKER_CHARS_MAX = 200
_DIMENSIONS_SHOWN_MAX = 8
_TOO_DEEP = "<too deep>"  # in place of the rest of a key, as the daemon has it
_TIME_KINDS = ("m", "M")  # NumPy's timedelta64 and datetime64
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object without a text of its own: would be a new name each time


def to_plain(value: Any) -> Any:
    """MessagePack's hook for types it does not know. Raises TypeError where the slow road is needed.

    It is asked about keys, too, and is not told so. A marker in place of a key would make two keys one, so only what
    can be no key gets one here.
    """
    if isinstance(value, OUR_OWN):
        return extension(value)
    if getattr(value, "is_cpu", True) is False:
        raise TypeError("on a device")
    number = _element(value) if hasattr(value, "item") and _count(value) == 1 else None
    if type(number) in (float, int, bool):
        return number
    if type(value).__hash__ is None and not isinstance(value, Mapping):
        return to_plain(_foreign(value))
    raise TypeError(f"needs a look: {type(value).__name__}")


def unsupported(value: object, why: str = "") -> Unsupported:
    """Marker that travels in place of a value; names its type and shape."""
    try:
        kind = type(value)
        text = f"{kind.__module__}.{kind.__qualname__}{_shape(value)}{' ' + why if why else ''}"
    except Exception:  # noqa: BLE001 - a class may lie about its own name
        text = f"unnamed {why}"
    return Unsupported(clean_text(text[:_MARKER_CHARS_MAX]))


def plain(value: Any, take: Take | None = None) -> Any:
    """The slow road: a plain copy of any value, whatever MessagePack disliked about it.

    `take`: what stands for a number that is on a device. Without it such a number is read, which waits for the device.
    """
    return _Walk(take).copy(value, 0)


def is_on_device(value: Any) -> bool:
    """Whether a value is one number in the memory of a device."""
    try:
        return getattr(value, "is_cpu", True) is False and not getattr(value, "is_meta", False) and _count(value) == 1
    except Exception:  # noqa: BLE001 - see the header
        return False


def is_a(value: object, kind: Any) -> bool:
    """isinstance, which a foreign object cannot break."""
    try:
        return isinstance(value, kind)
    except Exception:  # noqa: BLE001 - see the header
        return False


def error_text(error: BaseException) -> str:
    """An exception's name and text, as far as it tells them."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - see the header
        return type(error).__name__


def clean_text(text: str) -> str:
    """Text that every encoder takes: pairs of surrogates joined, lone ones visibly replaced."""
    try:
        str.encode(text, "utf-8")
    except UnicodeEncodeError:
        return str.encode(text, "utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def cut_text(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """At most `chars_max` characters of `text`, with a visible marker where it was cut."""
    if len(text) <= chars_max:
        return text
    return f"{text[:chars_max]} …[cut: {chars_max} of {len(text)} characters]"


def whole_step(step: Any) -> int | None:
    """The step as an int; None for what is no whole number of 64 bits."""
    try:
        number = step.item() if hasattr(step, "item") else step
        if number is None:
            return None
        whole = int(number)
        return whole if whole == number and _INT_MIN <= whole <= STEP_MAX else None
    except Exception:  # noqa: BLE001 - any object may be given; a step that is none is None, and visible as such
        return None


class _Walk:
    """One walk through a value: knows which containers it is inside of, and how many values it met."""

    __slots__ = ("_count", "_inside", "_take")

    def __init__(self, take: Take | None) -> None:
        self._take = take
        self._count = 0
        self._inside: set[int] = set()

    def copy(self, value: Any, depth: int) -> Any:
        try:
            if isinstance(value, str):
                return clean_text(value)
            if value is None or isinstance(value, (bool, bytes, *OUR_OWN)):
                return value
            if isinstance(value, int):
                return _whole(value)
            if isinstance(value, float):
                return float(value)
            if isinstance(value, (Mapping, list, tuple)):
                return self._container(value, depth)
            if self._take is not None and is_on_device(value):
                return self._take(value)
        except Exception as error:  # noqa: BLE001 - see the header
            return unsupported(value, type(error).__name__)
        return _foreign(value)

    def _container(self, value: Any, depth: int) -> Any:
        identity = id(value)
        if identity in self._inside:
            return unsupported(value, "inside itself")
        if depth >= DEPTH_MAX:
            return unsupported(value, f"nested deeper than {DEPTH_MAX}")
        self._count += len(value)
        if self._count > VALUES_MAX:
            return unsupported(value, f"more than {VALUES_MAX} values")
        self._inside.add(identity)
        try:
            if isinstance(value, Mapping):
                return self._mapping(value, depth)
            return [self.copy(item, depth + 1) for item in value]
        finally:
            self._inside.discard(identity)

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
        copied: dict[Any, Any] = {}
        for key, item in _items(value):
            name = _key(key)
            while name in copied:  # two keys of one text: the second is still in the record, and counted as a clash
                name = (name,)
            copied[name] = self.copy(item, depth + 1)
        return copied


def _foreign(value: Any) -> Any:
    """The number in an object that is none of Python's own, or a marker."""
    try:
        return _number(value)
    except Exception as error:  # noqa: BLE001 - see the header
        return unsupported(value, type(error).__name__)


def _number(value: Any) -> Any:
    if isinstance(value, Unsupported):
        return value
    if hasattr(value, "item") and _count(value) == 1:
        return _element(value)
    return _whole(value) if isinstance(value, int) else _real(value, value)


def _element(value: Any) -> Any:
    """The only element of an array, a tensor, or a scalar of their libraries."""
    if hasattr(value, "to_local"):
        value = value.to_local()  # of a distributed tensor: its `item` may have to ask all ranks
    mask = getattr(value, "mask", None)
    if mask is not None and not callable(mask) and bool(mask):
        return unsupported(value, "masked")  # what lies below the mask is no value
    item = value.item()
    if hasattr(item, "item"):
        item = item.item()  # an array of objects, or a type that MessagePack does not know either
    if isinstance(item, (bool, float)):
        return item
    if not isinstance(item, int):
        return _real(item, value)
    is_time = getattr(getattr(value, "dtype", None), "kind", None) in _TIME_KINDS
    return unsupported(value) if is_time else _whole(item)  # nanoseconds are no metric, as days are none


def _real(number: Any, value: Any) -> Any:
    """float of any other real number: Decimal and Fraction, NumPy's long double and types of its extensions."""
    if isinstance(number, numbers.Integral):
        return _whole(int(number))
    is_complex = isinstance(number, numbers.Complex) and not isinstance(number, numbers.Real)
    if is_complex or not (isinstance(number, numbers.Number) or hasattr(number, "dtype")) or _count(number) != 1:
        return unsupported(value)
    real = float(number)
    return unsupported(value, "beyond float range") if math.isinf(real) and number != real else real


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


def _items(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    try:
        return list(value.items())
    except Exception:  # noqa: BLE001 - a configuration with a missing value, for one: the others are wanted
        return [(key, _at(value, key)) for key in list(value)]


def _at(value: Mapping[Any, Any], key: Any) -> Any:
    try:
        return value[key]
    except Exception as error:  # noqa: BLE001 - see the header
        return unsupported(None, type(error).__name__)


def _shape(value: object) -> str:
    try:
        shape = getattr(value, "shape", None)
        return f" {tuple(itertools.islice(shape, _DIMENSIONS_SHOWN_MAX))}" if isinstance(shape, Iterable) else ""
    except Exception:  # noqa: BLE001 - see the header
        return ""


def _key(key: Any, depth: int = 0) -> Any:
    """Keys that MessagePack takes stay as they are, so that 3 and "3" stay two."""
    try:
        if isinstance(key, str):
            return clean_text(key)
        if key is None or isinstance(key, (bool, float, bytes)) or (isinstance(key, int) and abs(key) < STEP_MAX):
            return key
        if isinstance(key, tuple):
            return "/".join(_part(part, depth + 1) for part in key) if depth < DEPTH_MAX else _TOO_DEEP
        number = _foreign(key) if hasattr(key, "item") else None  # the fast road's answer, for the same name
        if isinstance(number, (bool, int, float)):
            return number
        return clean_text(_ADDRESS.sub("", str(key)))
    except Exception as error:  # noqa: BLE001 - see the header
        return f"<{unsupported(key, type(error).__name__).text}>"


def _part(part: Any, depth: int) -> str:
    key = _key(part, depth)
    return key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
