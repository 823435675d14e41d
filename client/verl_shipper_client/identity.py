"""Who this training process is: names, run id, rank and world size, from arguments, then variables.

    project  argument → VERL_PROJECT → none: the daemon's configuration names it, else "default"
    experiment   argument → VERL_EXPERIMENT → the same
    run id   argument → VERL_SHIPPER_RUN_ID → a fresh one
    rank     argument → the launcher's (launcher.py) → 0
    world    argument → the launcher's → 1

Must not know: sockets, spools. Never raises: a variable that is no number is no answer.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable

from verl_shipper_client import launcher
from verl_shipper_client.values import clean_text
from verl_shipper_spool.location import EXPERIMENT_VARIABLE, PROJECT_VARIABLE, RUN_ID_VARIABLE

RUN_ID_BYTES = 8
NAME_CHARS_MAX = 500  # MLflow's limit for an experiment name, the tightest of the trackers


def project_or_none(given: object) -> str:
    """The project's name; empty when nobody has named one."""
    return name(given) or name(os.environ.get(PROJECT_VARIABLE))


def experiment_or_none(given: object) -> str:
    return name(given) or name(os.environ.get(EXPERIMENT_VARIABLE))


def run_id_or_none(given: object) -> str:
    """The run's id where somebody has said it; empty when nobody has."""
    return name(given) or name(os.environ.get(RUN_ID_VARIABLE))


def run_id_or_new(given: object) -> str:
    """The run's id; a fresh one is 16 hexadecimal digits."""
    return run_id_or_none(given) or uuid.uuid4().hex[: 2 * RUN_ID_BYTES]


def run_id_of(facts: Iterable[str]) -> str:
    """The run id that everybody finds who knows the same facts."""
    text = "\n".join(facts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=RUN_ID_BYTES).hexdigest()


def rank_or_detect(given: object) -> int:
    found = launcher.number(given)
    return found if found is not None else launcher.detect().rank


def world_or_detect(given: object) -> int:
    found = launcher.number(given)
    return found if found is not None else launcher.detect().world


def name(given: object) -> str:
    """A name as text that every tracker's encoder takes; empty for None."""
    try:
        return "" if given is None else clean_text(str(given))[:NAME_CHARS_MAX].strip()
    except Exception:  # noqa: BLE001 - an object that cannot tell its text has no name
        return ""
