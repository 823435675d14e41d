"""A wandb run without a server: a folder that `wandb sync` takes, whole and with every row once, whatever died.

wandb's own offline folder is never synced to disk and cannot be continued. So rows go into a row log first, durably;
after a crash, or with another configuration, the folder is written anew from the log and the torn one removed. When
the run ends the folder is synced to disk and the log goes.

Must not know: servers, batches. On failure: RefusedError (Retry); the rows are in the log.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any

from verl_shipper.backends.base import Memory, Retry
from verl_shipper.backends.sdk.child import Child, ChildError
from verl_shipper.backends.sdk.http import RefusedError
from verl_shipper.backends.sdk.row_log import RowLog, sync_tree
from verl_shipper.backends.wandb_rows import STEP_KEY, Row, media_of
from verl_shipper.backends.wandb_run import CALL_S, INIT_S, ROWS_PER_CALL, Wish

FLUSH_S = 1.0  # so that the folder of a run that goes on can be looked at


class OfflineRun:
    """One run and its folder. Notes: `offline_folder`, the folder in the making; `offline_first`, its first row."""

    def __init__(self, wish: Wish, memory: Memory) -> None:
        self._wish = wish
        self._memory = memory
        self._log: RowLog | None = None
        self._child: Child | None = None
        self._config: dict[str, Any] | None = None

    def deliver(self, rows: Sequence[Row], config: dict[str, Any]) -> None:
        """Rows are durable when this returns, and in the folder."""
        log = self._open_log()
        fresh = [row for row in rows if row.row_id not in log.ids]
        before = len(log.ids)
        log.append((row.row_id, [row.values, media_of(row)]) for row in fresh)
        if self._child is None or not self._child.is_alive or self._config != config:
            self._begin(config)
            self._write([value for _, value in log], self._first)
        else:
            self._write([[row.values, media_of(row)] for row in fresh], self._first + before)

    def finish(self, exit_code: int, batch_id: str) -> None:
        """End the folder with this batch; what comes later makes another one."""
        self._call("finish", CALL_S, exit_code=exit_code)
        self.close()
        folder = self._memory.get("offline_folder")
        if folder:
            sync_tree(folder)
        log = self._open_log()
        self._memory.put("offline_ended_with", batch_id)  # from here on its rows are the folder's, not the log's
        self._memory.put("offline_first", self._first + len(log.ids))
        self._memory.put("offline_folder", None)
        log.remove()
        self._log = None

    def close(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None
        if self._log is not None:
            self._log.close()
            self._log = None

    @property
    def _first(self) -> int:
        return int(self._memory.get("offline_first") or 0)

    def _open_log(self) -> RowLog:
        if self._log is None:
            self._log = RowLog(os.path.join(self._wish.folder, "rows.log"))
        return self._log

    def _begin(self, config: dict[str, Any]) -> None:
        """A new folder instead of the one that was in the making."""
        if self._child is not None:
            self._child.end()
        torn = self._memory.get("offline_folder")
        if torn:
            shutil.rmtree(torn, ignore_errors=True)
        try:
            self._child = Child(
                "verl_shipper.backends.wandb_child", folder=self._wish.folder, environment=self._wish.environment
            )
        except OSError as error:
            raise RefusedError(Retry(f"cannot start wandb's process: {error}")) from error
        settings = {
            **self._wish.settings,
            "x_skip_transaction_log": False,
            "x_transaction_log_flush_interval": FLUSH_S,
        }
        started = self._call(
            "init",
            INIT_S,
            where=self._wish.where,
            config=config,
            settings=settings,
            step_key=STEP_KEY,
            with_artifacts=False,
        )
        self._config = config
        self._memory.put("offline_folder", os.path.dirname(started["folder"]))

    def _write(self, rows: Sequence[list[Any]], first: int) -> None:
        for start in range(0, len(rows), ROWS_PER_CALL):
            part = rows[start : start + ROWS_PER_CALL]
            told = [[first + start + place, *row] for place, row in enumerate(part)]
            answer = self._call("log", CALL_S, rows=told)
            if answer["refused"]:
                # The number of the row is taken; an empty row keeps those behind it where they belong.
                bad = first + start + answer["done"]
                refused = part[answer["done"]][0]
                values = {key: refused[key] for key in (STEP_KEY, "_timestamp", "_shipper") if key in refused}
                self._call("log", CALL_S, rows=[[bad, values, []]])
                self._write(rows[start + answer["done"] + 1 :], bad + 1)
                return

    def _call(self, op: str, timeout_s: float, **arguments: Any) -> Any:
        assert self._child is not None, "not begun"
        try:
            return self._child.call(op, timeout_s, **arguments)
        except ChildError as error:
            self._child.end()
            raise RefusedError(Retry(f"wandb, {op}: {error.kind}: {error}")) from error
