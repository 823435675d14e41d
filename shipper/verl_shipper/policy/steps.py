"""Which steps of a stream are kept when only one in so many is wanted. A step is kept whole or not at all.

A window of `every` steps ends at a multiple of it: for 10 these are 1…10, 11…20, and 0 alone. Of each window the last
step that the stream has is kept: the multiple itself where it is there, so that steps 1…95 give 10, 20, …, 90, 95. The
stream's first step is kept as well.

    step                                             verdict
    the first one; a multiple                        KEEP
    the newest, in a window still open               WAIT, for a newer one or the stream's end
    an older one, out of order                       KEEP if its window kept it, else DROP

A verdict depends on the stream's content only, never on time: the same after any restart. Must not know: records.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

WINDOWS_MAX = 16  # closed windows that are remembered, for records that come late


class Verdict(enum.Enum):
    KEEP = "keep"
    DROP = "drop"
    WAIT = "wait"


class Steps:
    """The steps of one stream so far. `patient`: a multiple waits for the end of its step, too."""

    def __init__(self, intervals: Iterable[int], *, patient: bool = False) -> None:
        self.first: int | None = None
        self.newest: int | None = None
        self._patient = patient
        self._kept: dict[int, dict[int, int]] = {every: {} for every in intervals}

    def see(self, step: int) -> None:
        """A record of this step is there. Seeing it twice changes nothing."""
        if self.first is None:
            self.first = step
        if self.newest is None or step > self.newest:
            for every in self._kept:
                if self.newest is not None and _window(step, every) != _window(self.newest, every):
                    self._keep(every, self.newest)
            self.newest = step

    def close(self) -> None:
        """The newest step is over. Unless newer ones come, it is the last of its windows."""
        for every in self._kept:
            if self.newest is not None:
                self._keep(every, self.newest)

    def _keep(self, every: int, step: int) -> None:
        kept = self._kept[every]
        kept[_window(step, every)] = step
        if len(kept) > WINDOWS_MAX:
            del kept[next(iter(kept))]

    def verdict(self, every: int, step: int) -> Verdict:
        """Whether a record of a step that was seen is kept when one step in `every` is."""
        if step == self.first:
            return Verdict.KEEP
        is_open = step == self.newest and self._kept[every].get(_window(step, every)) != step
        if is_open:
            return Verdict.WAIT if self._patient or step % every else Verdict.KEEP
        return (
            Verdict.KEEP if step % every == 0 or self._kept[every].get(_window(step, every)) == step else Verdict.DROP
        )

    def state(self) -> dict[str, Any]:
        """What a later process needs to go on."""
        kept = [[every, window, step] for every, steps in self._kept.items() for window, step in steps.items()]
        return {"first": self.first, "newest": self.newest, "kept": kept}

    def restore(self, state: dict[str, Any]) -> None:
        self.first, self.newest = state.get("first"), state.get("newest")
        for every, window, step in state.get("kept", ()):
            if every in self._kept:
                self._kept[every][window] = step


def _window(step: int, every: int) -> int:
    return -(-step // every)
