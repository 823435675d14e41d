"""The configuration as it is in effect: every key, its value and where that comes from. Secrets are masked.

    backends:
      file:
        dir: /data/records  # jobs.yaml:3
        sampling:
          log_frequency: 100  # --set sampling.log_frequency=100

Must not know: how values were found. On failure: ConfigError for places that cannot work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_shipper.config import Config
from verl_shipper.config_keys import RUN_MAY_CHOOSE, SAMPLING, TOP, TRAINER
from verl_shipper.config_tree import backend_keys
from verl_shipper.config_watch import SECTION, SYSTEM
from verl_shipper.schema import Key
from verl_shipper_spool.redact import REDACTED, redact

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Shown:
    """One key that is in effect."""

    path: str
    value: Any
    origin: str


def effective(config: Config) -> list[Shown]:
    """Everything that is in effect, section by section."""
    return [
        _masked(shown)
        for shown in (*_top(config), *_collected(config), *_sampling(config), *_backends(config), *_trainer(config))
    ]


def lines_of(shown: Iterable[Shown]) -> Iterator[str]:
    """YAML, a line per key with its origin as a comment."""
    before: list[str] = []
    for each in shown:
        *sections, name = each.path.split(".")
        same = 0
        while same < min(len(sections), len(before)) and sections[same] == before[same]:
            same += 1
        for depth in range(same, len(sections)):
            yield f"{'  ' * depth}{sections[depth]}:"
        before = sections
        yield f"{'  ' * len(sections)}{name}: {_yaml(each.value)}  # {each.origin}"


def json_of(shown: Iterable[Shown]) -> dict[str, dict[str, Any]]:
    """The same for programs."""
    return {each.path: {"value": each.value, "origin": each.origin} for each in shown}


def _top(config: Config) -> Iterator[Shown]:
    from verl_shipper.daemon import places_of

    places = places_of(config)
    at_work: dict[str, Any] = {
        "spool_dir": places.spool_dir,
        "state_dir": places.state_dir,
        "socket": places.listen[0].removeprefix("ipc://"),
        "adopt": list(places.adopt),
    }
    for key in TOP:
        origin = config.origins.get(key.path) or _variable(key) or DEFAULT
        yield Shown(key.path, at_work.get(key.path, getattr(config, key.path)), origin)


def _collected(config: Config) -> Iterator[Shown]:
    yield Shown(SECTION, [entry.given() for entry in config.watch], config.origins.get(SECTION, DEFAULT))
    for key, value in zip(SYSTEM, (config.system_metrics, config.system_interval_s), strict=True):
        yield Shown(key.path, value, config.origins.get(key.path, DEFAULT))


def _sampling(config: Config) -> Iterator[Shown]:
    path = RUN_MAY_CHOOSE.path
    yield Shown(path, list(config.run_may_choose), config.origins.get(path, DEFAULT))


def _backends(config: Config) -> Iterator[Shown]:
    for name, settings in config.backends.items():
        prefix = f"backends.{name}"
        keys = backend_keys(name) or {}
        declared = {path: key for path, key in keys.items() if not path.startswith("sampling.") and path != "enabled"}
        for path in sorted(declared.keys() | settings.keys()):
            yield _one(f"{prefix}.{path}", settings.get(path), declared.get(path), config)
        chosen = config.sampling.get(name, {})
        for key in SAMPLING:
            section, _, leaf = key.path.rpartition(".")
            value = (chosen.get(section, {}) if section else chosen).get(leaf)
            yield _one(f"{prefix}.sampling.{key.path}", value, key, config)


def _trainer(config: Config) -> Iterator[Shown]:
    for key in TRAINER:
        name = key.path.rpartition(".")[2].removesuffix("_name")
        if name in ("project", "experiment"):
            yield _one(key.path, getattr(config, name), key, config)


def _one(path: str, value: Any, key: Key | None, config: Config) -> Shown:
    if value is not None or key is None:
        return Shown(path, value, config.origins.get(path, DEFAULT))
    for variable in key.variables:
        if os.environ.get(variable):
            return Shown(path, os.environ[variable], f"${variable}")
    otherwise = key.otherwise.replace("`", "").replace("[", "").partition("](")[0]
    return Shown(path, key.default, f"{DEFAULT}: {otherwise}" if otherwise else DEFAULT)


def _variable(key: Key) -> str:
    return next((f"${name}" for name in key.variables if os.environ.get(name)), "")


def _masked(shown: Shown) -> Shown:
    name = shown.path.rpartition(".")[2]
    if name == "headers" and shown.value:  # any value may be a key, whatever its name says
        names = shown.value if isinstance(shown.value, Mapping) else [str(shown.value).partition("=")[0]]
        return Shown(shown.path, dict.fromkeys(names, REDACTED), shown.origin.partition("=")[0])
    # Where a key stands in a file is no secret; what is in that file is not shown anyway.
    is_place = name.endswith(("_file", "_dir"))
    value = redact({"value" if is_place else name: shown.value})
    return Shown(shown.path, next(iter(value.values())), " ".join(str(redact(shown.origin)).split()))


def _yaml(value: Any) -> str:
    import yaml

    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, width=2**31, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()
