"""Values as trainers log them besides Python floats, and what must become of each.

    published()   the dict of field case P06, with stand-ins for its tensors
    numbers()     {name: (value, the number that every tracker shows)}
    others()      {name: (value, the reason under which `status` counts it)}

Must not know: client, daemon, trackers. Functions, since generators and the like can be used only once.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
from decimal import Decimal
from fractions import Fraction
from typing import Any, final

import numpy as np

EXTENDED_MAX = np.finfo(np.longdouble).max
WHOLE, REAL = "bhilqBHILQ", "efdg"  # NumPy's codes of types
NO_NUMBER = {"F": 1j, "D": 1j, "G": 1j, "S": b"7", "V": b"v", "M": "2026-11-30", "m": 7}


class Tensor:
    """What of a torch tensor matters here, without torch."""

    def __init__(self, *elements: float, shape: tuple[int, ...] = ()) -> None:
        self._elements = elements
        self.shape = shape

    def numel(self) -> int:
        return len(self._elements)

    def item(self) -> float:
        if len(self._elements) != 1:
            raise RuntimeError("a Tensor with several elements cannot be converted to Scalar")
        return self._elements[0]


@final
class MetaTensor(Tensor):
    def item(self) -> float:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")


@final
class NestedTensor(Tensor):
    def numel(self) -> int:
        raise NotImplementedError("numel")


@final
class Scalar:
    """A scalar of a library of its own (pandas, CuPy): `item()` and nothing else."""

    def __init__(self, element: Any) -> None:
        self._element = element

    def item(self) -> Any:
        return self._element


class Whole(int):
    pass


class Real(float):
    pass


class Colour(enum.IntEnum):
    RED = 5


class Flag(enum.IntFlag):
    A = 2
    B = 4


class Kind(enum.Enum):
    RED = 1


class Word(str, enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: float = 1.0


Pair = collections.namedtuple("Pair", "only")  # noqa: PYI024 - as programs of all ages have them


class OnlyFloat:
    def __float__(self) -> float:
        return 2.5


def published() -> dict[str, Any]:
    """The dict of the case."""
    return {
        "f32": np.float32(0.25),
        "f16": np.float16(0.5),
        "i32": np.int32(7),
        "np_bool": np.bool_(True),
        "bool": True,
        "tensor": Tensor(1.5),
        "bf16": Tensor(1.5, shape=(1,)),
        "zero_d": np.array(2.0),
        "one": np.array([3.0]),
        "two": np.array([1.0, 2.0]),
        "text": "a string",
        "none": None,
        "object": object(),
    }


PUBLISHED = {
    "f32": 0.25, "f16": 0.5, "i32": 7, "np_bool": 1, "bool": 1, "tensor": 1.5, "bf16": 1.5, "zero_d": 2.0, "one": 3.0,
}  # fmt: skip
PUBLISHED_IGNORED = {"not_a_number": 2, "text": 1, "none": 1}


def numbers() -> dict[str, tuple[Any, float]]:
    """Numbers in every dress."""
    found: dict[str, tuple[Any, float]] = {
        "float64": (np.float64(0.1), 0.1),
        "longdouble": (np.longdouble(0.1), 0.1),
        "uint64_max": (np.uint64(2**64 - 1), 2.0**64),
        "int64_min": (np.int64(-(2**63)), -(2.0**63)),
        "int8": (np.int8(-7), -7),
        "np_false": (np.bool_(False), 0),
        "false": (False, 0),
        "bool_0d": (np.array(True), 1),
        "many_axes": (np.array([[[4.5]]]), 4.5),
        "object_array": (np.array([3], dtype=object), 3),
        "object_0d": (np.array(Decimal("2.5"), dtype=object), 2.5),
        "object_of_numpy": (np.array(np.float32(0.5), dtype=object), 0.5),
        "unmasked": (np.ma.array([1.5], mask=[False]), 1.5),
        "unmasked_0d": (np.ma.array(2.5), 2.5),
        "matrix_view": (np.arange(6.0).reshape(2, 3)[1:, 2:], 5.0),
        "big_endian": (np.array(1.5, dtype=">f4"), 1.5),
        "read_only": (np.broadcast_to(np.float64(1.5), (1,)), 1.5),
        "decimal": (Decimal("1.25"), 1.25),
        "decimal_long": (Decimal("0.1000000000000000000000001"), 0.1),
        "fraction": (Fraction(1, 3), 1 / 3),
        "int_enum": (Colour.RED, 5),
        "int_flag": (Flag.A | Flag.B, 6),
        "int_subclass": (Whole(3), 3),
        "float_subclass": (Real(1.5), 1.5),
        "int_2_63": (2**63, 2.0**63),
        "int_2_64": (2**64, 2.0**64),
        "int_2_200": (2**200, 2.0**200),
        "int_below": (-(2**100), -(2.0**100)),
        "subnormal": (5e-324, 5e-324),
        "minus_zero": (-0.0, 0.0),
        "largest": (np.float64(1.7976931348623157e308), 1.7976931348623157e308),
        "tensor_0d": (Tensor(7), 7),
        "tensor_1x1": (Tensor(2.5, shape=(1, 1)), 2.5),
        "tensor_bool": (Tensor(True), 1),
        "scalar_float": (Scalar(1.5), 1.5),
        "scalar_numpy": (Scalar(np.int64(2**62 + 1)), 2.0**62),
        "scalar_bool": (Scalar(np.bool_(True)), 1),
        "scalar_decimal": (Scalar(Decimal("1.5")), 1.5),
        "list_of_one": ([1.5], 1.5),
        "list_of_numpy": ([np.float32(0.25)], 0.25),
        "list_of_array": ([np.array([0.75])], 0.75),
        "list_of_true": ([True], 1),
        "tuple_of_one": ((2.5,), 2.5),
        "named_tuple": (Pair(3.5), 3.5),
    }
    for code in WHOLE + REAL + "?":
        dtype = np.dtype(code)
        found[f"scalar_{dtype.num}_{dtype.name}"] = (dtype.type(1), 1)
        found[f"zero_d_{dtype.num}_{dtype.name}"] = (np.array(1, dtype), 1)
        found[f"one_{dtype.num}_{dtype.name}"] = (np.ones(1, dtype), 1)
    return found


def others() -> dict[str, tuple[Any, str]]:
    """What is no number, or none that a float can hold."""
    masked = np.ma.array([1.5], mask=[True])
    found: dict[str, tuple[Any, str]] = {
        "array_2": (np.array([1.0, 2.0]), "not_a_number"),
        "array_0": (np.array([]), "not_a_number"),
        "complex": (1j, "not_a_number"),
        "object_array_2": (np.array([1, "x"], dtype=object), "not_a_number"),
        "object_in_array": (np.array([object()]), "not_a_number"),
        "record": (np.zeros(1, dtype=[("a", "f4"), ("b", "i4")])[0], "not_a_number"),
        "not_a_time": (np.datetime64("NaT", "ns"), "not_a_number"),
        "nanoseconds": (np.datetime64(1, "ns"), "not_a_number"),
        "nanoseconds_0d": (np.array(1, dtype="M8[ns]"), "not_a_number"),
        "span_of_ns": (np.timedelta64(5, "ns"), "not_a_number"),
        "masked": (np.ma.masked, "not_a_number"),
        "masked_array": (masked, "not_a_number"),
        "signalling": (Decimal("sNaN"), "not_a_number"),
        "int_10_400": (10**400, "not_a_number"),
        "decimal_1e400": (Decimal("1e400"), "not_a_number"),
        "fraction_10_400": (Fraction(10**400), "not_a_number"),
        "int_10_5000": (10**5000, "not_a_number"),  # longer than Python turns into text
        "str": ("1.5", "text"),
        "np_str": (np.str_("1.5"), "text"),
        "str_enum": (Word.RED, "text"),
        "half_a_pair": ("cut \ud83d here", "text"),
        "empty_text": ("", "text"),
        "bytes": (b"1.5", "not_a_number"),
        "np_bytes": (np.bytes_(b"1.5"), "not_a_number"),
        "bytearray": (bytearray(b"1"), "not_a_number"),
        "memoryview": (memoryview(b"1"), "not_a_number"),
        "None": (None, "none"),
        "enum": (Kind.RED, "not_a_number"),
        "list_of_two": ([1.0, 2.0], "not_a_number"),
        "empty_list": ([], "not_a_number"),
        "list_in_list": ([[1.0]], "not_a_number"),
        "list_of_none": ([None], "not_a_number"),
        "list_of_text": (["x"], "not_a_number"),
        "tuple_of_two": ((1.0, 2.0), "not_a_number"),
        "set": ({1.0}, "not_a_number"),
        "frozenset": (frozenset([1.0]), "not_a_number"),
        "deque": (collections.deque([1.0]), "not_a_number"),
        "generator": ((value for value in (1.0,)), "not_a_number"),
        "iterator": (iter([1.0]), "not_a_number"),
        "range": (range(1), "not_a_number"),
        "map": (map(float, "1"), "not_a_number"),
        "dict_view": ({"a": 1.0}.values(), "not_a_number"),
        "dataclass": (Point(), "not_a_number"),
        "datetime": (dt.datetime(2026, 11, 30, tzinfo=dt.timezone.utc), "not_a_number"),
        "date": (dt.date(2026, 11, 30), "not_a_number"),
        "timedelta": (dt.timedelta(seconds=1), "not_a_number"),
        "only_float": (OnlyFloat(), "not_a_number"),
        "class": (float, "not_a_number"),
        "function": (len, "not_a_number"),
        "module": (dt, "not_a_number"),
        "ellipsis": (..., "not_a_number"),
        "object": (object(), "not_a_number"),
        "tensor_2": (Tensor(1.0, 2.0, shape=(2,)), "not_a_number"),
        "tensor_0": (Tensor(shape=(0,)), "not_a_number"),
        "tensor_meta": (MetaTensor(1.0), "not_a_number"),
        "tensor_nested": (NestedTensor(1.0), "not_a_number"),
        "scalar_text": (Scalar("x"), "not_a_number"),
        "scalar_none": (Scalar(None), "not_a_number"),
        "scalar_itself": (Scalar(Scalar(Scalar(1.0))), "not_a_number"),
    }
    if EXTENDED_MAX > 1e308:
        found["longdouble_1e4000"] = (np.longdouble("1e4000"), "not_a_number")
    for code, value in NO_NUMBER.items():
        dtype = {"M": "M8[D]", "m": "m8[s]", "S": "S1", "V": "V1"}.get(code, code)
        found[f"zero_d_{code}"] = (np.array(value, dtype=dtype), "not_a_number")
        found[f"one_{code}"] = (np.array([value], dtype=dtype), "not_a_number")
    return found
