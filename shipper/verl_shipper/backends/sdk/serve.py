"""The other side of child.py: answers requests with what handlers return, and dies with whoever asks.

Runs inside the process that loads a tracker's package. Handlers are called in the main thread, one at a time. What a
handler raises becomes an answer; the process goes on, the other side decides.

Must not know: any tracker.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from verl_shipper_spool.redact import scrub

REQUEST_BYTES_MAX = 256 * 1024 * 1024
READ_BYTES = 1 << 16
ERROR_CHARS_MAX = 500
EXIT_ORPHAN = 70


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer until standard input ends; returns never."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    answers_fd = int(sys.argv[1])
    os.set_inheritable(answers_fd, False)
    # The SDK's own helper processes must not hold our standard input.
    requests_fd = os.dup(0)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    threading.Thread(target=_watch, args=(requests_fd,), name="orphan-watch", daemon=True).start()
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=REQUEST_BYTES_MAX, strict_map_key=False)
    while chunk := os.read(requests_fd, READ_BYTES):
        unpacker.feed(chunk)
        for request in unpacker:
            _send(answers_fd, _answer(handlers, request))
    _end()


def _answer(handlers: Mapping[str, Callable[..., Any]], request: dict[str, Any]) -> dict[str, Any]:
    op = request.pop("op")
    try:
        return {"ok": handlers[op](**request)}
    except BaseException as error:  # noqa: BLE001 - an SDK may raise anything, SystemExit and KeyboardInterrupt too
        text = scrub((str(error).strip().splitlines() or [type(error).__name__])[0])
        return {"error": text[:ERROR_CHARS_MAX], "kind": type(error).__name__}


def _send(fd: int, answer: dict[str, Any]) -> None:
    view = memoryview(msgpack.packb(answer, use_bin_type=True))
    while view:
        view = view[os.write(fd, view) :]


def _watch(fd: int) -> None:
    """End at once when nobody can ask any more: what the SDK still holds belongs to the next process."""
    poll = select.poll()
    poll.register(fd, 0)  # hang-up is reported whatever else is asked for
    poll.poll()
    _end()


def _end() -> None:
    """With all that the SDK has started in our session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(0, signal.SIGKILL)
    os._exit(EXIT_ORPHAN)
