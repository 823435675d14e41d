"""A disposable process for a tracker's own package: started, asked, thrown away.

    lane process ── requests (stdin) ──▶ child: one SDK, one run, a session of its own
                 ◀── answers (a pipe) ──

One MessagePack map each way: {"op", **arguments} and {"ok": value} or {"error": text, "kind": type name}. One request
at a time. The child ends by itself as soon as its standard input has no writer left, whatever the SDK is doing, so
that a killed lane leaves nobody behind who could still write. Descriptors in `keep_fds` (a run's lock) stay open in
the child until it is gone.

Must not know: any tracker. On failure: ChildError; the caller throws the child away and settles what it had sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from verl_shipper_spool.redact import scrub

log = logging.getLogger(__name__)

ANSWER_BYTES_MAX = 64 * 1024 * 1024
READ_BYTES = 1 << 16
WORDS_BYTES = 4096
WORDS_CHARS_MAX = 200
END_S = 5.0  # from SIGKILL until a process that is in no disk wait is gone


class ChildError(Exception):
    """The child did not do what was asked. `kind` names the SDK's exception, or is "gone" or "hung"."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Child:
    """One process. Used by one thread at a time."""

    def __init__(
        self, module: str, *, folder: str, environment: Mapping[str, str], keep_fds: Sequence[int] = ()
    ) -> None:
        """Start `python -m module` in `folder`, where what the SDK prints goes to `sdk.log`."""
        os.makedirs(folder, 0o700, exist_ok=True)
        read_fd, write_fd = os.pipe()
        self._words_path = os.path.join(folder, "sdk.log")
        try:
            with open(self._words_path, "wb") as words:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(write_fd)],
                    cwd=folder,
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=words,
                    stderr=words,
                    pass_fds=[write_fd, *keep_fds],
                    start_new_session=True,
                )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        assert self._process.stdin is not None, "asked for a pipe"
        self._requests_fd = self._process.stdin.fileno()
        self._answers_fd = read_fd
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=ANSWER_BYTES_MAX, strict_map_key=False)
        os.set_blocking(self._requests_fd, False)
        os.set_blocking(read_fd, False)
        self.is_spent = False  # after a failure nobody knows what an answer would belong to

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self.is_spent and self._process.poll() is None

    def call(self, op: str, timeout_s: float, **arguments: Any) -> Any:
        """What the child's handler for `op` returned. Raises ChildError."""
        if not self.is_alive:
            raise self._gone()
        deadline_s = time.monotonic() + timeout_s
        try:
            self._write(msgpack.packb({"op": op, **arguments}, use_bin_type=True), deadline_s, op)
            answer = self._read(deadline_s, op)
        except ChildError:
            self.is_spent = True
            raise
        if "error" in answer:
            raise ChildError(str(answer["error"]), str(answer.get("kind", "")))
        return answer.get("ok")

    def end(self) -> None:
        """Throw it away: SIGKILL to its whole process group; returns when it is gone. Harmless when repeated."""
        self.is_spent = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self._answers_fd >= 0:
            os.close(self._answers_fd)
            self._answers_fd = -1
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.warning("process %d of a tracker's package does not end", self._process.pid)

    def _gone(self) -> ChildError:
        """That it ended, and the last thing it said."""
        words = ""
        with contextlib.suppress(OSError), open(self._words_path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - WORDS_BYTES, 0))
            lines = file.read().decode(errors="replace").strip().splitlines()
            words = f": {scrub(lines[-1])[:WORDS_CHARS_MAX]}" if lines else ""
        return ChildError(f"the process of the tracker's package ended{words}", "gone")

    def _write(self, content: bytes, deadline_s: float, op: str) -> None:
        view = memoryview(content)
        while view:
            writable = _wait(self._requests_fd, select.POLLOUT, _left(deadline_s, op))
            try:
                view = view[os.write(self._requests_fd, view) :] if writable else view
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._gone() from error

    def _read(self, deadline_s: float, op: str) -> dict[str, Any]:
        while True:
            for answer in self._unpacker:
                return dict(answer)
            if _wait(self._answers_fd, select.POLLIN, _left(deadline_s, op)):
                chunk = os.read(self._answers_fd, READ_BYTES)
                if not chunk:
                    raise self._gone()
                self._unpacker.feed(chunk)


def _wait(fd: int, events: int, timeout_s: float) -> bool:
    """Whether `fd` became ready, or broke, in time. Poll, since select refuses descriptors above 1023."""
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(timeout_s * 1000))


def _left(deadline_s: float, op: str) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise ChildError(f"the tracker's package did not answer to {op!r} in time", "hung")
    return left_s
