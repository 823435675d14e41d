"""Ranks agree on a run id through the key-value store by which they have found each other.

    torchrun over several nodes   the store of its agents, at MASTER_ADDR:MASTER_PORT; no process group is needed
    else                          the store of the default process group

Whoever comes first puts an id there, and everybody takes what is there (compare_set). That is no collective: no rank
waits for another, one that never comes harms nobody, and a rank that alone makes a client disturbs no collective of
the training. A store outlives no restart of torchrun's workers; so each node notes the id beside its agent's files,
and proposes it again.

Never raises. Waits at most STORE_S for a store that does not answer, then nothing is agreed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from verl_shipper_client import identity, launcher
from verl_shipper_client.launcher import safely

STORE_S = 20.0  # a store is there before its ranks are; this long only when it is gone or its host is
ID_CHARS_MAX = 64
_KEY = "verl_shipper/run/"
_NOTE = "verl-shipper-run-"


def run_id(names: tuple[str, str], *, of_torchrun: bool) -> str:
    """What the ranks have agreed on for these names; empty when they cannot."""
    key = identity.run_id_of(names)
    found = ""
    if of_torchrun and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        noted = _noted(key)
        mine = noted or identity.run_id_or_new(None)
        found = _within(STORE_S, lambda: _take(_agents_store(), key, mine))
        if found and found != noted:
            safely(lambda: _note(key, found))
    return found or _within(STORE_S, lambda: _take(_group_store(), key, identity.run_id_or_new(None)))


def _take(store: Any, key: str, mine: str) -> str:
    """The id in the store: mine, when none was there."""
    if store is None:
        return ""
    text: str = store.compare_set(_KEY + key, "", mine).decode("utf-8", "replace")
    return identity.name(text)[:ID_CHARS_MAX]


def _agents_store() -> Any:
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_S), wait_for_workers=False)


def _group_store() -> Any:
    """The default process group's store: torch shows it to nobody, and keeps it at the same place since 1.8."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return module._get_default_store() if module is not None and module.is_initialized() else None  # noqa: SLF001


def _within(timeout_s: float, act: Callable[[], str]) -> str:
    """What `act` returns in time; empty when it fails or takes longer. It may go on in its thread."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(safely(act) or ""), name="verl-shipper-id", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else ""


def _note(key: str, found: str) -> None:
    """Keep the id for the workers that this node's agent starts after a failure."""
    folder = launcher.agent_folder()
    temporary = os.path.join(folder, f"{_NOTE}{key}.{os.getpid()}")
    if folder:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(found)
        os.replace(temporary, os.path.join(folder, _NOTE + key))


def _noted(key: str) -> str:
    def read() -> str:
        with open(os.path.join(launcher.agent_folder() or "/", _NOTE + key), encoding="utf-8") as file:
            return identity.name(file.read(ID_CHARS_MAX))

    return safely(read) or ""
