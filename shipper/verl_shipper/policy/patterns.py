"""Which metric names are wanted, and every how many steps. Patterns as a shell has them (`*`, `?`, `[…]`), over flat
names, where `*` crosses slashes.

    include, exclude   a name is wanted when a pattern of `include` (none: all) and none of `exclude` matches
    log_frequency      the pattern with the most letters that matches decides; the first of equals; without one: 1

Validation's names (`val/…`, `val-core/…`, `eval_…`, `test/…`) are rare and dear: a pattern that begins with a wildcard
does not reach them, one that names them does.

Must not know: steps, records' order. Nothing here fails.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl_shipper.policy.sampling import Sampling
from verl_shipper.values import DEPTH_MAX, key_text

VALIDATION = re.compile(r"(?:val|valid|validation|eval|test)(?:$|[-_/.])")
UNWANTED = 0
NAMES_MAX = 20_000  # names that are remembered; somebody may make up new ones for ever
EVERY_MAX = 2**62  # beyond any step, and still a number that can be written down


class Names:
    """What becomes of a metric's name: UNWANTED, or the number of steps of which one is kept (1: all)."""

    def __init__(self, sampling: Sampling) -> None:
        self._include = _any_of(sampling.include)
        self._exclude = _any_of(sampling.exclude)
        frequency = {pattern: min(max(every, 1), EVERY_MAX) for pattern, every in sampling.log_frequency.items()}
        self._frequency = [
            (re.compile(fnmatch.translate(pattern)).match, pattern[:1] in ("*", "?", "["), every)
            for pattern, every in sorted(frequency.items(), key=lambda item: -_letters(item[0]))
        ]
        self.all_wanted = not sampling.include and not sampling.exclude
        self.intervals = frozenset(every for every in frequency.values() if every > 1)
        self._known: dict[str, int] = {}
        self._shapes: dict[tuple[str, ...], frozenset[int]] = {}
        self._shapes_names = 0

    @property
    def is_trivial(self) -> bool:
        return self.all_wanted and not self.intervals

    def every(self, name: str) -> int:
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= NAMES_MAX:
                self._known.clear()
            known = self._known[name] = self._judge(name)
        return known

    def groups(self, body: Mapping[Any, Any]) -> frozenset[int]:
        """All that `every` says of a body's names."""
        if dict in map(type, body.values()):
            return frozenset(map(self.every, names_of(body)))
        shape = tuple(body)  # the same few sets of names come again and again
        known = self._shapes.get(shape)
        if known is None:
            known = frozenset(self.every(key_text(key)) for key in body)
            if all(isinstance(key, str) for key in body):  # 1 and True are one key, but two names
                self._remember(shape, known)
        return known

    def _remember(self, shape: tuple[str, ...], groups: frozenset[int]) -> None:
        self._shapes_names += len(shape) + 1
        if self._shapes_names > NAMES_MAX:
            self._shapes.clear()
            self._shapes_names = len(shape) + 1
        self._shapes[shape] = groups

    def _judge(self, name: str) -> int:
        if (self._include and not self._include.match(name)) or (self._exclude and self._exclude.match(name)):
            return UNWANTED
        exempt = VALIDATION.match(name) is not None
        for match, is_general, every in self._frequency:
            if not (exempt and is_general) and match(name):
                return every
        return 1


def names_of(body: Mapping[Any, Any], prefix: str = "", depth: int = 1) -> Iterator[str]:
    """Flat names of a metrics body, as `values.flatten_metrics` makes them."""
    for key, value in body.items():
        name = prefix + key_text(key)
        if isinstance(value, dict) and depth < DEPTH_MAX:
            yield from names_of(value, f"{name}/", depth + 1)
        else:
            yield name


def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(fnmatch.translate, patterns))) if patterns else None


def _letters(pattern: str) -> int:
    return sum(sign not in "*?[]" for sign in pattern)
