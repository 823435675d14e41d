"""Registry of backends: name → module and class, loaded only when a lane needs it.

Third parties add theirs through the entry-point group `verl_shipper.backends`; a name here wins.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from verl_shipper.backends.base import Backend
from verl_shipper.errors import ConfigError

ENTRY_POINT_GROUP = "verl_shipper.backends"

BUILT_IN = {
    "console": "verl_shipper.backends.console:ConsoleBackend",
    "file": "verl_shipper.backends.file:FileBackend",
    "mlflow": "verl_shipper.backends.mlflow:MlflowBackend",
    "otlp": "verl_shipper.backends.otlp:OtlpBackend",
    "swanlab": "verl_shipper.backends.swanlab:SwanlabBackend",
    "trackio": "verl_shipper.backends.trackio:TrackioBackend",
    "wandb": "verl_shipper.backends.wandb:WandbBackend",
}


def known_names() -> list[str]:
    """All names that `load_backend` accepts."""
    return sorted(BUILT_IN.keys() | {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})


def load_backend(name: str) -> type[Backend]:
    """Class of a backend. Raises ConfigError for an unknown name or a package that is not installed."""
    target = BUILT_IN.get(name)
    if target is None:
        for entry in entry_points(group=ENTRY_POINT_GROUP):
            if entry.name == name:
                return _checked(name, entry.load())
        raise ConfigError(f"unknown backend {name!r}", hint=f"known backends: {', '.join(known_names())}")
    module_name, _, class_name = target.partition(":")
    return _checked(name, getattr(importlib.import_module(module_name), class_name))


def _checked(name: str, loaded: object) -> type[Backend]:
    if isinstance(loaded, type) and issubclass(loaded, Backend):
        return loaded
    raise ConfigError(f"backend {name!r} is not a Backend class: {loaded!r}")
