"""trackio in the contract suite: a store in a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract.kit import NO_STEP, Kit, Point
from support.trackio_reader import TrackioReader
from verl_shipper.backends.base import RunInfo


class TrackioKit(Kit):
    """A store in a folder, read by trackio's own reader. Gone: a file has its place. Hanging: somebody has the
    project's lock. A run without a place: a folder has the name of its database."""

    backend = "trackio"
    secret = "k" * 40

    def __init__(self, folder: Path, fixture: Callable[[str], Any]) -> None:
        super().__init__(folder, fixture)
        self._out, self._away = folder / "out", folder / "away"
        self._locks: list[int] = []

    @property
    def settings(self) -> dict[str, Any]:
        return {"dir": str(self._out)}

    def points(self, run: RunInfo) -> list[Point]:
        reader = TrackioReader(self._out)
        told = reader.logs(run)
        assert self.secret not in str(reader.config(run))
        return [
            (key, row["step"], float(value))
            for row in told
            for key, value in row.items()
            if key not in ("step", "timestamp") and isinstance(value, int | float)
        ]

    def gone(self) -> None:
        self._out.rename(self._away)
        self._out.touch()

    def hang(self, run: RunInfo) -> None:
        fd = os.open(self._out / f"{run.project}.lock", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self._locks.append(fd)

    def break_run(self, run: RunInfo) -> None:
        (self._out / f"{run.project}.db").mkdir(parents=True)

    def poison(self) -> tuple[dict[Any, Any], int]:
        return {"poison": 1.0}, NO_STEP

    def heal(self) -> None:
        if self._away.exists():
            self._out.unlink()
            self._away.rename(self._out)
        while self._locks:
            os.close(self._locks.pop())
