"""How long to wait before the next attempt: exponential, full jitter, a cap, and the server's own wish on top.

Full jitter (a uniform draw from 0 to the exponential bound) keeps many writers from coming back together.
"""

from __future__ import annotations

BASE_S = 0.5
CAP_S = 60.0
# A parked run is looked at this often: an operator who has put a new key in place waits no longer.
PARK_S = 30.0
# A server's wish is followed no further: a wrong Retry-After must not stop a run for good.
WISH_S_MAX = 3600.0


def delay_s(attempt: int, jitter: float, retry_after_s: float | None = None) -> float:
    """Seconds to wait after failed attempt number `attempt` (from 1). `jitter` in [0, 1) is the draw."""
    assert attempt >= 1, attempt
    assert 0.0 <= jitter < 1.0, jitter
    bound_s = min(CAP_S, BASE_S * 2.0 ** min(attempt - 1, 32))
    return max(bound_s * jitter, BASE_S / 5, wish_s(retry_after_s))


def wish_s(retry_after_s: float | None) -> float:
    """The server's own wish as far as it is followed; 0 for none, and for what is no time."""
    return min(retry_after_s, WISH_S_MAX) if retry_after_s is not None and retry_after_s > 0 else 0.0
