"""What a kit is: kits.py says how to write one.

Must not know: trackers, tests.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest

from support.batches import run_info
from verl_shipper.backends.base import RunInfo
from verl_shipper_spool.record import Record

Point = tuple[str, Any, float]
NO_STEP = 2**63  # no tracker whose steps have 64 bits takes it


class Kit(abc.ABC):
    """One tracker of the whole session, started in `folder`. `fixture(name)` gives fixtures of the session."""

    backend: ClassVar[str]
    repeats: ClassVar[bool] = False  # what was shown right before a crash may be shown again
    takes_late: ClassVar[bool] = True  # takes a step of a key below its last one
    hangs_alone: ClassVar[bool] = True  # a run may hang while another one is served
    secret: ClassVar[str] = "no such secret"  # may stand in no reason

    def __init__(self, folder: Path, fixture: Callable[[str], Any]) -> None:
        folder.mkdir()
        self.folder = folder

    def run(self) -> RunInfo:
        """A run that nobody has seen yet."""
        return run_info(project=f"project-{uuid.uuid4().hex[:8]}", run_id=f"run-{uuid.uuid4().hex[:8]}")

    def record(self, record: Record) -> Record:
        """What a test logs in place of this record, where a tracker has no numbers."""
        return record

    @property
    @abc.abstractmethod
    def settings(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def points(self, run: RunInfo) -> list[Point]: ...

    def values(self, run: RunInfo, key: str) -> list[tuple[Any, float]]:
        found = [(step, value) for name, step, value in self.points(run) if name == key]
        return list(dict.fromkeys(found)) if self.repeats else found

    def gone(self) -> None:
        self._cannot("be gone")

    def hang(self, run: RunInfo) -> None:
        self._cannot("hang")

    def break_run(self, run: RunInfo) -> None:
        self._cannot("be broken for one run")

    def lose_answers(self) -> None:  # noqa: B027 - not every tracker has more to lose
        """Nothing to do where nothing but the return of `upload` can be lost."""

    def poison(self) -> tuple[dict[Any, Any], int]:
        self._cannot("refuse a record")

    def heal(self) -> None:  # noqa: B027 - not every tracker can fail
        """As if nothing had ever been wrong."""

    def close(self) -> None:
        self.heal()

    def needs(self, what: str) -> None:
        """Skip a test before it does much, if its kit does not write this failure."""
        if getattr(type(self), what) is getattr(Kit, what):
            self._cannot(what)

    def _cannot(self, what: str) -> NoReturn:
        pytest.skip(f"{type(self).__name__}: this tracker cannot {what}")
