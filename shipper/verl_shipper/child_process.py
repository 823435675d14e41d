"""What the processes that the supervisor starts have in common: how they are told to stop, how they say that they live.

    stdin      the first line are the orders; "stop", or its end, means: end. It ends when the daemon is gone, too.
    beat fd    a line a second; silence means hung

Must not know: what a child does. On failure: a daemon that does not listen any more is none.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys

from verl_shipper.errors import HeldError
from verl_shipper.lock import Lock

log = logging.getLogger(__name__)

BEAT_S = 1.0
LOCK_PAUSE_S = 0.1


def leave_signals_to_the_daemon() -> None:
    """Ctrl-C, and whatever else a whole group of processes is sent, is the daemon's to handle."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def told_to_stop(wait_s: float) -> bool:
    """Whether we are to end; waits so long for it. "stop" and end of file mean the same."""
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


def beat(fd: int, line: bytes = b"beat\n") -> None:
    """Say that we live; `line`: and how things are."""
    try:
        os.write(fd, line)
    except OSError:
        log.debug("nobody listens to our beat any more")


def take_lock(path: str, what: str, beat_fd: int) -> Lock | None:
    """Wait for the same child of a killed daemon to end. None when our own daemon went away meanwhile."""
    while True:
        try:
            return Lock.take(path, what)
        except HeldError:
            if told_to_stop(LOCK_PAUSE_S):
                return None
            beat(beat_fd)
