"""The shuffle is numpy's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from verl_shipper.policy.shuffle import shuffled


@pytest.mark.parametrize("count", [*range(40), 63, 64, 65, 255, 256, 257, 623, 624, 625, 1319, 5000, 65_537])
def test_numbers_are_shuffled_as_numpy_does(count: int) -> None:
    expected = list(range(count))
    np.random.RandomState(42).shuffle(expected)

    assert shuffled(count, 42) == expected


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31, 2**32 - 1])
def test_any_seed_of_numpys_is_taken(seed: int) -> None:
    expected = list(range(1000))
    np.random.RandomState(seed).shuffle(expected)

    assert shuffled(1000, seed) == expected
