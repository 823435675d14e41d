"""Whatever a user logged comes out as numbers and counts, or as strict JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_shipper.values import DEPTH_MAX, TOO_DEEP, Flattened, flatten_metrics, to_json
from verl_shipper_spool.record import Unsupported

ODD_KEYS = st.one_of(
    st.text(max_size=4),
    st.integers(-3, 3),
    st.booleans(),
    st.none(),
    st.binary(max_size=3),
    st.floats(),
    st.tuples(st.text(max_size=2), st.integers(0, 2)),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**64), 2**64),
    st.floats(),
    st.text(max_size=4),
    st.text(st.characters(categories=["Cs"]), max_size=2),
    st.binary(max_size=4),
    st.builds(Unsupported, st.text(max_size=4)),
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ODD_KEYS, inner, max_size=3))
)


def numbers(body: dict[Any, Any]) -> dict[str, int | float]:
    return flatten_metrics(body).numbers


def nested(depth: int, leaf: object) -> dict[str, Any]:
    body: dict[str, Any] = {"x": leaf}
    for _ in range(depth - 1):
        body = {"x": body}
    return body


def test_nested_dicts_flatten_with_slashes_in_their_order() -> None:
    flat = numbers({"b": 1.0, "a": {"c": 2, "d": {"e": 3.5}}})

    assert list(flat.items()) == [("b", 1.0), ("a/c", 2), ("a/d/e", 3.5)]


def test_keys_that_are_no_strings_become_strings() -> None:
    assert numbers({3: 1, ("x", 1): 2, None: 3, b"k": 4, 0.5: 5}) == {"3": 1, "x/1": 2, "None": 3, "k": 4, "0.5": 5}


def test_a_key_of_tuples_in_tuples_has_an_end() -> None:
    key: Any = "end"
    for _ in range(400):
        key = ("t", key)

    assert numbers({key: 1, "next": 2}) == {"t/" * DEPTH_MAX + TOO_DEEP: 1, "next": 2}


def test_booleans_become_one_and_zero() -> None:
    flat = numbers({"yes": True, "no": False})

    assert flat == {"yes": 1, "no": 0}
    assert all(type(number) is int for number in flat.values())


def test_nan_and_infinities_stay_what_they_are() -> None:
    flat = numbers({"nan": math.nan, "up": math.inf, "down": -math.inf})

    assert math.isnan(flat["nan"])
    assert (flat["up"], flat["down"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**30])
def test_integers_beyond_64_bits_stay_python_integers(value: int) -> None:
    assert numbers({"n": value}) == {"n": value}


@pytest.mark.parametrize("value", [[3.5], (3.5,)])
def test_a_list_of_exactly_one_number_is_that_number(value: object) -> None:
    assert numbers({"x": value}) == {"x": 3.5}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("a string", "text"),
        (None, "none"),
        (b"bytes", "not_a_number"),
        ([1.0, 2.0], "not_a_number"),
        ([], "not_a_number"),
        (["text"], "not_a_number"),
        (Unsupported("torch.Tensor (2, 3)"), "not_a_number"),
        (Unsupported("builtins.dict inside itself"), "inside_itself"),
        (Unsupported("builtins.dict nested deeper than 32"), "too_deep"),
        (object(), "not_a_number"),
    ],
)
def test_what_is_no_number_is_counted_and_costs_its_neighbours_nothing(value: object, reason: str) -> None:
    assert flatten_metrics({"before": 1, "bad": value, "after": 2}) == Flattened({"before": 1, "after": 2}, {reason: 1})


@pytest.mark.parametrize(
    ("body", "kept"), [({"a": {"b": 1}, "a/b": 9}, {"a/b": 1}), ({"a/b": 9, "a": {"b": 1}}, {"a/b": 9})]
)
def test_the_first_of_two_values_with_one_name_keeps_it(body: dict[str, Any], kept: dict[str, int | float]) -> None:
    assert flatten_metrics(body) == Flattened(kept, {"key_clash": 1})


def test_empty_dicts_have_no_numbers_and_ignore_nothing() -> None:
    assert flatten_metrics({}) == flatten_metrics({"a": {}}) == Flattened({}, {})


def test_depth_is_bounded_and_the_bound_is_counted() -> None:
    assert numbers(nested(DEPTH_MAX, 7)) == {"/".join("x" * DEPTH_MAX): 7}
    assert flatten_metrics(nested(DEPTH_MAX + 1, 7)) == Flattened({}, {"too_deep": 1})


def test_lone_surrogates_in_keys_become_visible() -> None:
    assert numbers({"a\ud83d": 1, "\U0001f600": 2}) == {"a\ufffd": 1, "\U0001f600": 2}


def test_json_writes_what_it_has_no_sign_for_as_words() -> None:
    shown = to_json(
        {"n": math.nan, "u": math.inf, "d": -math.inf, "b": b"\x01\xff", "m": Unsupported("Tensor"), "s": "\udcff"}
    )

    assert shown == {"n": "NaN", "u": "Infinity", "d": "-Infinity", "b": "01ff", "m": "<Tensor>", "s": "\ufffd"}


def test_json_keeps_both_of_two_keys_that_look_the_same() -> None:
    assert to_json({3: "int", "3": "text"}) == {"3": "int", "3'": "text"}


def test_json_stops_at_the_depth_limit() -> None:
    text = json.dumps(to_json(nested(5000, 1)))

    assert TOO_DEEP in text


@given(st.dictionaries(ODD_KEYS, VALUES, max_size=5))
def test_flattening_never_raises_and_yields_only_numbers_by_name(body: dict[Any, Any]) -> None:
    flat = flatten_metrics(body)

    assert all(type(name) is str and name.encode() is not None for name in flat.numbers)
    assert all(type(number) in (int, float) for number in flat.numbers.values())
    assert all(count > 0 for count in flat.ignored.values())


@given(VALUES)
def test_json_never_raises_and_is_strict(value: object) -> None:
    text = json.dumps(to_json(value), allow_nan=False, ensure_ascii=False)

    assert json.loads(text.encode()) == to_json(value)
