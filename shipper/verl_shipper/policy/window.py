"""Values gathered over the steps that are not delivered: mean, min or max up to the next step that is.

NaN stays NaN: whatever it is mixed with, the result is NaN. Whole numbers beyond 64 bits become floats, as nobody could
write them down. Must not know: steps, records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_shipper.policy.sampling import REDUCTIONS

Number = int | float

NAMES_MAX = 20_000  # names that are gathered at a time; of more than these the last value stands
INT_MIN, INT_MAX = -(2**63), 2**64 - 1  # what MessagePack carries


class Window:
    """A running value for every name."""

    def __init__(self, mode: str) -> None:
        assert mode in REDUCTIONS, mode
        self._mode = mode
        self._join = _JOIN[mode]
        self._values: dict[str, list[Any]] = {}  # value so far, count, whether `peek` has shown the latest

    def add(self, name: str, number: Number) -> None:
        known = self._values.get(name)
        if known is not None:
            known[0] = self._join(known[0], number)
            known[1] += 1
            known[2] = False
        elif len(self._values) < NAMES_MAX:
            self._values[name] = [number, 1, False]

    def peek(self, name: str, number: Number) -> Number:
        """The value of a name so far, `number` included; it may still grow."""
        self.add(name, number)
        known = self._values.get(name)
        if known is None:
            return number
        known[2] = True
        return self._result(known)

    def take_rest(self, wanted: Callable[[str], bool]) -> dict[str, Number]:
        """Names begin anew; the values of those that nobody has seen yet."""
        taken = {name: self._values.pop(name) for name in [name for name in self._values if wanted(name)]}
        return {name: self._result(known) for name, known in taken.items() if not known[2]}

    def state(self) -> dict[str, Any]:
        """What a later process needs to go on; of use for the same mode only."""
        return {"mode": self._mode, "values": {name: tuple(known) for name, known in self._values.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state.get("mode") == self._mode:
            self._values = {name: list(known) for name, known in state["values"].items()}

    def _result(self, known: list[Any]) -> Number:
        number: Number = known[0] / known[1] if self._mode == "mean" else known[0]
        return number


def reduced(mode: str, numbers: Sequence[Number]) -> Number:
    """One value of several, at least one."""
    value = numbers[0]
    join = _JOIN[mode]
    for number in numbers[1:]:
        value = join(value, number)
    return value / len(numbers) if mode == "mean" else value


def _sum(one: Number, other: Number) -> Number:
    number = one + other
    return number if isinstance(number, float) or INT_MIN <= number <= INT_MAX else float(number)


def _least(one: Number, other: Number) -> Number:
    return math.nan if math.isnan(one) or math.isnan(other) else min(one, other)


def _most(one: Number, other: Number) -> Number:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


_JOIN: dict[str, Callable[[Number, Number], Number]] = {"mean": _sum, "sum": _sum, "min": _least, "max": _most}
