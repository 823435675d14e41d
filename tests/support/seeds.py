"""Seeds of random tests: from VERL_SHIPPER_TEST_SEED, or fresh and printed, so that any run can be repeated."""

from __future__ import annotations

import os
import random

SEED_VARIABLE = "VERL_SHIPPER_TEST_SEED"


def seeded(name: str) -> random.Random:
    """A random generator for the test `name`; pytest shows the printed line when the test fails."""
    seed = os.environ.get(SEED_VARIABLE) or str(random.SystemRandom().randrange(1 << 32))
    print(f"{name}: {SEED_VARIABLE}={seed}")
    return random.Random(f"{seed}:{name}")
