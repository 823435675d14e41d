"""Which steps of a stream are kept when only one in so many is wanted. A step is kept whole or not at all.

A window of `every` steps ends at a multiple of it: for 10 these are 1…10, 11…20, and 0 alone. Of each window the last
step that the stream has is kept: the multiple itself where it is there, so that steps 1…95 give 10, 20, …, 90, 95. The
stream's first step is kept as well.

    step                                             verdict
    the first one; a multiple                        KEEP
    the newest, in a window still open               WAIT, for a newer one or the stream's end
    an older one                                     KEEP if it was the last of its window, else DROP

Two cases break a step in halves: steps that go back and forth (what comes back to a window of long ago is kept only
at a multiple), and `close` where more was to come (a silent stream that was released, a step too large to wait).

A verdict depends on the stream's content only, never on time: the same after any restart. Must not know: records.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

WINDOWS_MAX = 16  # windows whose last step is remembered, for records that come late


class Verdict(enum.Enum):
    KEEP = "keep"
    DROP = "drop"
    WAIT = "wait"


class Steps:
    """The steps of one stream so far. `patient`: the first one and a multiple wait for the end of their step, too.
    `looks_back`: `state_at` is asked for, which costs a state at every step."""

    def __init__(self, intervals: Iterable[int], *, patient: bool = False, looks_back: bool = False) -> None:
        self.first: int | None = None
        self.newest: int | None = None
        self._patient = patient
        self._looks_back = looks_back
        self._last: dict[int, dict[int, int]] = {every: {} for every in intervals}  # interval → window → its last step
        self.turn = 0  # how often a step turned out to be over
        self._before: dict[str, Any] = {}  # state in front of the last turn

    def see(self, step: int) -> None:
        """A record of this step is there. Seeing it twice changes nothing."""
        if self.newest is None:
            self.first = self.newest = step
        elif step > self.newest:
            self._turn()
            for every, last in self._last.items():
                window = _window(self.newest, every)
                if window != _window(step, every):
                    _remember(last, window, self.newest)
            self.newest = step

    def close(self) -> None:
        """The newest step is over, and the last of its windows unless newer ones come all the same."""
        if self.newest is not None:
            self._turn()
            for every, last in self._last.items():
                _remember(last, _window(self.newest, every), self.newest)

    def is_last(self, every: int, step: int) -> bool:
        """Whether a step is known to be the last of its window."""
        return step % every == 0 or self._last[every].get(_window(step, every)) == step

    def verdict(self, every: int, step: int) -> Verdict:
        """Whether a record of a step that was seen is kept when one step in `every` is."""
        is_sure = step == self.first or step % every == 0
        if step == self.newest and self._last[every].get(_window(step, every)) != step:
            return Verdict.KEEP if is_sure and not self._patient else Verdict.WAIT
        return Verdict.KEEP if is_sure or self.is_last(every, step) else Verdict.DROP

    def state_at(self, turn: int) -> dict[str, Any]:
        """What a later process needs to begin again at a record that came at `turn` and is decided at once or after
        the next."""
        assert self._looks_back, "nothing was kept"
        return self.state() if turn == self.turn else self._before

    def state(self) -> dict[str, Any]:
        """What a later process needs to go on."""
        last = [[every, window, step] for every, steps in self._last.items() for window, step in steps.items()]
        return {"first": self.first, "newest": self.newest, "last": last}

    def restore(self, state: dict[str, Any]) -> None:
        self.first, self.newest = state.get("first"), state.get("newest")
        for every, window, step in state.get("last", ()):
            if every in self._last:
                self._last[every][window] = step

    def _turn(self) -> None:
        self.turn += 1
        if self._looks_back:
            self._before = self.state()


def _remember(last: dict[int, int], window: int, step: int) -> None:
    last[window] = step
    if len(last) > WINDOWS_MAX:
        del last[next(iter(last))]


def _window(step: int, every: int) -> int:
    return -(-step // every)
