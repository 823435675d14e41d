"""Configuration of the daemon: one YAML file, `--set` overrides and defaults, checked, as frozen values.

    backends:                 which trackers, with a section each      (or --backend NAME, or trainer.logger)
      file: {dir: ./records}
      mlflow: {tracking_uri: http://tracker:5000}
    spool_dir, state_dir, socket, adopt: [DIR]       places, see location.py for the defaults
    node_quota_bytes          disk for what trackers have not taken yet; beyond, writers keep their records
    log_level
    trainer, actor_rollout_ref       the trainer's own sections may stand here too; `trainer.logger` names backends

Read through OmegaConf, as verl reads its own, so `${oc.env:VERL_LOGGER,console}` works.
Must not know: processes, sockets. On failure: ConfigError with file, key and the nearest right name.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.errors import ConfigError

# 10 GiB of node disk: a weekend of a tracker's outage for a node of eight ranks with traces.
NODE_QUOTA_BYTES = 10 * 1024**3
ADOPT_POLL_S = 2.0  # file events only hasten this; it is what a shared file system without events gets
SETTLE_S = 0.1  # acknowledgements wait at most so long for company in one fsync
STATUS_S = 2.0  # how often the daemon writes down what `status` shows of itself
RECLAIM_S = 5.0
DRAIN_S = 60.0
MISSING = "???"  # OmegaConf's word for a value that somebody still has to give
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_KEYS = (
    "backends",
    "spool_dir",
    "state_dir",
    "socket",
    "adopt",
    "node_quota_bytes",
    "log_level",
    "trainer",
    "actor_rollout_ref",
)


@dataclass(frozen=True, slots=True)
class Config:
    """A checked configuration. `backends`: name → settings, in the order given."""

    backends: Mapping[str, Mapping[str, Any]]
    spool_dir: str | None = None
    state_dir: str | None = None
    socket: str | None = None
    adopt: tuple[str, ...] = ()
    node_quota_bytes: int = NODE_QUOTA_BYTES
    log_level: str = "WARNING"
    source: str = field(default="defaults")


def load_config(
    path: str | None = None, overrides: Sequence[str] = (), backends: Sequence[str] = (), *, need_backends: bool = True
) -> Config:
    """Configuration of a file, `KEY=VALUE` overrides and backend names. Raises ConfigError."""
    values = _merged(path, overrides)
    source = path or "command line"
    _check_keys(values, source)
    chosen = _chosen(values, backends, source)
    if need_backends and not chosen:
        raise ConfigError(
            "no backend chosen", where=source, hint="add for example --backend file --set backends.file.dir=./records"
        )
    level = str(values.get("log_level") or "WARNING").upper()
    if level not in LOG_LEVELS:
        raise ConfigError(f"log_level is {level!r}", where=source, hint=f"it may be {', '.join(LOG_LEVELS)}")
    return Config(
        backends=chosen,
        spool_dir=_text(values, "spool_dir", source),
        state_dir=_text(values, "state_dir", source),
        socket=_text(values, "socket", source),
        adopt=_texts(values, "adopt", source),
        node_quota_bytes=_count(values, "node_quota_bytes", NODE_QUOTA_BYTES, source),
        log_level=level,
        source=source,
    )


def check_backends(config: Config) -> None:
    """Whether every chosen backend exists and likes its settings. Imports the backends' modules, touches no network."""
    from verl_shipper.backends import load_backend

    for name, settings in config.backends.items():
        backend = load_backend(name)
        for key in settings:
            if backend.settings_known is not None and key not in backend.settings_known:
                near = difflib.get_close_matches(key, backend.settings_known, 1)
                known = ", ".join(backend.settings_known)
                raise ConfigError(
                    f"unknown setting {key!r} of backend {name!r}",
                    where=f"{config.source}: backends.{name}.{key}",
                    hint=f"did you mean backends.{name}.{near[0]}?" if near else f"known settings: {known}",
                )
        backend.check(settings)


def _merged(path: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for override in overrides:
        if "=" not in override or not override.partition("=")[0].strip():
            raise ConfigError(
                f"--set {override!r} is not KEY=VALUE", hint="for example --set backends.file.dir=./records"
            )
    base = _read(path) if path else {}
    try:
        merged = OmegaConf.merge(OmegaConf.create(base), OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"configuration cannot be resolved: {first}",
            where=path or "--set",
            hint="check the values with ${...}, brackets and anchors",
        ) from error
    assert isinstance(values, dict), "merged maps are a map"
    return {str(key): value for key, value in values.items()}


def _read(path: str) -> dict[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"cannot read configuration: {error.strerror}", where=path, hint="check --config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise ConfigError(f"not valid YAML: {problem}", where=place, hint="check the indentation there") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"the file holds a {type(content).__name__}, not a map of keys",
            where=path,
            hint="write for example backends: {file: {dir: ./records}}",
        )
    return content


def _check_keys(values: Mapping[str, Any], source: str) -> None:
    for key in values:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(_KEYS)}"
            raise ConfigError(f"unknown key {key!r}", where=source, hint=hint)


def _chosen(values: Mapping[str, Any], named: Sequence[str], source: str) -> dict[str, dict[str, Any]]:
    """Backends with their settings: named on the command line, else sections, else the trainer's own list."""
    from verl_shipper.backends import known_names

    sections = values.get("backends") or {}
    if not isinstance(sections, dict):
        raise ConfigError(
            "`backends` is not a map of names", where=source, hint="write backends: {file: {dir: ./records}}"
        )
    names = list(named) or [str(name) for name in sections] or _loggers(values, source)
    known = known_names()
    chosen = {}
    for name in [*names, *map(str, sections)]:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(
                f"unknown backend {name!r}",
                where=source,
                hint=f"did you mean {near[0]!r}?" if near else f"known backends: {', '.join(known)}",
            )
    for name in names:
        section = sections.get(name) or {}
        if not isinstance(section, dict):
            raise ConfigError(
                f"`backends.{name}` is not a map of settings", where=source, hint=f"write backends: {{{name}: {{}}}}"
            )
        for key, value in section.items():
            if value == MISSING:
                raise ConfigError(f"`backends.{name}.{key}` has no value yet", where=source, hint="set it with --set")
        if section.get("enabled", True) is not False:
            chosen[name] = {str(key): value for key, value in section.items() if key != "enabled"}
    return chosen


def _loggers(values: Mapping[str, Any], source: str) -> list[str]:
    """Backends that the trainer's own list names."""
    trainer = values.get("trainer")
    logger = trainer.get("logger") if isinstance(trainer, dict) else None
    listed = [part.strip() for part in logger.split(",")] if isinstance(logger, str) else logger or []
    if not isinstance(listed, list):
        raise ConfigError(
            f"`trainer.logger` is a {type(logger).__name__}, not a list of names",
            where=source,
            hint='write trainer: {logger: ["console", "shipper"]}',
        )
    return [str(name) for name in listed if name != "shipper"]


def _text(values: Mapping[str, Any], key: str, source: str) -> str | None:
    value = values.get(key)
    if value is None or isinstance(value, str):
        return value or None
    raise ConfigError(f"`{key}` is a {type(value).__name__}, not text", where=source, hint=f"write {key}: /some/place")


def _texts(values: Mapping[str, Any], key: str, source: str) -> tuple[str, ...]:
    value = values.get(key) or []
    value = [value] if isinstance(value, str) else value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(os.path.expanduser(item) for item in value)
    raise ConfigError(f"`{key}` is not a list of folders", where=source, hint=f"write {key}: [/some/folder]")


def _count(values: Mapping[str, Any], key: str, default: int, source: str) -> int:
    value = values.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError(
        f"`{key}` is {value!r}, not a whole number above 0", where=source, hint=f"write for example {key}: {default}"
    )
