"""Watched folders and the node's own facts in the configuration: their keys, and an entry of `watch` as a value.

    watch:
      - {path: /data/rollouts, kind: generations}
      - {path: /data/validations, kind: generations, table: validation}
      - {path: /data/logs, kind: metrics, recursive: yes}
      - {path: outputs/profile, kind: file, recursive: yes}
    system_metrics: {enabled: yes, interval_s: 15}

Must not know: what is in the folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl_shipper.policy.file_names import AUTO, KINDS
from verl_shipper.schema import Key, Kind
from verl_shipper_spool.file_parts import FILE, MEMORY, PROFILE

SECTION = "watch"
SHIP, SKIP = "ship", "skip"
ROLLOUTS = "rollouts"
VALIDATION = "validation"  # the table without a name: what a trainer's own validation logs
STABLE_S = 5.0
POLL_S = 2.0
SYSTEM_INTERVAL_S = 15.0
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class WatchEntry:
    """One entry of `watch`. Fields are its keys; empty texts stand for what was not given."""

    path: str
    kind: str = AUTO
    project: str = ""
    experiment: str = ""
    run_id: str = ""
    rank: int = 0
    recursive: bool = False
    table: str = ROLLOUTS
    purpose: str = ""
    existing: str = SHIP
    stable_s: float = STABLE_S
    poll_s: float = POLL_S

    @property
    def key(self) -> str:
        """What stays of it when the rest is changed."""
        return f"{self.kind}:{self.path}"

    @property
    def table_name(self) -> str:
        return "" if self.table == VALIDATION else self.table

    def given(self) -> dict[str, Any]:
        """What is not as it would be anyway, for people."""
        default = WatchEntry(self.path)
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name == "path" or getattr(self, each.name) != getattr(default, each.name)
        }


def entry_of(values: Mapping[str, Any]) -> WatchEntry:
    """An entry of checked values. Relative paths are the daemon's."""
    return WatchEntry(**{**values, "path": os.path.abspath(os.path.expanduser(values["path"]))})


def is_within(entry: WatchEntry, folder: str) -> bool:
    """Whether files in folders below `folder` may be files of an entry."""
    base, pattern = base_of(entry.path)
    reaches_down = entry.recursive or len(pattern) > 1
    return f"{base}/".startswith(f"{folder}/") or (reaches_down and f"{folder}/".startswith(f"{base}/"))


def base_of(path: str) -> tuple[str, list[str]]:
    """The folder that a path names without a pattern, and the pattern below it."""
    parts = path.split("/")
    for index, part in enumerate(parts):
        if _MAGIC.search(part):
            return "/".join(parts[:index]) or "/", [each for each in parts[index:] if each]
    return path, []


WATCH = (
    Key(
        "path",
        Kind.PATH,
        "a folder, a file, or a pattern with `*`, `?`, `[…]` and `**`",
        "where a program leaves its files",
        "/data/rollouts",
        otherwise="must be given",
    ),
    Key(
        "kind",
        Kind.CHOICE,
        "what the files are: `generations` are dumps `{step}.jsonl`, `metrics` the `file` logger's lines, `file` "
        "traces and snapshots; `auto` goes by each name",
        "a name alone may mislead",
        "generations",
        default=AUTO,
        choices=KINDS,
    ),
    Key("project", Kind.TEXT, "project of the run", "finds the run", "llm_rlhf", otherwise="see the page"),
    Key("experiment", Kind.TEXT, "experiment of the run", "same", "qwen2-7b-grpo", otherwise="see the page"),
    Key("run_id", Kind.TEXT, "the run", "where names do not tell it", "a1b2c3", otherwise="see the page"),
    Key("rank", Kind.COUNT, "whose records they are", "sampling goes by rank", "3", default=0, low=0, high=2**31 - 1),
    Key(
        "recursive",
        Kind.FLAG,
        "folders below it, too; links to folders are not followed",
        "profilers make a folder per step or replica",
        "yes",
        default=False,
    ),
    Key(
        "table",
        Kind.TEXT,
        "name of the table that generations go to; `validation` is the one that a trainer's validations go to, and is "
        "sampled like them",
        "rollouts of every step shall not replace validations",
        "validation",
        default=ROLLOUTS,
    ),
    Key(
        "purpose",
        Kind.CHOICE,
        "as what trackers show a file",
        "for names that do not tell it",
        "memory",
        otherwise="by the name",
        choices=(PROFILE, MEMORY, FILE),
    ),
    Key(
        "existing",
        Kind.CHOICE,
        "what becomes of files that are there when the entry is first seen",
        "a folder may hold a year of old ones",
        "skip",
        default=SHIP,
        choices=(SHIP, SKIP),
    ),
    Key(
        "stable_s",
        Kind.NUMBER,
        "a file that is written whole is taken when it has not changed for so long, or its successor has appeared",
        "nobody says when a file is complete; a slow disk may pause for seconds",
        "30",
        default=STABLE_S,
        unit="seconds",
        low=0.1,
        high=86400,
    ),
    Key(
        "poll_s",
        Kind.NUMBER,
        "how often to look; file events only hasten it",
        "network file systems have no events",
        "10",
        default=POLL_S,
        unit="seconds",
        low=0.1,
        high=3600,
    ),
)

SYSTEM = (
    Key(
        "system_metrics.enabled",
        Kind.FLAG,
        "whether GPUs, CPU, memory, disks and network of this node are shown with every run on it",
        "one sampler per node instead of one per rank",
        "no",
        default=True,
    ),
    Key(
        "system_metrics.interval_s",
        Kind.NUMBER,
        "how often",
        "trackers' own samplers take 10 to 15",
        "60",
        default=SYSTEM_INTERVAL_S,
        unit="seconds",
        low=1,
        high=3600,
    ),
)
