"""What a file's name says: its kind, its step, its purpose, a project and an experiment. Pure functions.

    12.jsonl                                          generations of step 12, as verl dumps them
    llm/grpo.jsonl                                    metrics of llm/grpo, as verl's `file` logger writes them
    actor_train_step12_rank0-of-8_….json.gz           a profiler's trace of step 12
    step_12/torch_memory_rank0_pid7.pickle            a memory snapshot of step 12

Must not know: disks.
"""

from __future__ import annotations

import re

from verl_shipper.values import visible
from verl_shipper_spool.file_parts import FILE, MEMORY, PROFILE

GENERATIONS, METRICS, AUTO, WHOLE = "generations", "metrics", "auto", "file"
KINDS = (AUTO, GENERATIONS, METRICS, WHOLE)
STEP_MAX = 2**63 - 1
_DUMP = re.compile(r"^(\d{1,19})\.jsonl$")
_STEP = re.compile(r"(?:^|[_\-.])step[_\-]?(\d{1,19})(?=[_\-.]|$)")
_TRACES = (".json.gz", ".json", ".nsys-rep")
_SNAPSHOTS = (".pickle",)
_UNFINISHED = (".tmp", ".part", ".partial", ".swp", "~")


def kind_of(name: str, wanted: str, *, is_named: bool) -> str | None:
    """As what a file of this name is taken by an entry of a kind; None: not at all. `is_named`: a pattern chose it."""
    if name.startswith(".") or name.endswith(_UNFINISHED):
        return None
    if wanted == WHOLE:
        return WHOLE if is_named or name.endswith((*_TRACES, *_SNAPSHOTS)) else None
    if wanted == METRICS:
        return METRICS if is_named or name.endswith(".jsonl") else None
    if wanted == GENERATIONS:
        return GENERATIONS if is_named or _DUMP.match(name) else None
    if _DUMP.match(name):
        return GENERATIONS
    if name.endswith(".jsonl"):
        return METRICS
    return WHOLE if name.endswith((*_TRACES, *_SNAPSHOTS)) else None


def dump_step(name: str) -> int | None:
    """Step of a dump of generations."""
    match = _DUMP.match(name)
    return _bounded(match[1]) if match else None


def step_in(path: str) -> int | None:
    """Step that a relative path tells, the file's name before its folders."""
    for part in reversed(path.split("/")):
        match = _STEP.search(part)
        if match:
            return _bounded(match[1])
    return None


def purpose_of(name: str) -> str:
    """As what trackers may show a file."""
    if name.endswith(_SNAPSHOTS):
        return MEMORY
    return PROFILE if name.endswith(_TRACES) else FILE


def is_plain_json(name: str) -> bool:
    """Whether a file becomes much smaller by compression."""
    return name.endswith(".json")


def names_in(path: str) -> tuple[str, str]:
    """Project and experiment of a `file` logger's path; what is no text in it is replaced visibly."""
    folder, _, name = path.rpartition("/")
    return visible(folder.rpartition("/")[2]), visible(name.removesuffix(".jsonl"))


def _bounded(digits: str) -> int | None:
    number = int(digits)
    return number if number <= STEP_MAX else None
