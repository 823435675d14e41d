"""Values gathered over steps."""

from __future__ import annotations

import math

import pytest

from verl_shipper.policy.window import INT_MAX, NAMES_MAX, Window, reduced


@pytest.mark.parametrize(
    ("mode", "numbers", "expected"),
    [
        ("mean", [1, 2, 6], 3.0),
        ("min", [3, -1.5, 2], -1.5),
        ("max", [3, -1.5, 2], 3),
        ("sum", [1, 2, 3], 6),
        ("mean", [4], 4.0),
        ("mean", [math.inf, 1], math.inf),
        ("mean", [math.inf, -math.inf], math.nan),
        ("min", [1, math.nan, 0], math.nan),
        ("max", [math.nan, 1], math.nan),
        ("sum", [1, math.nan], math.nan),
        ("sum", [INT_MAX, INT_MAX], 2.0**65),
        ("mean", [INT_MAX] * 3, 2.0**64),
        ("sum", [-(2**63), -(2**63)], -(2.0**64)),
        ("max", [INT_MAX, 1e300], 1e300),
    ],
)
def test_several_numbers_become_one(mode: str, numbers: list[int | float], expected: float) -> None:
    assert reduced(mode, numbers) == pytest.approx(expected, nan_ok=True)


def test_a_name_begins_anew_once_it_was_taken() -> None:
    window = Window("mean")
    window.add("a", 1)
    window.add("a", 3)

    assert window.take_rest(lambda _name: True) == {"a": 2}
    assert window.peek("a", 10) == 10


def test_what_was_shown_is_not_taken_again_unless_it_grew() -> None:
    window = Window("mean")

    assert window.peek("a", 1) == 1
    assert window.peek("b", 1) == 1
    window.add("b", 3)

    assert window.take_rest(lambda _name: True) == {"b": 2}
    assert window.take_rest(lambda _name: True) == {}


def test_names_that_are_not_asked_for_stay() -> None:
    window = Window("max")
    window.add("a", 1)
    window.add("b", 2)

    assert window.take_rest(lambda name: name == "a") == {"a": 1}
    assert window.take_rest(lambda _name: True) == {"b": 2}


def test_a_later_process_goes_on_from_the_state() -> None:
    window, other = Window("mean"), Window("mean")
    window.add("a", 1)

    other.restore(window.state())
    window.add("a", 100)

    assert other.peek("a", 2) == 1.5


def test_a_state_of_another_mode_is_of_no_use() -> None:
    window, other = Window("mean"), Window("max")
    window.add("a", 100)

    other.restore(window.state())

    assert other.peek("a", 2) == 2


def test_names_that_never_repeat_are_bounded_and_keep_their_last_value() -> None:
    window = Window("mean")
    for number in range(NAMES_MAX + 10):
        window.add(f"n{number}", number)

    assert len(window.state()["values"]) == NAMES_MAX
    assert window.peek("one more", 7) == 7
