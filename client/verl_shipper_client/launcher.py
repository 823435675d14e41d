"""Which job this process is a part of: its rank, the number of ranks, and facts that all ranks of this job share.

    torchrun   TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE
    Ray        in a Ray worker: Ray Train's context, else RANK and WORLD_SIZE. What `ray start` inherited is not ours
    env        RANK, WORLD_SIZE: deepspeed, Kubernetes operators, scripts
    MPI        OMPI_COMM_WORLD_RANK, …_SIZE; MV2_COMM_WORLD_RANK, …_SIZE; PMI_RANK, PMI_SIZE
    Slurm      SLURM_PROCID, SLURM_NTASKS, in a step of srun: the shell of salloc and a batch script are told of all
               tasks, and are one process

The innermost launcher comes first. Rank and size are believed together, or not at all; a rank whose size nobody knows
stays a rank of one. A fact is of no use unless all ranks have it and no other job ever has: a port, a pid, torchrun's
default id come again. So on one node the launcher's own process is the fact, as a pid with its start time; across
nodes, Slurm's job and step, Ray's session and job. Where there is no such fact, ranks have to ask each other.

Must not know: torch, sockets, spools. Never raises: a variable that is no number is no answer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl_shipper_spool.header import parent_of, pid_namespace, start_ticks, this_process

RANK_MAX = 2**31 - 1
TORCHRUN, RAY, ENV, MPI, SLURM = "torchrun", "ray", "env", "mpi", "slurm"
TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # <agent's own folder>/attempt_<n>/<local rank>/error.json
# Numbers of steps that srun gives; those above are Slurm's own: batch scripts, shells of salloc.
STEP_ID_MAX = 0xFFFF_FFF0
ANCESTORS_MAX = 64

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Row:
    """Variables of one launcher: a rank, sizes (the first that is a number counts), and ranks on this node."""

    launcher: str
    rank: str
    world: tuple[str, ...]
    local_world: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


ROWS = (
    Row(TORCHRUN, "RANK", ("WORLD_SIZE",), ("LOCAL_WORLD_SIZE",), (TORCHRUN_ID,)),
    Row(ENV, "RANK", ("WORLD_SIZE",), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),
    Row(MPI, "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    Row(MPI, "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    Row(MPI, "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALNRANKS",)),
    Row(SLURM, "SLURM_PROCID", ("SLURM_NTASKS",), (), ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
RANK_VARIABLES = tuple(dict.fromkeys(row.rank for row in ROWS))
WORLD_VARIABLES = tuple(dict.fromkeys(name for row in ROWS for name in row.world))


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the ranks of its job. `launcher` is empty when none is there, or only half of one."""

    launcher: str = ""
    rank: int = 0
    world: int = 1
    row: Row | None = field(default=None, repr=False)


def detect() -> Place:
    """The place that the innermost launcher gives this process."""
    if (row := ROWS[0]) and (place := _place(row)) is not None:
        return place
    if is_ray_worker():
        return _ray_place()
    for row in ROWS[1:]:
        if (place := _place(row)) is not None:
            return place
    ranks = (number(os.environ.get(row.rank)) for row in ROWS)
    return Place(rank=next((rank for rank in ranks if rank is not None), 0))


def shared_facts(place: Place) -> tuple[str, ...]:
    """What all ranks of this job know without asking, and nobody else ever; empty when there is nothing like that."""
    return safely(lambda: _facts(place)) or ()


def agent_facts() -> tuple[str, ...]:
    """The torchrun process of this node, over all restarts of its workers; empty when it cannot be told."""
    folder = agent_folder()
    return (this_process().boot_id, folder) if folder else _starter(ROWS[0])


def agent_folder() -> str:
    """The folder that torchrun's process of this node has made for itself; empty when it has none."""
    path = os.environ.get(ERROR_FILE, "")
    folder, attempt = os.path.split(os.path.dirname(os.path.dirname(path)))
    return folder if os.path.isabs(folder) and attempt.startswith("attempt_") else ""


def is_ray_worker() -> bool:
    """Whether this process runs Ray's tasks or is an actor. Ray is never imported for the question."""
    ray: Any = sys.modules.get("ray")
    if ray is None:
        return False
    return bool(safely(lambda: ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE))


def number(text: object) -> int | None:
    """A rank or a number of ranks; None for anything else."""
    try:
        value = int(text)  # type: ignore[call-overload]
        return int(value) if 0 <= value <= RANK_MAX else None
    except Exception:  # noqa: BLE001 - any object may be given
        return None


def safely(act: Callable[[], _T]) -> _T | None:
    """What `act` returns; None when it fails: what cannot be asked has no answer."""
    try:
        return act()
    except Exception:  # noqa: BLE001 - other people's packages, of any version
        return None


def _place(row: Row) -> Place | None:
    """The place that one launcher gives, if it is whole."""
    if not all(os.environ.get(name) for name in row.needs):
        return None
    rank, world = number(os.environ.get(row.rank)), _first(row.world)
    if rank is None or world is None:
        return None
    if row.launcher == SLURM:
        if not _in_step():
            return None
        world = max(world, rank + 1)  # a step over several jobs counts ranks over all of them
    if rank >= world:
        return None
    return Place(row.launcher, rank, world, row)


def _in_step() -> bool:
    step = number(os.environ.get("SLURM_STEP_ID"))
    return step is not None and step < STEP_ID_MAX


def _ray_place() -> Place:
    context = _train_context()
    rank, world = (safely(getattr(context, name, int)) for name in ("get_world_rank", "get_world_size"))
    found = _place(ROWS[1])
    if context is not None and rank is not None and world:
        return Place(RAY, rank, world)
    return Place(RAY, found.rank, found.world) if found is not None else Place()


def _train_context() -> Any:
    """Ray Train's context in one of its workers, else None."""
    train: Any = sys.modules.get("ray.train")
    context = safely(train.get_context) if train is not None else None
    # Outside of its workers there is a context, too, of nobody.
    return context if context is not None and safely(context.get_world_size) else None


def _facts(place: Place) -> tuple[str, ...]:
    row = place.row
    if place.launcher == RAY:
        return _ray_facts()
    if row is None:
        return ()
    if place.launcher == SLURM:
        # A step of one task is often somebody's shell, in which many trainings begin.
        names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")
        return (SLURM, *(os.environ.get(name, "") for name in names)) if place.world > 1 else ()
    if _first(row.local_world) != place.world:
        return ()
    facts = agent_facts() if place.launcher == TORCHRUN else _starter(row)
    return (place.launcher, *facts) if facts else ()


def _ray_facts() -> tuple[str, ...]:
    ray: Any = sys.modules.get("ray")
    context = ray.get_runtime_context()
    session, job = context.get_session_name(), context.get_job_id()
    if not session or not job:
        return ()
    train = _train_context()
    # Several trainings may run in one job of Ray: Tune's trials do.
    names = [safely(getattr(train, name, str)) or "" for name in ("get_experiment_name", "get_trial_id")]
    return (RAY, str(session), str(job), *map(str, names))


def _starter(row: Row) -> tuple[str, ...]:
    """The process that has started this node's ranks: the nearest above us that has not our variables itself.

    A wrapper script between the two inherits them. Empty when we did not get them from above, or cannot see that far.
    """
    names = (row.rank, *row.world, *row.local_world)
    ours = _environment("self", names)
    if not ours:
        return ()
    pid = os.getppid()
    for _ in range(ANCESTORS_MAX):
        if pid <= 0:
            return ()
        if _environment(pid, names) != ours:
            ticks = start_ticks(pid)
            return (this_process().boot_id, pid_namespace(), str(pid), str(ticks)) if ticks else ()
        pid = parent_of(pid)
    return ()


def _environment(pid: int | str, names: Iterable[str]) -> dict[str, str]:
    """Some variables a process began with; none when it is not ours to look at."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            content = file.read()
    except OSError:
        return {}
    wanted = set(names)
    pairs = (line.partition(b"=") for line in content.split(b"\0"))
    return {name: os.fsdecode(value) for key, _, value in pairs if (name := os.fsdecode(key)) in wanted}


def _first(names: Iterable[str]) -> int | None:
    found = (number(os.environ.get(name)) for name in names)
    return next((value for value in found if value is not None), None)
