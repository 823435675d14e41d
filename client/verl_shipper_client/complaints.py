"""What went wrong in a client: counted always, told on stderr once a minute. Never raises.

Must not know: clients, streams.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from verl_shipper_client.values import error_text

WARN_PAUSE_S = 60.0


class Complaints:
    """Of one client. `errors`: how often something failed."""

    __slots__ = ("_tell_at_s", "errors")

    def __init__(self) -> None:
        self.errors = 0
        self._tell_at_s = 0.0

    def guard(self, what: str, act: Callable[[], object]) -> None:
        """Do something that must not raise into training."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - promise 1: never into training
            self.failed(what, error)

    def failed(self, what: str, error: Exception) -> None:
        self.errors += 1
        self.tell(f"{what} failed: {error_text(error)}")

    def tell(self, text: str) -> None:
        """One line, if the last one is long enough ago."""
        now_s = time.monotonic()
        if now_s < self._tell_at_s:
            return
        self._tell_at_s = now_s + WARN_PAUSE_S
        try:
            sys.stderr.write(f"verl-shipper: {text}\n")
        except (OSError, ValueError, AttributeError):  # stderr is closed: nobody to tell
            self.errors += 1
