"""A client whose configuration comes after it: frameworks want to name a run before they tell its parameters.

Its run id is known at once; its start is recorded with its first record, or when it ends.

Must not know: frameworks. On failure: as a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_shipper_client.torch.distributed import DistributedClient


class LateClient(DistributedClient):
    """A `DistributedClient` that begins with its first record."""

    _starts_at_once = False

    def add_config(self, values: Mapping[str, Any]) -> bool:
        """More of the configuration. False when the run's start is recorded already."""
        with self._lock:
            if self._streams is not None:
                return False
            self._config = {**(self._config or {}), **values}
            return True
