"""What the takers of all kinds share: a file opened safely, and records kept exactly once.

    keep(…)   room? → intent → append → sync → settle        a generator: it waits for room without holding anybody up

Must not know: kinds of files. On failure: NotNowError for a file that waits, RefusedError for one that cannot be taken;
sqlite3.Error leaves an intent behind, and only a new process may go on from there (`recover`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_shipper.collect.ledger import File, Ledger, Mark
from verl_shipper.collect.order import collected_dir
from verl_shipper.collect.runs import Runs, of_values
from verl_shipper.collect.streams import Run, Streams, ordinals_in
from verl_shipper.collect.walk import Found, seen_of
from verl_shipper.config_watch import WatchEntry
from verl_shipper.policy.watching import Seen
from verl_shipper_spool.record import RecordKind

log = logging.getLogger("verl_shipper.collector")

READ_BYTES = 1024 * 1024
FILES, RECORDS, CHANGED = "files", "records", "changed"


class NotNowError(Exception):
    """The file waits: it moved while it was read, or its records found no room."""


class RefusedError(Exception):
    """The file cannot be taken as it is; the text is the reason that `status` counts."""


@dataclass(slots=True)
class Work:
    """`trouble`: why nothing is taken right now, for `status`."""

    ledger: Ledger
    streams: Streams
    runs: Runs
    trouble: str = ""

    def run_of(self, entry: WatchEntry, file: File, found: Found) -> Run:
        """The run of a file: the one it had before, as long as it is the same file."""
        if not file.run:
            now_s = time.monotonic()
            file.run = self.runs.of_file(entry, found.path, file.kind, found.seen.mtime_ns, now_s).values()
        return of_values(file.run)

    def keep(
        self,
        file: File,
        run: Run,
        kind: RecordKind,
        time_ns: int,
        bodies: list[tuple[int | None, Any]],
        marks: list[Mark],
    ) -> Iterator[int]:
        """Records of a file, each with what is true of the file after it."""
        made = [self.streams.encode(run, kind, step, time_ns, body) for step, body in bodies]
        size = sum(map(len, made))
        yield from self.wait_for_room(size)
        stream_id, first = self.streams.next(run, kind, time.monotonic())
        self.ledger.intend(file, stream_id, first, marks)
        kept = 0
        for payload in made:
            if not self.streams.append(run, kind, payload):
                break
            kept += 1
        self.sync(run, kind)
        self.ledger.settle(file.id, marks[:kept], file)
        if kept < len(made):
            raise NotNowError("the spool took no record")
        yield size

    def wait_for_room(self, size: int) -> Iterator[int]:
        while why := self.streams.room(size):
            self.trouble = f"files wait: {why}"
            yield 0
        self.trouble = ""

    def sync(self, run: Run, kind: RecordKind) -> None:
        try:
            self.streams.sync(run, kind)
        except OSError as error:  # a kill costs nothing all the same, only a power loss might
            log.warning("%s cannot be synced: %s", self.streams.folder, error.strerror or error)

    def recover(self, state_dir: str) -> None:
        """Come to terms with what the process before us was in the midst of. Bytes move from our folder to the node's
        spool and from there into a number in its table: whoever looks in that order sees them at least once."""
        for stream_id, first, count, file_id, marks in self.ledger.intents():
            there = max(
                ordinals_in(os.path.join(collected_dir(state_dir), stream_id)),
                ordinals_in(os.path.join(state_dir, "spool", stream_id)),
                self.runs.ordinals(stream_id),
            )
            self.ledger.settle(file_id, marks[: min(max(there - first, 0), count)])


@contextlib.contextmanager
def opened(found: Found) -> Iterator[int]:
    """A descriptor of the very file that was found. Raises NotNowError when another one has its name by now."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(found.path, flags)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise NotNowError("gone") from error
        raise RefusedError(f"unreadable: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or seen_of(fd).identity != found.seen.identity:
            raise NotNowError("another file has its name")
        yield fd
    except OSError as error:
        raise RefusedError(f"unreadable: {error.strerror}") from error
    finally:
        os.close(fd)


def blocks(fd: int, start: int, end: int) -> Iterator[bytes]:
    while start < end:
        block = os.pread(fd, min(READ_BYTES, end - start), start)
        if not block:
            raise NotNowError("it became shorter")
        yield block
        start += len(block)


def must_be(fd: int, seen: Seen) -> None:
    if seen_of(fd) != seen:
        raise NotNowError("it changed while it was read")
