"""A lane in a process of its own, as `verl_shipper.lane_process` runs one, that may be told to kill itself.

First line on stdin: what to do, as JSON (bench.LaneProcess). Ends at the end of stdin.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

from verl_shipper.backends import load_backend
from verl_shipper.backends.base import Batch, Delivered, Outcome
from verl_shipper.lane import Lane
from verl_shipper.lane_process import BUSY_TICK_S, STOP_GRACE_S
from verl_shipper.lane_store import LaneStore


def main() -> None:
    order = json.loads(sys.stdin.buffer.readline())
    loaded: Any = load_backend(order["backend"])

    class Doomed(loaded):  # type: ignore[misc]
        def upload(self, batch: Batch) -> Outcome:
            outcome: Outcome = super().upload(batch)
            if order["kill_accepted"] and isinstance(outcome, Delivered):
                os.kill(os.getpid(), signal.SIGKILL)
            return outcome

    lane = Lane(Doomed, order["settings"], order["spool_dir"], LaneStore(order["store"]))
    while not select.select([sys.stdin], [], [], BUSY_TICK_S)[0]:
        lane.tick(time.monotonic())
    lane.close(STOP_GRACE_S)
    os._exit(0)  # at once: a thread that hangs must not keep us


if __name__ == "__main__":
    main()
