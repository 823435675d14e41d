"""Lanes of a test, by the number it wants, and trackers that answer what they are told.

Must not know: what is tested. On failure: as scripted.py says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unit.shipper.scripted import Bench, ScriptedBackend, Tracker
from verl_shipper.backends.base import Batch, Delivered, Outcome, Reject

MakeBench = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeBench]:
    made: list[Bench] = []

    def new(tracker: Tracker | None = None, backend: type[ScriptedBackend] = ScriptedBackend) -> Bench:
        made.append(Bench(tmp_path / f"state{len(made)}", tracker, backend))
        return made[-1]

    yield new
    for bench in made:
        bench.close()


def script(*outcomes: Outcome) -> Callable[[Batch], Outcome]:
    """Answers in turn, Delivered for ever after."""
    left = list(outcomes)
    return lambda _batch: left.pop(0) if left else Delivered()


def refuse(poison: set[int], reason: str = "400 odd value") -> Callable[[Batch], Outcome]:
    return lambda batch: Reject(reason) if poison & {item.ordinal for item in batch.items} else Delivered()
