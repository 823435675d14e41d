"""A Memory that a test can look into. Keeps its promises: what was put stays, and only plain values go in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class FakeMemory:
    """Obeys `verl_shipper.backends.base.Memory`. A backend that dies and is made anew gets the same object again."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def get(self, key: str) -> Any:
        text = self._texts.get(key)
        return None if text is None else json.loads(text)

    def put(self, key: str, value: Any) -> None:
        # A round trip through JSON: a value that a state file could not keep is the backend's bug.
        self._texts[key] = json.dumps(value)

    def remember(self, notes: Mapping[str, Any]) -> None:
        """What the lane does with `Delivered.remember`."""
        for key, value in notes.items():
            self.put(key, value)
