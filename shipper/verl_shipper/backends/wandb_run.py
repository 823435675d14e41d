"""One run at wandb as this process writes it: the lock, the child with the SDK, what the server has.

    CLOSED ─ open: lock, count, settle ─▶ READY ─ start: child, init at the server's count ─▶ WRITING
       ▲                                                                                        │
       └────── child gone, hung, given up; lock wanted; run over ◀───────────────────────────────┘

A row's number is the line of the server's history that it will be: the server's own count when the child begins, then
one more for each row. A count may lag behind, and requests of a dead child may still be on their way; therefore after
anything but a clean end two equal counts `settle_s` apart are wanted before a new child may begin.

Must not know: batches, what a row means. On failure: RefusedError with an outcome; the child is thrown away then.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.backends.base import Park, Retry
from verl_shipper.backends.sdk.child import Child, ChildError
from verl_shipper.backends.sdk.http import RefusedError
from verl_shipper.backends.sdk.parts import content_chars
from verl_shipper.backends.sdk.run_lock import Note, RunLock
from verl_shipper.backends.sdk.settle import settled
from verl_shipper.backends.wandb_api import RunAddress, RunState, WandbApi
from verl_shipper.backends.wandb_rows import ID_KEY, STEP_KEY, Row, media_of

log = logging.getLogger(__name__)

LOCK_WAIT_S = 20.0
COUNT_PAUSE_S = 0.5  # between two looks at the count while rows are on their way
COUNT_PAUSE_S_MAX = 3.0
CONFIRM_S = 60.0  # then the lane gets control back; the child keeps trying
STALL_S = 180.0  # wandb waits at most 60 s between two tries: nothing for so long means that it has given up
INIT_S = 30.0
CALL_S = 60.0
ROWS_PER_CALL = 200
ROWS_PER_CHILD = 50_000  # then it is replaced: what its memory and folder hold goes with it
MEDIA_PER_CHILD_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Wish:
    """How the run is to be written. `where` are arguments of wandb.init, `settings` of wandb.Settings."""

    address: RunAddress
    where: dict[str, Any]
    settings: dict[str, Any]
    environment: dict[str, str]
    folder: str
    lock_path: str
    settle_s: float
    with_artifacts: bool = True
    api_key: str = field(default="", repr=False)


@dataclass(slots=True)
class Sent:
    """Rows under way: what the server must show before they are delivered."""

    lines: int
    files: set[str] = field(default_factory=set)
    refused: str = ""  # why wandb does not take the row behind the last one
    artifacts_refused: int = 0
    seen_lines: int = -1
    seen_s: float = 0.0  # when the count moved the last time


class WandbRun:
    """One run. Used by one thread at a time; `mutex` keeps the giving way of the lock out meanwhile."""

    def __init__(self, wish: Wish, api: WandbApi) -> None:
        self.mutex = threading.RLock()
        self.lines = 0  # the number of the next row
        self.state_found = ""  # what the server called the run when we opened it
        self.config: dict[str, Any] | None = None  # the child was started with it
        self._wish = wish
        self._api = api
        self._lock: RunLock | None = None
        self._child: Child | None = None
        self._must_settle = False
        self._rows_of_child = 0
        self._media_of_child_bytes = 0

    @property
    def is_writing(self) -> bool:
        return self._child is not None and self._child.is_alive

    def open(self, *, rows_known: int, is_clean: bool) -> None:
        """Become the only writer and learn the count. `rows_known`: rows that the server once confirmed."""
        if self._lock is None:
            self._lock = RunLock.take(self._wish.lock_path, LOCK_WAIT_S)
            if self._lock is None:
                raise RefusedError(Retry("another daemon of this machine writes the run and does not give way"))
            self._lock.watch(self._give_way)
        note = self._lock.read()
        floor = max(rows_known, note.rows)
        found = self._api.run(self._wish.address)
        self.state_found = found.state if found else ""
        if found is not None and (self._must_settle or not is_clean or not note.is_clean):
            found = self._settled(found)
        self.lines = found.lines if found else 0
        if self.lines < floor:
            raise RefusedError(Park(f"wandb shows {self.lines} rows of {self._name}, it had {floor}; was it deleted?"))
        self._must_settle = False

    def rows_there(self, first: int) -> dict[str, int]:
        """Number of every row of ours from line `first` on, by its id."""
        lines = self._api.history(self._wish.address, first, self.lines)
        return {str(line[ID_KEY]): first + place for place, line in enumerate(lines) if ID_KEY in line}

    def start(self, config: dict[str, Any]) -> None:
        """Have a child that writes at `lines`, with this configuration at the server."""
        worn = self._rows_of_child > ROWS_PER_CHILD or self._media_of_child_bytes > MEDIA_PER_CHILD_BYTES
        if self.is_writing and self.config == config and not worn:
            return
        self._end_child()
        assert self._lock is not None, "not open"
        try:
            self._child = Child(
                "verl_shipper.backends.wandb_child",
                folder=self._wish.folder,
                environment=self._wish.environment,
                keep_fds=[self._lock.fd],
            )
        except OSError as error:
            raise RefusedError(Retry(f"cannot start wandb's process: {error}")) from error
        started = self._call(
            "init",
            INIT_S + 10,
            where=self._wish.where,
            config=config,
            settings={**self._wish.settings, "init_timeout": INIT_S, "api_key": self._wish.api_key},
            step_key=STEP_KEY,
            with_artifacts=self._wish.with_artifacts,
        )
        self.config = config
        self._rows_of_child = self._media_of_child_bytes = 0
        if started["starting_step"] > self.lines:
            self._must_settle = True
            self.abandon()
            raise RefusedError(Retry(f"wandb goes on at row {started['starting_step']}, its count says {self.lines}"))

    def send(self, rows: Sequence[Row]) -> Sent:
        """Give rows to the child. They count as under way from here on."""
        assert self._lock is not None, "not open"
        self._lock.write(Note(self.lines, is_clean=False))
        self._must_settle = True
        sent = Sent(self.lines)
        for start in range(0, len(rows), ROWS_PER_CALL):
            part = rows[start : start + ROWS_PER_CALL]
            told = [[sent.lines + place, row.values, media_of(row)] for place, row in enumerate(part)]
            answer = self._call("log", CALL_S + 2 * _media_count(part), rows=told)
            sent.files.update(answer["files"])
            sent.lines += answer["done"]
            sent.refused = answer["refused"]
            self._media_of_child_bytes += sum(content_chars(media.content) for row in part for media in row.media)
            if sent.refused:
                break
        self._rows_of_child += len(rows)
        self.lines = sent.lines
        return sent

    def attach(self, rows: Sequence[tuple[int, Row]]) -> set[str]:
        """Send the files of rows that are there already once more; answers their names."""
        told = [[number, {}, media_of(row)] for number, row in rows]
        return set(self._call("attach", CALL_S + 2 * len(rows), rows=told))

    def put_file(self, key: str, content: dict[str, Any], timeout_s: float) -> str:
        """How far a shipped file has come: "pending" or "committed". Begins with it when it is new to the child."""
        return str(self._call("put_file", timeout_s, key=key, content=content))

    def ask_server(self) -> None:
        """Raise RefusedError when the server cannot be asked about the run at the moment."""
        self._api.run(self._wish.address)

    def confirm(self, sent: Sent) -> None:
        """Return when the server shows what was sent. Raises RefusedError after CONFIRM_S; may be called again."""
        deadline_s = time.monotonic() + CONFIRM_S
        pause_s = COUNT_PAUSE_S
        sent.seen_s = sent.seen_s or time.monotonic()
        lines_before = sent.seen_lines
        while True:
            found = self._api.run(self._wish.address)
            lines = found.lines if found else 0
            if lines > sent.lines:
                self.abandon()
                raise RefusedError(
                    Retry(f"wandb has {lines} rows of {self._name}, we wrote {sent.lines}: another writer?")
                )
            if lines == sent.lines:
                sent.files -= self._api.uploaded(self._wish.address, sent.files)
            artifacts = self._look_at_child(sent, lines)
            if lines == sent.lines and not sent.files and not artifacts:
                break
            if time.monotonic() > deadline_s:
                missing = f"{sent.lines - lines} rows, {len(sent.files)} files, {artifacts} artifacts"
                is_moving = sent.seen_lines > lines_before
                raise RefusedError(Retry(f"wandb does not show {missing} of {self._name} yet", progressed=is_moving))
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, COUNT_PAUSE_S_MAX)
        assert self._lock is not None, "not open"
        self._lock.write(Note(self.lines, is_clean=True))
        self._must_settle = False

    def finish(self, exit_code: int) -> None:
        """End the run at wandb, and let go of it once the server says that it has ended."""
        self._call("finish", CALL_S, exit_code=exit_code)
        deadline_s = time.monotonic() + CALL_S
        while (found := self._api.run(self._wish.address)) is None or found.state in ("running", "pending"):
            if time.monotonic() > deadline_s:
                self.abandon()
                raise RefusedError(Retry(f"wandb does not show the end of {self._name} yet"))
            time.sleep(COUNT_PAUSE_S)
        self.close(is_over=True)

    def abandon(self) -> None:
        """Throw the child away with whatever it still holds."""
        self._end_child()

    def close(self, *, is_over: bool = False) -> None:
        """Let go of the run; when it is over, of its lock file, too."""
        with self.mutex:
            self._end_child()
            if self._lock is not None:
                self._lock.release(forget=is_over)
                self._lock = None

    @property
    def _name(self) -> str:
        return f"run {self._wish.address.run_id}"

    def _settled(self, found: RunState) -> RunState:
        """A count that has stood still for `settle_s`. Raises RefusedError when it does not."""
        rested = settled(
            found, lambda: self._api.run(self._wish.address), lambda state: state.lines, self._wish.settle_s
        )
        if rested is not None:
            return rested
        raise RefusedError(Retry(f"the count of rows of {self._name} does not come to rest"))

    def _call(self, op: str, timeout_s: float, **arguments: Any) -> Any:
        if self._child is None:
            raise RefusedError(Retry("wandb's process is gone"))
        try:
            return self._child.call(op, timeout_s, **arguments)
        except ChildError as error:
            self.abandon()
            if error.kind == "AuthenticationError":
                raise RefusedError(Park(f"key refused: {error}")) from error
            raise RefusedError(Retry(f"wandb, {op}: {error.kind}: {error}")) from error

    def _look_at_child(self, sent: Sent, lines: int) -> int:
        """How many artifacts are not committed. Raises when the child will never bring what is missing."""
        now_s = time.monotonic()
        if lines != sent.seen_lines:
            sent.seen_lines, sent.seen_s = lines, now_s
        health = self._call("health", CALL_S)
        sent.artifacts_refused += health["artifacts_refused"]
        if health["fatal"]:
            self.abandon()
            raise RefusedError(
                Park(f"wandb's server refused data of {self._name} for good; beginning again from its count")
            )
        if now_s - sent.seen_s > STALL_S:
            self.abandon()
            raise RefusedError(
                Retry(f"wandb brought nothing of {self._name} for {STALL_S:g} s; its process is replaced")
            )
        return int(health["artifacts_pending"])

    def _give_way(self, lock: RunLock) -> None:
        """Another daemon wants the run: let it, while nothing of ours is under way."""
        with self.mutex:
            if self._lock is lock and not self._must_settle:
                self.close()

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None
            self.config = None
            shutil.rmtree(os.path.join(self._wish.folder, "wandb"), ignore_errors=True)


def _media_count(rows: Sequence[Row]) -> int:
    return sum(len(row.media) for row in rows)
