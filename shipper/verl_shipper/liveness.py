"""Does the writer of a stream still live? Decides only when a run counts as ended and its folder may go.

    same boot, same pid namespace      the process with that pid and start time exists, or not: certain
    same node, another boot            gone, once silent for REBOOTED_AGE_S: two hosts may share a name
    anything else (container, host)    by heartbeat, the youngest modification in its folder: silent for DEAD_AGE_S

Must not know: spools, sockets. Never raises.
"""

from __future__ import annotations

import enum
import os

from verl_shipper_spool.header import Process, process_stat, start_ticks

REBOOTED_AGE_S = 60.0  # several missed beats
DEAD_AGE_S = 24 * 3600.0  # a writer we cannot see beats every 10 s; a day of silence is no pause


class Life(enum.Enum):
    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


def judge(writer: Process, here: Process, silent_s: float) -> Life:
    """`here` is the judging process; `silent_s` the age of the folder's youngest modification."""
    if writer.node == here.node and writer.boot_id and here.boot_id and writer.boot_id != here.boot_id:
        return Life.GONE if silent_s > REBOOTED_AGE_S else Life.UNKNOWN
    if writer.boot_id == here.boot_id and writer.pid_namespace == here.pid_namespace and writer.pid_namespace:
        ticks = start_ticks(writer.pid)
        same = ticks != 0 and (writer.start_ticks in (0, ticks)) and not _is_zombie(writer.pid)
        return Life.ALIVE if same else Life.GONE
    return Life.GONE if silent_s > DEAD_AGE_S else Life.UNKNOWN


def silent_s(folder: str, now_s: float) -> float:
    """Seconds since anything in a stream folder was modified; 0 when it cannot be told."""
    youngest = 0.0
    try:
        for entry in os.scandir(folder):
            youngest = max(youngest, entry.stat().st_mtime)
    except OSError:
        return 0.0
    return max(now_s - youngest, 0.0) if youngest else 0.0


def _is_zombie(pid: int) -> bool:
    """A process that ended but was not waited for writes no more."""
    return process_stat(pid)[:1] in ([], ["Z"])
