"""A lane and its SDK do not grow with what went through them. A whole day is benchmarks/lane_memory.py's business."""

from __future__ import annotations

import os

from support.daemon import Daemon
from support.four_trackers import FourTrackers
from support.processes import command_line, descendants, rss_bytes
from support.site import Site
from support.trainer import run_script

STEPS = 20_000 if os.environ.get("VERL_SHIPPER_TEST_LONG") else 4_000
GROWTH_BYTES_MAX = 40_000_000  # measured: 1 MB in 100,000 rows; the helper breathes by 30
TRAINER = """
from verl_shipper_client import Client
import sys
with Client(sys.argv[1], "memory", run_id="memory") as client:
    for step in range(int(sys.argv[2])):
        client.log({f"actor/metric_{n:03}/mean": step + n / 7 for n in range(100)}, step)
"""


def memory_bytes(daemon: Daemon) -> int:
    """Of the lane, the SDK's process and its helper."""
    parts = ("lane_process", "wandb_child", "wandb-core")
    return sum(rss_bytes(pid) for pid in descendants(daemon.pid) if any(part in command_line(pid) for part in parts))


def wait_delivered(daemon: Daemon, rows: int) -> bool:
    """Wait for so many rows; whether there is more to do."""
    status = daemon.wait_until(lambda told: told["backends"]["wandb"]["delivered"] >= rows, 300, f"{rows} delivered")
    return bool(status["backends"]["wandb"]["pending"])


def test_thousands_of_rows_through_the_wandb_lane_leave_its_memory_as_it_was(site: Site) -> None:
    with FourTrackers(site, names=("wandb",)) as trackers:
        trackers.put_key("wandb")
        run_script(site, TRAINER, trackers.project, STEPS)
        with trackers.daemon() as daemon:
            looks = [
                memory_bytes(daemon) if wait_delivered(daemon, int(STEPS * part)) else 0 for part in (0.4, 0.6, 0.8)
            ]
            assert all(looks), "every look must find it at work"
    print(f"memory in MB: {[round(look / 1e6) for look in looks]}")
    assert max(looks) - looks[0] < GROWTH_BYTES_MAX
