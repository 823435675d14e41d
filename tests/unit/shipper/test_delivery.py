"""The delivery of a run: its table, and the halves of a refused batch."""

from __future__ import annotations

import pytest

from verl_shipper.policy.delivery import TRANSITIONS, Delivery, Step, halves


def test_everything_that_is_not_under_way_can_be_sent() -> None:
    assert {state for state, step in TRANSITIONS if step is Step.SEND} == set(Delivery) - {Delivery.SENDING}


def test_everything_that_is_under_way_can_end_in_every_way() -> None:
    assert {step for state, step in TRANSITIONS if state is Delivery.SENDING} == set(Step) - {Step.SEND}


def test_every_state_is_reached_and_left() -> None:
    assert set(TRANSITIONS.values()) == {state for state, _ in TRANSITIONS} == set(Delivery)


@pytest.mark.parametrize("count", [2, 3, 10, 1001])
def test_halves_tile_a_batch(count: int) -> None:
    first, second = halves(count)

    assert [*first, *second] == list(range(count))
    assert abs(len(first) - len(second)) <= 1
