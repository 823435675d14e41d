"""How long to wait: exponential, full jitter, a cap, and the server's wish on top."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_shipper.policy.backoff import BASE_S, CAP_S, WISH_S_MAX, delay_s, wish_s

ALMOST_ONE = math.nextafter(1.0, 0.0)


def test_the_bound_doubles_up_to_the_cap() -> None:
    bounds = [delay_s(attempt, ALMOST_ONE) for attempt in range(1, 12)]

    assert bounds[:4] == pytest.approx([BASE_S, 2 * BASE_S, 4 * BASE_S, 8 * BASE_S])
    assert bounds[-1] == pytest.approx(CAP_S)


@given(attempt=st.integers(1, 10**6), jitter=st.floats(0.0, ALMOST_ONE))
def test_a_delay_is_never_nothing_and_never_more_than_the_cap(attempt: int, jitter: float) -> None:
    assert BASE_S / 5 <= delay_s(attempt, jitter) <= CAP_S


@given(attempt=st.integers(1, 100), jitter=st.floats(0.0, ALMOST_ONE), wish=st.floats(0.0, WISH_S_MAX))
def test_a_servers_wish_is_the_least(attempt: int, jitter: float, wish: float) -> None:
    assert delay_s(attempt, jitter, wish) >= wish


@pytest.mark.parametrize(
    ("wish", "followed"),
    [
        (None, 0.0),
        (0.0, 0.0),
        (-5.0, 0.0),
        (float("nan"), 0.0),
        (7.5, 7.5),
        (10.0**9, WISH_S_MAX),
        (math.inf, WISH_S_MAX),
    ],
)
def test_a_wish_is_followed_within_reason(wish: float | None, followed: float) -> None:
    assert wish_s(wish) == followed
