"""The process of a collector: `python -m verl_shipper.collect.process`, started by the supervisor only.

    stdin    first line: CollectOrder as JSON; then the end of file when the daemon is gone or wants no more
    beat fd  a JSON line a second: {"settled_ns", "problems"}, a mere beat before there is one; silence means hung

Promises: one collector per state folder (a lock outlives a daemon that was killed); ends by itself when its daemon
does, or with `ends` when nothing is left to take. Exit codes: 0 stopped or done, 1 anything else; the supervisor
starts it again.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import sys
import time

from verl_shipper.child_process import BEAT_S, beat, leave_signals_to_the_daemon, take_lock, told_to_stop
from verl_shipper.collect.collector import Collector
from verl_shipper.collect.order import NAME, CollectOrder
from verl_shipper.logs import log_to_stderr

log = logging.getLogger("verl_shipper.collector")

TICK_S = 0.5  # also how late an event is heard
BEAT_BYTES_MAX = 4000  # one write to a pipe is whole up to 4096


def main() -> int:
    """Collect until told to stop."""
    leave_signals_to_the_daemon()
    order = CollectOrder.of(sys.stdin.buffer.readline())
    log_to_stderr(order.log_level, f"%(asctime)s %(levelname)s {NAME}: %(message)s")
    lock = take_lock(os.path.join(order.state_dir, "collect.lock"), NAME, order.beat_fd)
    if lock is None:
        return 0
    os._exit(_run(order))  # at once: a thread that hangs must not keep us


def _run(order: CollectOrder) -> int:
    code = 0
    try:
        collector = Collector(order)
        _turn(collector, order)
        collector.close()
    except sqlite3.Error as error:
        log.error("the collector's state takes nothing: %s; starting again", error)  # noqa: TRY400 - a line for a person
        code = 1
    except Exception:
        log.exception("starting the collector again")
        code = 1
    logging.shutdown()
    return code


def _turn(collector: Collector, order: CollectOrder) -> None:
    beat_at_s = 0.0
    began_ns = time.monotonic_ns()
    while True:
        is_busy = collector.turn()
        now_s = time.monotonic()
        if now_s >= beat_at_s:
            beat_at_s = now_s + BEAT_S
            _beat(order.beat_fd, collector)
        if order.ends and collector.settled_ns >= began_ns:
            return
        if told_to_stop(0.0 if is_busy else TICK_S):
            return


def _beat(fd: int, collector: Collector) -> None:
    settled_ns, problems = collector.settled_ns, collector.problems()
    line = json.dumps({"settled_ns": settled_ns, "problems": problems}).encode()
    while problems and len(line) > BEAT_BYTES_MAX:
        problems.pop()
        line = json.dumps({"settled_ns": settled_ns, "problems": problems}).encode()
    beat(fd, line + b"\n")


if __name__ == "__main__":
    sys.exit(main())
