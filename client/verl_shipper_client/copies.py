"""What becomes of a client that is copied: pickled for a DataLoader's worker, deep-copied with a module, sent by Ray.

    in the process it was made in, and in fork children of it   the very same client
    in any other process                                        a helper of the same run, one for all copies

A helper neither begins nor ends the run, has streams of its own from its first record on, and lives as long as its
process: Ray unpickles the same client again for every task.

Must not know: torch, Ray. On failure: nothing is opened here that could fail.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, TypeAlias

from verl_shipper_client.client import Client
from verl_shipper_spool.location import spool_dir

# project, experiment, run id, rank, world, spool, socket: all that travels.
Key: TypeAlias = tuple[str, str, str, int, int, "str | None", "str | None"]

EXIT_S = 0.1

_originals: weakref.WeakValueDictionary[Key, Client] = weakref.WeakValueDictionary()
_helpers: dict[Key, Client] = {}


class Helper(Client):
    """A client that adds to a run somebody else has begun; it begins nothing before its first record."""

    _starts_at_once = False

    def __init__(self, key: Key) -> None:
        project, experiment, run_id, rank, world, spool, socket = key
        super().__init__(project, experiment, None, run_id, rank, spool, socket, head=False, world=world)
        self._config = None  # as in a fork child: who has begun the run has told it

    def _at_exit(self) -> None:
        """A DataLoader waits for its workers at the end of an epoch; the spool keeps what no daemon has taken yet."""
        if not self._finished and self._streams is not None:
            self.finish(timeout_s=EXIT_S)


def pickled(client: Client, spool: str | os.PathLike[str] | None, socket: str | None) -> tuple[Any, ...]:
    """What `__reduce__` returns for a client with these arguments."""
    # Relative to a folder in which the other process is not.
    place = spool_dir(spool) if spool else None
    key: Key = (client.project, client.experiment, client.run_id, client.rank, client.world, place, socket)
    if key not in _helpers:
        _originals[key] = client
    return client_of, (key,)


def client_of(key: Key) -> Client:
    """The client behind a copy, in this process."""
    here = _originals.get(key)
    if here is not None:
        return here
    helper = _helpers.get(key)
    # Two threads may have come here at once; one of them wins.
    return helper if helper is not None else _helpers.setdefault(key, Helper(key))
