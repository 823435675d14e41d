"""Progress of a flush: bars on a terminal, a plain line now and then elsewhere.

Must not know: the daemon. On failure of the terminal: silence, the flush goes on.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from verl_shipper.status import Account, Report

PLAIN_PAUSE_S = 5.0


class Progress:
    """Shows reports as they come."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._plain_at_s = time.monotonic() + PLAIN_PAUSE_S
        self._last: Report | None = None
        self._first_done: dict[str, int] = {}

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bars

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bars = Bars(*columns, console=Console(stderr=True))
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, report: Report) -> None:
        for name in report.backends:
            self._first_done.setdefault(name, _done(report.total(name)))
        self._last = report
        if self._bars is not None:
            for name in report.backends:
                total = report.total(name)
                task = self._tasks.get(name)
                if task is None:
                    task = self._tasks[name] = self._bars.add_task(name, total=total.logged)
                self._bars.update(task, completed=_done(total), total=total.logged)
        elif time.monotonic() >= self._plain_at_s:
            self._plain_at_s = time.monotonic() + PLAIN_PAUSE_S
            for name in report.backends:
                _print(f"{name}: {_done(report.total(name))} of {report.total(name).logged} records done")

    def summary(self) -> None:
        """What was done, and what remains and why."""
        if self._last is None:
            return
        for name in self._last.backends:
            total = self._last.total(name)
            new = _done(total) - self._first_done.get(name, 0)
            done = f"{new} records delivered" if new else "nothing delivered" if total.pending else "nothing new"
            line = f"{name}: {done}"
            if total.dead_lettered:
                line += f", {total.dead_lettered} dead letters"
            if total.dropped:
                line += f", {sum(total.dropped.values())} dropped"
            if total.pending:
                line += f", {total.pending} remain"
                line += f" ({total.last_error})" if total.last_error else ""
                line += "; run the same command again"
            _print(line)


def _done(account: Account) -> int:
    return account.logged - account.pending


def _print(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
