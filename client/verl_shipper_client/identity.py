"""Who this training process is: names, run id, rank and world size, from arguments, then variables.

    project  argument → VERL_PROJECT → none: the daemon's configuration names it, else "default"
    experiment   argument → VERL_EXPERIMENT → the same
    run id   argument → VERL_SHIPPER_RUN_ID → a fresh one
    rank     argument → RANK (torchrun) → SLURM_PROCID → OMPI_COMM_WORLD_RANK → PMI_RANK → 0
    world    argument → WORLD_SIZE → SLURM_NTASKS → OMPI_COMM_WORLD_SIZE → PMI_SIZE → 1

Must not know: sockets, spools. Never raises: a variable that is no number is no answer.
"""

from __future__ import annotations

import os
import uuid

from verl_shipper_client.values import clean_text
from verl_shipper_spool.location import EXPERIMENT_VARIABLE, PROJECT_VARIABLE, RUN_ID_VARIABLE

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
RANK_MAX = 2**31 - 1
NAME_CHARS_MAX = 500  # MLflow's limit for an experiment name, the tightest of the trackers


def project_or_none(given: object) -> str:
    """The project's name; empty when nobody has named one."""
    return name(given) or name(os.environ.get(PROJECT_VARIABLE))


def experiment_or_none(given: object) -> str:
    return name(given) or name(os.environ.get(EXPERIMENT_VARIABLE))


def run_id_or_new(given: object) -> str:
    """The run's id; a fresh one is 16 hexadecimal digits."""
    return name(given) or name(os.environ.get(RUN_ID_VARIABLE)) or uuid.uuid4().hex[:16]


def rank_or_detect(given: object) -> int:
    number = _number(given)
    return number if number is not None else _first(RANK_VARIABLES, 0)


def world_or_detect(given: object) -> int:
    number = _number(given)
    return number if number is not None else _first(WORLD_VARIABLES, 1)


def name(given: object) -> str:
    """A name as text that every tracker's encoder takes; empty for None."""
    try:
        return "" if given is None else clean_text(str(given))[:NAME_CHARS_MAX].strip()
    except Exception:  # noqa: BLE001 - an object that cannot tell its text has no name
        return ""


def _first(variables: tuple[str, ...], default: int) -> int:
    for variable in variables:
        number = _number(os.environ.get(variable))
        if number is not None:
            return number
    return default


def _number(text: object) -> int | None:
    try:
        number = int(text)  # type: ignore[call-overload]
        return int(number) if 0 <= number <= RANK_MAX else None
    except Exception:  # noqa: BLE001 - any object may be given
        return None
