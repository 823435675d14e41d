"""Keys of what is logged: each has one name, and of two with the same name none vanishes without a count."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from support.odd_values import Tensor
from unit.client.roads import Colour, Kind, by_fast_road, by_slow_road
from unit.client.test_values import Hostile
from verl_shipper.values import flatten_metrics


def test_keys_that_are_no_text_get_their_text() -> None:
    arrived = by_slow_road({("a", 1, b"b", ("c", None)): 1, Kind.RED: 2, Hostile: 3, 2**70: 4, Decimal("0.1"): 5})

    assert arrived["a/1/b/c/None"] == 1
    assert arrived["Kind.RED"] == 2
    assert arrived[str(2**70)] == 4
    assert arrived["0.1"] == 5
    assert len(arrived) == 5


KEYS: list[Any] = [3, "3", None, True, 0.5, b"k", np.int64(3), np.float32(0.1), np.bool_(True), 2**63, Colour.RED]
KEYS += [("a", 1), ("a", b"b", None, 0.5), ("a", ("b", np.int64(2))), "", " lead", "a\ud83d", 2**70, Kind.RED]


DEEP: Any = "end"
for _ in range(200):
    DEEP = ("t", DEEP)
KEYS.append(DEEP)


@pytest.mark.parametrize("key", KEYS, ids=range(len(KEYS)))
def test_a_key_has_one_name_whatever_else_is_in_the_record(key: Any) -> None:
    alone, beside = by_fast_road({key: 1.0}), by_fast_road({key: 1.0, "odd": object()})

    assert list(flatten_metrics(alone).numbers) == list(flatten_metrics(beside).numbers)


CLASHES: list[dict[Any, Any]] = [
    {chr(0xD800): 1.0, chr(0xDFFF): 2.0},
    {("a", 1): 1.0, "a/1": 2.0, "odd": object()},
    {Kind.RED: 1.0, "Kind.RED": 2.0, ("Kind.RED",): 3.0},
    {object(): 1.0, object(): 2.0},
    {Decimal("0.1"): 1.0, 0.1: 2.0},
    {Tensor(0.5): 1.0, Tensor(0.5, shape=(1,)): 2.0, 0.5: 3.0, "odd": object()},
    {"x": 0.0, "deep": {chr(0xDCFF): 1.0, "\ufffd": 2.0}},
]


@pytest.mark.parametrize("body", CLASHES, ids=range(len(CLASHES)))
def test_of_two_keys_with_one_name_the_first_keeps_it_and_the_other_is_counted(body: dict[Any, Any]) -> None:
    flat = flatten_metrics(by_slow_road(body))

    assert 1.0 in flat.numbers.values()
    assert flat.ignored["key_clash"] == sum(isinstance(leaf, float) for leaf in leaves(body)) - len(flat.numbers)


def leaves(body: dict[Any, Any]) -> Iterator[Any]:
    for value in body.values():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield value


def test_keys_that_are_foreign_objects_stay_apart() -> None:
    assert by_fast_road({Kind.RED: 1, Kind.BLUE: 2}) == {"Kind.RED": 1, "Kind.BLUE": 2}
    assert by_fast_road({frozenset("a"): 1, frozenset("b"): 2}) == {"frozenset({'a'})": 1, "frozenset({'b'})": 2}


def test_the_name_of_an_object_without_a_text_is_the_same_every_time() -> None:
    first, second = by_fast_road({object(): 1}), by_fast_road({object(): 1})

    assert first == second == {"<object object>": 1}


def test_a_key_that_raises_costs_only_its_name() -> None:
    arrived = by_slow_road({Hostile(): 1, "next": 2})

    assert arrived["next"] == 2
    assert len(arrived) == 2
