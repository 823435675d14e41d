"""The process of a lane: `python -m verl_shipper.lane_process`, started by the supervisor only.

    stdin    first line: LaneOrder as JSON; then "stop", or the end of file when the daemon is gone
    beat fd  one line a second while the loop turns; silence means hung

Promises: one lane per backend and state folder (a lock outlives a daemon that was killed); ends by itself when its
daemon does. Exit codes: 0 stopped, 75 an upload hangs, 1 anything else; the supervisor starts it again.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from verl_shipper.backends import load_backend
from verl_shipper.backends.base import Backend
from verl_shipper.child_process import BEAT_S, beat, leave_signals_to_the_daemon, take_lock, told_to_stop
from verl_shipper.errors import ShipperError
from verl_shipper.lane import HungUploadError, Lane
from verl_shipper.lane_intake import Order
from verl_shipper.lane_store import LaneStore
from verl_shipper.logs import log_to_stderr
from verl_shipper_spool.location import UNNAMED

log = logging.getLogger("verl_shipper.lane")

EXIT_HUNG = 75
TICK_S = 0.05
BUSY_TICK_S = 0.005
STOP_GRACE_S = 3.0  # uploads under way may end; the rest stays in the outbox


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """What a lane is told. Travels on stdin, never in arguments: settings may hold secrets."""

    backend: str
    settings: dict[str, Any]
    state_dir: str
    spool_dir: str
    beat_fd: int
    log_level: str
    sampling: dict[str, Any] = field(default_factory=dict)  # what an operator chose, see policy/sampling.py
    run_may_choose: list[str] = field(default_factory=list)  # what a run's own configuration may add to it
    backends: list[str] = field(default_factory=list)  # all lanes of this daemon
    project: str | None = None  # names for runs that have none
    experiment: str | None = None
    release_idle_s: float | None = None  # the last step of a silent run is let go after so long (None: at its end)

    def to_line(self) -> bytes:
        return json.dumps(asdict(self), default=str).encode() + b"\n"


def store_path(state_dir: str, backend: str) -> str:
    return os.path.join(state_dir, "lanes", f"{backend}.sqlite3")


def main() -> int:
    """Run one lane until told to stop."""
    leave_signals_to_the_daemon()
    order = LaneOrder(**json.loads(sys.stdin.buffer.readline()))
    log_to_stderr(order.log_level, f"%(asctime)s %(levelname)s lane {order.backend}: %(message)s")
    try:
        lock = take_lock(store_path(order.state_dir, order.backend) + ".lock", f"lane {order.backend}", order.beat_fd)
        backend_class = load_backend(order.backend)
    except ShipperError as error:
        log.error("%s", error.line())  # noqa: TRY400 - a line for a person, not a traceback
        return error.exit_code
    if lock is None:
        return 0
    os._exit(_run(order, backend_class))  # at once: a thread that hangs must not keep us


def _run(order: LaneOrder, backend_class: type[Backend]) -> int:
    """Turn the lane to its end; returns the exit code."""
    code = 0
    try:
        store = LaneStore(store_path(order.state_dir, order.backend))
        sampling = Order(
            order.backend, order.sampling, tuple(order.run_may_choose), tuple(order.backends), order.release_idle_s
        )
        unnamed = (order.project or UNNAMED, order.experiment or UNNAMED)
        lane = Lane(backend_class, order.settings, order.spool_dir, store, sampling, unnamed)
        _turn(lane, order.beat_fd)
        lane.close(STOP_GRACE_S)
    except HungUploadError as error:
        log.error("%s; starting the lane again", error)  # noqa: TRY400 - same
        code = EXIT_HUNG
    except sqlite3.Error as error:
        log.error("the lane's state takes nothing: %s; starting the lane again", error)  # noqa: TRY400 - same
        code = 1
    except Exception:
        log.exception("starting the lane again")
        code = 1
    logging.shutdown()
    return code


def _turn(lane: Lane, beat_fd: int) -> None:
    beat_at_s = 0.0
    while True:
        now_s = time.monotonic()
        moved = lane.tick(now_s)
        if now_s >= beat_at_s:
            beat_at_s = now_s + BEAT_S
            beat(beat_fd)
        if told_to_stop(BUSY_TICK_S if moved or lane.uploading else TICK_S):
            return


if __name__ == "__main__":
    sys.exit(main())
