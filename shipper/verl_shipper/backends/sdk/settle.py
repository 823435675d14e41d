"""When a server's answer may be believed after anything but a clean end: when it has stood still for long enough.

Counts and summaries lag behind what a server has accepted, and requests of a dead child may still be on their way.

Must not know: trackers. What the question raises goes through.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

State = TypeVar("State")

LOOKS_MAX = 3  # pauses of `settle_s`, and some seconds for the answers
SLACK_S = 5.0


def settled(
    found: State, ask: Callable[[], State | None], mark: Callable[[State], object], settle_s: float
) -> State | None:
    """The state that `ask` tells once its `mark` was the same twice, `settle_s` apart; None when it does not rest."""
    deadline_s = time.monotonic() + LOOKS_MAX * settle_s + SLACK_S
    while time.monotonic() < deadline_s:
        time.sleep(settle_s)
        again = ask()
        if again is not None and mark(again) == mark(found):
            return again
        found = again or found
    return None
