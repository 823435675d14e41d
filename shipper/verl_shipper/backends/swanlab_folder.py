"""A run written as a folder of SwanLab's own, offline or for its local dashboard.

    rows ─▶ row log (durable) ─▶ child with the SDK ─▶ log_dir/run-…-CUID, for `swanlab sync DIR --id CUID`

The SDK's folder is neither synced to disk nor continued. So rows are safe once they are in the row log; after a crash
a new process writes the folder anew from it, and the torn one goes. When the run is over the folder is synced to disk
and the row log removed; what other ranks bring after that goes into a further folder, which is synced the same way.

Must not know: batches. On failure: RefusedError with an outcome, OSError; nothing in the row log is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Sequence
from typing import Any, final

from verl_shipper.backends.base import Retry
from verl_shipper.backends.sdk.child import Child, ChildError
from verl_shipper.backends.sdk.http import RefusedError
from verl_shipper.backends.sdk.row_log import RowLog, sync_tree
from verl_shipper.backends.sdk.run_lock import RunLock
from verl_shipper.backends.swanlab_points import Row
from verl_shipper.backends.swanlab_run import CALL_S, INIT_S, LOCK_WAIT_S, ROWS_PER_CALL, Wish, media_of

log = logging.getLogger(__name__)

ROWS_FOLDER = ".verl-shipper"
CLOSE_S = 5.0


@final
class SwanlabFolder:
    """One run in `log_dir`. `part`: how many folders of it are finished."""

    def __init__(self, wish: Wish, log_dir: str, created_ns: int, part: int) -> None:
        self._wish = wish
        self._log_dir = os.path.abspath(log_dir)
        self._created = time.strftime("%Y%m%d_%H%M%S", time.localtime(created_ns // 1_000_000_000))
        self._lock: RunLock | None = None
        self._rows: RowLog | None = None
        self._child: Child | None = None
        self._config: dict[str, Any] | None = None
        self.part = part

    @property
    def folder(self) -> str:
        """The folder that is being written."""
        suffix = f"-{self.part + 1}" if self.part else ""
        return os.path.join(self._log_dir, f"run-{self._created}-{self._wish.address.cuid}{suffix}")

    def open(self) -> None:
        """Become the only writer."""
        if self._lock is None:
            self._lock = RunLock.take(self._wish.lock_path, LOCK_WAIT_S)
            if self._lock is None:
                raise RefusedError(Retry("another daemon of this machine writes the run's folder"))
        if self._rows is None:
            for part in range(self.part):
                with contextlib.suppress(FileNotFoundError):  # its folder is whole
                    os.unlink(self._rows_path(part))
            self._rows = RowLog(self._rows_path(self.part))

    def write(self, rows: Sequence[Row], config: dict[str, Any]) -> None:
        """Keep rows; durable when it returns. The SDK's folder follows, anew after a crash."""
        self.open()
        assert self._rows is not None, "opened just now"
        fresh = [row for row in rows if row.row_id not in self._rows.ids]
        told = [(row.row_id, [row.step, row.time_ns, row.scalars, media_of(row)]) for row in fresh]
        self._rows.append(told)
        if self._child is not None and self._child.is_alive and self._config == config:
            try:
                self._tell([value for _, value in told])
                return
            except ChildError as error:
                log.warning("SwanLab's process failed, its folder is written anew: %s", error)
        self._begin(config)

    def finish(self, exit_code: int) -> None:
        """End the run: the folder is whole and on the disk when this returns."""
        assert self._child is not None, "written before"
        state = "success" if exit_code == 0 else "crashed"
        try:
            self._child.call("finish", CALL_S, state=state, error=f"exit {exit_code}")
        except ChildError as error:
            self._end_child()
            raise RefusedError(Retry(f"SwanLab's process did not finish its folder: {error}")) from error
        self._end_child()
        sync_tree(self.folder)

    def drop_rows(self) -> None:
        """The folder is known to be whole: its row log is not needed any more."""
        self.part += 1
        if self._rows is not None:
            self._rows.remove()
            self._rows = None

    def close(self) -> None:
        """Let go. A run that is not over gets a folder that can be read."""
        if self._child is not None and self._child.is_alive:
            with contextlib.suppress(ChildError):
                self._child.call("finish", CLOSE_S, state="aborted", error="not finished yet")
        self._end_child()
        if self._rows is not None:
            self._rows.close()
            self._rows = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _rows_path(self, part: int) -> str:
        return os.path.join(self._log_dir, ROWS_FOLDER, f"{self._wish.address.cuid}-{part}.rows")

    def _begin(self, config: dict[str, Any]) -> None:
        """A new process and a new folder, with everything that is known."""
        assert self._rows is not None, "open"
        assert self._lock is not None, "open"
        self._end_child()
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self._child = Child(
                "verl_shipper.backends.swanlab_child",
                folder=self._wish.folder,
                environment=self._wish.environment,
                keep_fds=[self._lock.fd],
            )
            self._child.call(
                "init",
                INIT_S,
                where=self._wish.where,
                config=config,
                folder=os.path.basename(self.folder),
                url="",
                settle_s=0.0,
            )
            part: list[Any] = []
            for _, value in self._rows:
                part.append(value)
                if len(part) == ROWS_PER_CALL:
                    self._tell(part)
                    part = []
            self._tell(part)
        except ChildError as error:
            self._end_child()
            raise RefusedError(Retry(f"SwanLab's process cannot write its folder: {error}")) from error
        self._config = config

    def _tell(self, values: list[Any]) -> None:
        assert self._child is not None, "begun"
        for start in range(0, len(values), ROWS_PER_CALL):
            part = values[start : start + ROWS_PER_CALL]
            while part:
                answer = self._child.call("log", CALL_S + 2 * len(part), rows=part)
                if answer["refused"]:
                    log.warning("SwanLab's package does not take a row: %s", answer["refused"])
                part = part[answer["done"] + 1 :] if answer["refused"] else []

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None
            self._config = None
