"""Values: every row of the table, and foreign objects at their worst. Nothing raises, nothing costs its neighbours."""

from __future__ import annotations

import collections
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from support.odd_values import Tensor
from unit.client.roads import Colour, by_fast_road, by_slow_road, packed
from verl_shipper_client.values import (
    DEPTH_MAX,
    STEP_MAX,
    VALUES_MAX,
    clean_text,
    cut_text,
    plain,
    whole_step,
)
from verl_shipper_spool.record import Unsupported, decode_record


class Element:
    """A scalar of a library of its own: its element is again none of Python's."""

    def __init__(self, element: Any) -> None:
        self._element = element

    def item(self) -> Any:
        return self._element


class Extended:
    """As the scalars of NumPy's extension types (bfloat16, float8) are: items of themselves, no registered numbers."""

    dtype = "bfloat16"
    size = 1

    def __float__(self) -> float:
        return 1.5

    def item(self) -> Extended:
        return self


class Series:
    """As of pandas: `mask` is a method."""

    size = 1

    def mask(self) -> None:
        raise NotImplementedError

    def item(self) -> float:
        return 2.5


class Hostile:
    """Raises whatever is done to it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"do not touch {name}")

    def __str__(self) -> str:
        raise RuntimeError("no name")

    __repr__ = __str__


class HostileShape:
    @property
    def shape(self) -> Iterator[int]:
        while True:
            yield 1


class HostileItem:
    size = 1

    def item(self) -> float:
        raise OSError("device lost")


class HostileMapping(Mapping[str, int]):
    """Knows its keys and raises at one of them, as a configuration with a missing value does."""

    def __getitem__(self, key: str) -> int:
        if key == "bad":
            raise ValueError("missing")
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(["good", "bad"])

    def __len__(self) -> int:
        return 2


class Unlistable(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no keys")

    def __len__(self) -> int:
        return 1


class HostileText(str):
    __slots__ = ()

    def encode(self, encoding: str = "", errors: str = "") -> bytes:
        raise RuntimeError("no bytes")


class HostileNumber(int):
    def __int__(self) -> int:
        raise RuntimeError("no number")


ROWS = [
    (3, 3),
    (-(2**63), -(2**63)),
    (2**64 - 1, 2**64 - 1),
    (0.1, 0.1),
    (math.inf, math.inf),
    (True, True),
    ("text", "text"),
    ("𝄞", "𝄞"),
    (None, None),
    (b"bytes", b"bytes"),
    ({"a": {"b": [1, (2, 3)]}}, {"a": {"b": [1, [2, 3]]}}),
    ({3: 1, "3": 2, None: 3, 2.5: 4}, {3: 1, "3": 2, None: 3, 2.5: 4}),
    (collections.OrderedDict(a=1), {"a": 1}),
    (Colour.RED, 3),
    (np.float64(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.float16(0.5), 0.5),
    (np.longdouble(0.5), 0.5),
    (np.int64(7), 7),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.int8(-7), -7),
    (np.bool_(True), True),
    (np.array(2.5), 2.5),
    (np.array([2.5]), 2.5),
    (np.array([[7]]), 7),
    (np.str_("text"), "text"),
    (Tensor(2.5), 2.5),
    (Tensor(7, shape=(1, 1)), 7),
    (Element(np.int64(2**62 + 1)), 2**62 + 1),
    (Element(np.bool_(True)), True),
    (Element(Element(0.5)), 0.5),
    (Extended(), 1.5),
    (Series(), 2.5),
    (np.ma.array([1.5], mask=[False]), 1.5),
    (np.array(np.float32(0.5), dtype=object), 0.5),
    (np.array(Decimal(2), dtype=object), 2.0),
    (np.longdouble("inf"), math.inf),
    (np.float64(2.0**70), 2.0**70),
    (Decimal("1.25"), 1.25),
    (Decimal("Infinity"), math.inf),
    (Fraction(1, 4), 0.25),
]


@pytest.mark.parametrize(("given", "becomes"), ROWS, ids=lambda value: repr(value)[:40])
@pytest.mark.parametrize("road", [by_fast_road, by_slow_road])
def test_a_row_of_the_table_holds_on_both_roads(road: Any, given: Any, becomes: Any) -> None:
    arrived = road(given)

    assert arrived == becomes
    assert type(arrived) is type(becomes)


@pytest.mark.parametrize("road", [by_fast_road, by_slow_road])
@pytest.mark.parametrize("value", [float("nan"), np.float32("nan"), Decimal("NaN"), Tensor(float("nan"))])
def test_nan_stays_nan(road: Any, value: Any) -> None:
    assert math.isnan(road(value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "builtins.object"),
        (1j, "builtins.complex"),
        (np.complex64(1j), "numpy.complex64"),
        ({1, 2}, "builtins.set"),
        (np.zeros((2, 3)), "numpy.ndarray (2, 3)"),
        (np.zeros(0), "numpy.ndarray (0,)"),
        (Tensor(1, 2, shape=(2,)), f"{Tensor.__module__}.Tensor (2,)"),
        (len, "builtins.builtin_function_or_method"),
        (np.datetime64("2026-01-01"), "numpy.datetime64"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
@pytest.mark.parametrize("road", [by_fast_road, by_slow_road])
def test_what_is_no_number_becomes_a_marker_with_its_type_and_shape(road: Any, value: Any, text: str) -> None:
    arrived = road(value)

    assert isinstance(arrived, Unsupported)
    assert arrived.text.startswith(text)


HOSTILE: dict[str, Callable[[], Any]] = {
    "everything raises": Hostile,
    "endless shape": HostileShape,
    "item raises": HostileItem,
    "keys raise": Unlistable,
    "encode raises": lambda: HostileText("x"),
    "int raises": lambda: HostileNumber(3),
    "inside others": lambda: {"in": [Hostile(), HostileItem()]},
    "signalling": lambda: Decimal("sNaN"),
    "too large": lambda: Fraction(10**400),
    "module without name": type("Odd", (), {"__module__": Hostile()}),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_a_foreign_object_that_raises_costs_only_itself(make: Callable[[], Any]) -> None:
    by_slow_road(make())
    by_slow_road({"in": make()})


def test_a_mapping_that_raises_at_one_key_keeps_the_others() -> None:
    arrived = by_slow_road(HostileMapping())

    assert arrived["good"] == 1
    assert isinstance(arrived["bad"], Unsupported)


@pytest.mark.parametrize(
    "value", [0.5, 7, True, "text", np.float64(0.5), np.float32(0.5), np.int64(7), np.bool_(True), np.array(2.0)]
)
def test_what_trainers_log_takes_the_fast_road(value: Any) -> None:
    assert decode_record(packed({"value": value, 3: [value]})).body["value"] == value


@pytest.mark.parametrize(
    "value",
    [
        np.ma.masked,
        np.ma.array([1.5], mask=[True]),
        np.datetime64(1, "ns"),
        np.array(1, dtype="M8[ns]"),
        np.array([1], dtype="m8[ns]"),
        np.datetime64("NaT", "ns"),
        np.longdouble("1e4000") if np.finfo(np.longdouble).max > 1e308 else Decimal("1e400"),
        Decimal("1e400"),
        np.array(10**400, dtype=object),
        np.clongdouble(1),
        np.zeros(1, dtype=[("a", "f4")]),
        np.array(b"3"),
        np.array("3"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("road", [by_fast_road, by_slow_road])
def test_what_only_looks_like_a_number_is_none(road: Any, value: Any) -> None:
    assert isinstance(road(value), Unsupported)


@pytest.mark.parametrize(
    ("value", "becomes"), [(2**64, float(2**64)), (-(2**63) - 1, float(-(2**63))), (10**300, 1e300)]
)
def test_an_int_outside_64_bits_becomes_the_nearest_float(value: int, becomes: float) -> None:
    assert by_slow_road(value) == becomes
    assert by_slow_road(np.array(value, dtype=object)) == becomes


def test_an_int_beyond_float_range_becomes_a_marker() -> None:
    assert by_slow_road(10**400) == Unsupported("builtins.int beyond float range")


@pytest.mark.parametrize(
    ("text", "clean"), [("a\ud800b", "a�b"), ("\udc00", "�"), ("\ud83d\ude00", "😀"), ("plain", "plain"), ("", "")]
)
def test_lone_surrogates_are_replaced_and_pairs_are_joined(text: str, clean: str) -> None:
    assert clean_text(text) == clean
    assert by_slow_road(text) == clean
    assert by_slow_road({text: 1}) == {clean: 1}


def test_nesting_deeper_than_the_limit_becomes_a_marker() -> None:
    value: Any = 1
    for _ in range(DEPTH_MAX + 50):
        value = {"in": value}

    arrived = by_slow_road(value)

    depth = 0
    while isinstance(arrived, dict):
        arrived = arrived["in"]
        depth += 1
    assert isinstance(arrived, Unsupported)
    assert depth == DEPTH_MAX - 1  # the record's own body is the first


def test_nesting_as_deep_as_the_stack_is_survived() -> None:
    value: Any = []
    for _ in range(sys.getrecursionlimit() * 3):
        value = [value]

    by_slow_road(value)


def test_a_cycle_ends_at_once_however_many_ways_lead_round() -> None:
    parent: dict[str, Any] = {"name": "parent"}
    parent["children"] = [{"name": str(index), "parent": parent, "all": parent} for index in range(50)]

    arrived = by_slow_road(parent)

    assert len(arrived["children"]) == 50
    assert isinstance(arrived["children"][0]["parent"], Unsupported)
    assert "inside itself" in arrived["children"][0]["parent"].text


def test_the_same_object_twice_is_no_cycle() -> None:
    shared = {"n": 1}

    assert by_slow_road([shared, shared]) == [{"n": 1}, {"n": 1}]


def test_a_knot_of_references_has_an_end() -> None:
    knot: Any = [0] * 10
    for _ in range(12):
        knot = [knot] * 10

    copied = plain(knot)

    count, waiting = 0, [copied]
    while waiting:
        top = waiting.pop()
        count += 1
        waiting += top if isinstance(top, list) else []
    assert count <= VALUES_MAX + 100


def test_what_is_plain_stays_as_it_is() -> None:
    once = plain({"a": object(), "b": [1, "x"]})

    assert plain(once) == once


@pytest.mark.parametrize(
    ("step", "whole"),
    [
        (None, None),
        (0, 0),
        (-1, -1),
        (3.0, 3),
        (3.5, None),
        (True, 1),
        ("x", None),
        ("3", None),
        (b"3", None),
        (float("nan"), None),
        (float("inf"), None),
        (np.int64(3), 3),
        (np.float32(3), 3),
        (np.array(3), 3),
        (np.array([3]), 3),
        (np.array([3, 4]), None),
        (Tensor(3), 3),
        (Tensor(3, 4), None),
        (Decimal(3), 3),
        (STEP_MAX, STEP_MAX),
        (2**63, None),
        (-(2**63), -(2**63)),
        (-(2**63) - 1, None),
        (2**70, None),
        ([3], None),
        ({}, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_step_is_a_whole_number_of_64_bits_or_none(step: Any, whole: int | None) -> None:
    assert whole_step(step) == whole
    assert type(whole_step(step)) is type(whole)


def test_a_step_that_raises_is_none() -> None:
    assert whole_step(Hostile()) is None


def test_a_text_is_cut_with_a_marker_that_tells_how_long_it_was() -> None:
    assert cut_text("abc", 3) == "abc"
    assert cut_text("abcd", 3) == "abc …[cut: 3 of 4 characters]"
