"""What a command beside the daemon names by itself, and what is put into its environment.

    … trainer.logger='["console","mlflow"]' …     mlflow is where its records go, when nobody has named a backend
    VERL_SHIPPER_TAKEOVER=1                       its trackers are shipped, not called: that is why it runs beside us
    VERL_USE_EXTERNAL_MODULES=…                   for a verl that does not find the plugin by itself

A value that is in the environment already stands. Must not know: processes, backends. Nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import metadata

from verl_shipper_spool.location import TAKEOVER_VARIABLE
from verl_shipper_spool.verl_names import (
    MODULES_SINCE,
    MODULES_VARIABLE,
    PLUGIN_MODULE,
    PLUGIN_NAME,
    PLUGINS_SINCE,
    version_of,
)

LOGGER_ARGUMENT = re.compile(r"^\+{0,2}trainer\.logger=(.*)$", re.DOTALL)
OWN = (PLUGIN_NAME, "console")  # the trainer prints its own lines


def trackers_in(command: Sequence[str]) -> list[str]:
    """Backends of ours among the trackers that a command's own arguments name."""
    from verl_shipper.backends import known_names

    given = [match[1] for match in map(LOGGER_ARGUMENT.match, command) if match]
    names = [name.strip(" \t\"'") for name in given[-1].strip("[] \t").split(",")] if given else []
    known = known_names()
    return list(dict.fromkeys(name for name in names if name in known and name not in OWN))


def additions(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that let a command's verl ship its records."""
    added = {} if environment.get(TAKEOVER_VARIABLE) else {TAKEOVER_VARIABLE: "1"}
    modules = [name for name in environment.get(MODULES_VARIABLE, "").split(",") if name]
    if MODULES_SINCE <= verl_version() < PLUGINS_SINCE and PLUGIN_MODULE not in modules:
        added[MODULES_VARIABLE] = ",".join([*modules, PLUGIN_MODULE])
    return added


def verl_version() -> tuple[int, ...]:
    """The version of verl in our own environment; empty when it has none."""
    try:
        return version_of(metadata.version("verl"))
    except metadata.PackageNotFoundError:
        return ()
