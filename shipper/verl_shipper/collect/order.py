"""What a collector is told, and where its things are. Travels on stdin like a lane's order.

    <state_dir>/collect.sqlite3    what was taken (ledger.py)
    <state_dir>/collected/         streams of its own, adopted by the daemon
    <state_dir>/collect.lock       one collector per state folder

Must not know: files that are watched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from verl_shipper.config_watch import WatchEntry

NAME = "collector"


def ledger_path(state_dir: str) -> str:
    return os.path.join(state_dir, "collect.sqlite3")


def collected_dir(state_dir: str) -> str:
    return os.path.join(state_dir, "collected")


@dataclass(frozen=True, slots=True)
class CollectOrder:
    """`ends`: take what is there and end. `system_interval_s`: 0 for no samples of this node. The first three are
    known when there is a process to tell."""

    state_dir: str = ""
    beat_fd: int = -1
    log_level: str = ""
    watch: Sequence[WatchEntry] = ()
    system_interval_s: float = 0.0
    project: str = ""  # names for runs that have none
    experiment: str = ""
    ends: bool = False

    @property
    def module(self) -> str:
        """What runs it."""
        return "verl_shipper.collect.process"

    def line(self, _name: str, state_dir: str, _spool_dir: str, beat_fd: int, log_level: str) -> bytes:
        """As its process reads it."""
        told = replace(self, state_dir=state_dir, beat_fd=beat_fd, log_level=log_level)
        return json.dumps(asdict(told)).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> CollectOrder:
        values = json.loads(line)
        return cls(**{**values, "watch": [WatchEntry(**entry) for entry in values["watch"]]})
