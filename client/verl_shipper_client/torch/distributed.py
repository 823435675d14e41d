"""One run for all ranks of a job: who this rank is, and which run they all mean.

    rank, world   arguments → an initialised process group → the launcher (launcher.py) → one rank
    run id        argument → VERL_SHIPPER_RUN_ID → made of what the launcher has told all ranks → the store through
                  which the ranks have found each other → a fresh one

A process group comes before the launcher since it may have more ranks: mp.spawn in each task of Slurm. The names of
project and experiment go into the id: they tell several runs of one job apart. Rank 0 begins and ends the run.

Must not know: spools, records. Never raises, never waits longer than agreement.py says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl_shipper_client import identity, launcher
from verl_shipper_client.client import Client
from verl_shipper_client.launcher import Place, safely
from verl_shipper_client.torch import agreement


class DistributedClient(Client):
    """A `Client` of which every rank of a job makes one: all of them are one run.

    Arguments as for `Client`; what is not given is found out. Rank 0 begins and ends the run, the others add to it.
    Made again under the same names, by any rank or by a later start of the same job, it continues the run; where no
    launcher has started this process, each is a run of its own, as with `Client`.
    """

    def __init__(
        self,
        project: str | None = None,
        experiment: str | None = None,
        config: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        rank: int | None = None,
        spool_dir: str | os.PathLike[str] | None = None,
        socket: str | None = None,
        world: int | None = None,
    ) -> None:
        found = safely(place) or Place()
        given_rank, given_world = launcher.number(rank), launcher.number(world)
        rank = found.rank if given_rank is None else given_rank
        world = found.world if given_world is None else given_world
        names = identity.project_or_none(project), identity.experiment_or_none(experiment)
        run_id = identity.run_id_or_none(run_id) or safely(lambda: _agreed_id(found, names)) or None
        if run_id is None and world > 1:
            _tell_alone(rank, world)
        super().__init__(project, experiment, config, run_id, rank, spool_dir, socket, head=rank == 0, world=world)


def place() -> Place:
    """Where this process stands. A process group that says otherwise than the launcher is believed."""
    told = launcher.detect()
    group: Any = sys.modules.get("torch.distributed")
    if group is None or not (group.is_available() and group.is_initialized()):
        return told
    rank, world = int(group.get_rank()), int(group.get_world_size())
    # Ranks may be numbered anew; of another size, the group is not what the launcher has started.
    return replace(told, rank=rank) if told.world == world else Place(rank=rank, world=world)


def _agreed_id(found: Place, names: tuple[str, str]) -> str:
    """The run id that all ranks come to; empty when they have no way to."""
    facts = launcher.shared_facts(found)
    if facts:
        return identity.run_id_of((*facts, *names))
    return agreement.run_id(names, of_torchrun=found.launcher == launcher.TORCHRUN) if found.world > 1 else ""


def _tell_alone(rank: int, world: int) -> None:
    text = (
        f"verl-shipper: rank {rank} of {world} logs to a run of its own: neither a launcher nor a process group says"
        " which run they share. Make the client after init_process_group, or give all ranks one VERL_SHIPPER_RUN_ID\n"
    )
    safely(lambda: sys.stderr.write(text))
