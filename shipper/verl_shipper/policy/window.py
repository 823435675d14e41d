"""Values gathered over the steps that are not delivered: mean, min or max up to the next step that is.

NaN stays NaN: whatever it is mixed with, the result is NaN. Must not know: steps, records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from verl_shipper.policy.sampling import REDUCTIONS

Number = int | float


class Window:
    """A running value for every name."""

    def __init__(self, mode: str) -> None:
        assert mode in REDUCTIONS, mode
        self._mode = mode
        self._values: dict[str, list[Number]] = {}  # value so far, count

    def add(self, name: str, number: Number) -> None:
        known = self._values.get(name)
        if known is None:
            self._values[name] = [number, 1]
        else:
            known[0] = _joined(self._mode, known[0], number)
            known[1] += 1

    def take(self, name: str, number: Number) -> Number:
        """The value of a name with `number` as the last one; the name begins anew."""
        self.add(name, number)
        return self._result(self._values.pop(name))

    def take_rest(self, wanted: Callable[[str], bool]) -> dict[str, Number]:
        """Values of names that nothing more comes of."""
        return {name: self._result(self._values.pop(name)) for name in [name for name in self._values if wanted(name)]}

    def state(self) -> dict[str, Any]:
        return dict(self._values)

    def restore(self, state: Mapping[str, Any]) -> None:
        self._values = {str(name): list(value) for name, value in state.items()}

    def _result(self, value: list[Number]) -> Number:
        return value[0] / value[1] if self._mode == "mean" else value[0]


def reduced(mode: str, numbers: Iterable[Number]) -> Number:
    """One value of several, at least one."""
    window = Window(mode)
    for number in numbers:
        window.add("", number)
    return window.take_rest(lambda _name: True)[""]


def _joined(mode: str, one: Number, other: Number) -> Number:
    if mode in ("mean", "sum"):
        return _sum(one, other)
    if math.isnan(one) or math.isnan(other):
        return math.nan
    return min(one, other) if mode == "min" else max(one, other)


def _sum(one: Number, other: Number) -> Number:
    try:
        return one + other
    except OverflowError:  # a whole number too large for a float
        return math.inf if one > 0 else -math.inf
