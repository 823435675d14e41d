"""Packed arrays: what fits is packed exactly, what does not stays with the caller, and bytes of any length are read."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_shipper_spool.arrays import Floats, Ints, packed
from verl_shipper_spool.record import Record, RecordKind, decode_record, encode_record

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32, min_size=1))
def test_ids_come_back_as_they_were_in_little_endian(ids: list[int]) -> None:
    array = packed(ids)
    assert isinstance(array, Ints)
    assert array.content == struct.pack(f"<{len(ids)}i", *ids)
    assert (array.tolist(), len(array)) == (ids, len(ids))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_numbers_come_back_with_the_digits_that_single_precision_has(numbers: list[float]) -> None:
    array = packed(numbers)
    assert isinstance(array, Floats)
    assert array.content == struct.pack(f"<{len(numbers)}f", *numbers)
    for back, number in zip(array.tolist(), numbers, strict=True):
        assert back == number or math.isclose(back, number, rel_tol=1e-6, abs_tol=1e-44)


def test_a_number_is_shown_as_it_was_written() -> None:
    array = packed([-0.1, 1e-7, math.nan, math.inf])
    assert array is not None
    first, second, nan, infinite = array.tolist()
    assert (first, second, infinite) == (-0.1, 1e-7, math.inf)
    assert math.isnan(nan)


@pytest.mark.parametrize(
    "values",
    [[], [2**31], [1, 2.5], [1, "a"], ["a"], [True, False], [None], "text", 7, None, {"a": 1}, [[1], [2]]],
)
def test_what_does_not_fit_is_not_packed(values: Any) -> None:
    assert packed(values) is None


def test_a_number_beyond_single_precision_is_infinite() -> None:
    array = packed([1e39, -1e39])
    assert array is not None
    assert array.tolist() == [math.inf, -math.inf]


def test_bytes_that_are_cut_are_read_as_far_as_they_go() -> None:
    assert Ints(b"\x01\0\0\0\x02\0").tolist() == [1]
    assert Floats(b"\0").tolist() == []


def test_a_record_carries_arrays() -> None:
    body = {"inputs": {"prompt_ids": Ints(b"\x07\0\0\0")}, "outputs": {"log_probs": Floats(b"\0\0\0\0")}}
    record = Record(RecordKind.SPAN, 0, 1, 1, body)
    assert decode_record(encode_record(record)) == record
