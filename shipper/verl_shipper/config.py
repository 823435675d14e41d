"""Configuration of the daemon: one YAML file, `--set`, the environment and defaults, checked, as frozen values.

    backends:                 which trackers, with a section each      (or --backend NAME, trainer.logger, VERL_LOGGER)
      file: {dir: ./records}
      mlflow: {tracking_uri: http://tracker:5000, sampling: {log_frequency: 10}}
    sampling:                 how much of everything is delivered, and what a run may decide of it
    watch, system_metrics     what else is collected on this node, see config_watch.py
    spool_dir, state_dir, socket, adopt, node_quota_bytes, log_level
    trainer, actor_rollout_ref       a trainer's own sections may stand here too; some of their keys mean something

Precedence: command line, then the narrower section before the wider, our own names before a trainer's, then the
environment, then defaults. What was given and what was not stays apart: a run may decide only the latter.

Must not know: processes, sockets. On failure: ConfigError with file, line, key and the nearest right name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_shipper import config_names
from verl_shipper.command import trackers_in
from verl_shipper.config_keys import (
    LOGGER,
    LOGGER_VARIABLE,
    NODE_QUOTA_BYTES,
    SAMPLING,
    TRACE,
)
from verl_shipper.config_watch import SECTION, SYSTEM_INTERVAL_S, WatchEntry, entry_of, is_within
from verl_shipper.errors import ConfigError
from verl_shipper.policy.wishes import MAY_CHOOSE
from verl_shipper.schema import Node, accept, node_of
from verl_shipper_spool.location import EXPERIMENT_VARIABLE, PROJECT_VARIABLE
from verl_shipper_spool.verl_names import PLUGIN_NAME

ADOPT_POLL_S = 2.0  # file events only hasten this; it is what a shared file system without events gets
SETTLE_S = 0.1  # acknowledgements wait at most so long for company in one fsync
STATUS_S = 2.0  # how often the daemon writes down what `status` shows of itself
RECLAIM_S = 5.0

PLACES = ("spool_dir", "state_dir", "socket", "adopt")  # fixed for a daemon's life
SHIPPER = PLUGIN_NAME  # our own name in a trainer's list of loggers
NAMELESS = ("", "null", "none")  # what stands for no backend


@dataclass(frozen=True, slots=True)
class Config:
    """A checked configuration.

    backends   name → settings, in the order given
    sampling   name → what an operator chose for that backend; what nobody chose is not in it
    origins    dotted key → where its value was given, for people
    faults     name → what is wrong in that backend's section; only `doctor` gets a configuration with some
    """

    backends: Mapping[str, Mapping[str, Any]]
    spool_dir: str | None = None
    state_dir: str | None = None
    socket: str | None = None
    adopt: tuple[str, ...] = ()
    node_quota_bytes: int = NODE_QUOTA_BYTES
    log_level: str = "WARNING"
    source: str = field(default="defaults")
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    run_may_choose: tuple[str, ...] = MAY_CHOOSE
    project: str | None = None
    experiment: str | None = None
    watch: tuple[WatchEntry, ...] = ()
    system_metrics: bool = False  # nobody who makes a Config by hand wants records that nobody logged
    system_interval_s: float = SYSTEM_INTERVAL_S
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    faults: Mapping[str, Sequence[ConfigError]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Request:
    """What a command line asks for. Can be loaded again when the file has changed."""

    path: str | None = None
    overrides: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    state_dir: str | None = None
    socket: str | None = None
    adopt: tuple[str, ...] = ()
    command: tuple[str, ...] = ()  # what runs beside the daemon: it may name trackers itself

    def load(self, *, need_backends: bool = True, with_faults: bool = False) -> Config:
        """The configuration, with the command line's places on top. Raises ConfigError; not for what is wrong in a
        backend's section, when `with_faults`: `check_backends` does then."""
        found, problems = examine_config(
            self.path, self.overrides, self.backends, need_backends=need_backends, command=self.command
        )
        borne = [error for faults in found.faults.values() for error in faults] if with_faults else []
        for problem in problems:
            if problem not in borne:
                raise problem
        given = {"state_dir": self.state_dir, "socket": self.socket, "adopt": self.adopt}
        given = {name: value for name, value in given.items() if value}
        origins = {**found.origins, **{name: f"--{name.replace('_', '-')}" for name in given}}
        return replace(found, **given, origins=origins)  # type: ignore[arg-type]

    def problems(self) -> tuple[list[ConfigError], Config]:
        """Everything that is wrong, with what could be read all the same."""
        try:
            found, problems = examine_config(self.path, self.overrides, self.backends)
        except ConfigError as error:
            return [error], Config({})
        return problems or backend_problems(found), found


def load_config(
    path: str | None = None, overrides: Sequence[str] = (), backends: Sequence[str] = (), *, need_backends: bool = True
) -> Config:
    """Configuration of a file, `KEY=VALUE` overrides and backend names. Raises ConfigError for the first problem."""
    found, problems = examine_config(path, overrides, backends, need_backends=need_backends)
    if problems:
        raise problems[0]
    return found


def examine_config(
    path: str | None,
    overrides: Sequence[str],
    backends: Sequence[str],
    *,
    need_backends: bool = True,
    command: Sequence[str] = (),
) -> tuple[Config, list[ConfigError]]:
    """The same with everything that is wrong. Raises ConfigError only for what cannot be read at all."""
    from verl_shipper.config_source import overlay, read_file
    from verl_shipper.config_tree import gather

    twice: list[ConfigError] = []
    root = read_file(path, twice) if path else Node({}, "command line")
    for override in overrides:
        overlay(root, override)
    gathered = gather(root, twice)
    chosen = _Chooser(gathered, path or "command line", command).choose(backends, need_backends=need_backends)
    return _config(root, gathered, chosen, path or "command line"), gathered.problems


def check_backends(config: Config) -> None:
    """Whether every chosen backend likes its settings. Imports the backends' modules, touches no network."""
    for problem in backend_problems(config):
        raise problem


def backend_problems(config: Config) -> list[ConfigError]:
    """What the chosen backends themselves have against their settings."""
    from verl_shipper.backends import load_backend

    problems: list[ConfigError] = []
    for name, settings in config.backends.items():
        problems += config.faults.get(name, ())
        try:
            load_backend(name).check(settings)
        except ConfigError as error:
            origin = config.origins.get(error.where)
            is_line = origin is not None and not origin.startswith("--")
            where = (f"{origin}: {error.where}" if is_line else origin) if origin else error.where
            problems.append(ConfigError(error.what, where=where or f"backends.{name}", hint=error.hint))
    return problems


@dataclass(slots=True)
class _Chooser:
    """Decides which backends there are."""

    gathered: Any
    source: str
    command: Sequence[str] = ()

    def choose(self, named: Sequence[str], *, need_backends: bool) -> list[str]:
        asked = self._asked(named)
        names = [name for name, origin in asked.items() if self._exists(name, origin)]
        for name, origin in self.gathered.sections.items():
            if name not in asked:
                self._exists(name, origin)
        chosen = [name for name in names if self._is_on(name)]
        if need_backends and not chosen and not self.gathered.problems:
            hint = "add for example --backend file --set backends.file.dir=./records"
            self.gathered.wrong("no backend chosen", self.source, "", hint)
        return chosen

    def _asked(self, named: Sequence[str]) -> dict[str, str]:
        """Names with the place that names them: command line, the trainer's list, sections, the environment, the
        command beside the daemon."""
        if named:
            return {name: f"--backend {name}" for name in named}
        logger = self.gathered.best("trainer.logger")
        listed = {} if logger is None else dict.fromkeys(logger.value, f"{logger.origin}: trainer.logger")
        if listed and SHIPPER not in listed:
            return listed
        # A list with our own name in it is the trainer's; what stands beside the name, it serves by itself.
        if self.gathered.sections:
            return dict(self.gathered.sections)
        if listed:
            return {name: origin for name, origin in listed.items() if name != SHIPPER}
        variable = os.environ.get(LOGGER_VARIABLE, "")
        if variable.strip():
            return {name: f"${LOGGER_VARIABLE}" for name in _names(variable) if name != SHIPPER}
        return dict.fromkeys(trackers_in(self.command), "the command's trainer.logger")

    def _exists(self, name: str, origin: str) -> bool:
        from verl_shipper.backends import known_names

        if name in known_names():
            return True
        self.gathered.wrong(f"unknown backend {name!r}", origin, "", _backends_near(name))
        return False

    def _is_on(self, name: str) -> bool:
        enabled = self.gathered.best(f"backends.{name}.enabled")
        return enabled is None or bool(enabled.value)


def _backends_near(name: str) -> str:
    """A hint for a name that is no backend."""
    from verl_shipper.backends import known_names

    known = known_names()
    near = config_names.near_miss(name, known) or config_names.nearest(name, known)
    return f"did you mean {near!r}?" if near else f"known backends: {', '.join(known)}"


def _names(text: str) -> list[str]:
    found: list[str] = accept(LOGGER, node_of(text, "")) if text.strip() else []
    return found


def _config(root: Node, gathered: Any, chosen: Sequence[str], source: str) -> Config:
    """Everything together, for backends that are chosen."""
    origins: dict[str, str] = {}

    def given(key: str, *wider: str) -> Any:
        best = gathered.best(key, *wider)
        if best is not None:
            origins[key] = best.origin
        return None if best is None else best.value

    only = _traces_only(gathered, chosen)
    backends: dict[str, dict[str, Any]] = {}
    sampling: dict[str, dict[str, Any]] = {}
    for name in chosen:
        prefix = f"backends.{name}."
        paths = [key[len(prefix) :] for key in gathered.found if key.startswith(prefix)]
        own = [path for path in paths if path != "enabled" and not path.startswith("sampling.")]
        backends[name] = {path: given(prefix + path) for path in own}
        flat = {
            key.path: value
            for key in SAMPLING
            if (value := given(f"{prefix}sampling.{key.path}", f"sampling.{key.path}")) is not None
        }
        sampling[name] = _nested(_with_traces(name, flat, only, root, origins))
    named = {
        name: given(f"trainer.{name}_name") or _from_environment(f"trainer.{name}_name", variable, origins)
        for name, variable in (("project", PROJECT_VARIABLE), ("experiment", EXPERIMENT_VARIABLE))
    }
    watch = _watched(gathered, origins)
    _no_circle(gathered, watch, backends)
    may = given("sampling.run_may_choose")
    quota = given("node_quota_bytes")
    samples = given("system_metrics.enabled")
    return Config(
        backends=backends,
        spool_dir=given("spool_dir"),
        state_dir=given("state_dir"),
        socket=given("socket"),
        adopt=tuple(given("adopt") or ()),
        node_quota_bytes=NODE_QUOTA_BYTES if quota is None else quota,
        log_level=given("log_level") or "WARNING",
        source=source,
        sampling=sampling,
        run_may_choose=MAY_CHOOSE if may is None else tuple(may),
        project=named["project"],
        experiment=named["experiment"],
        watch=watch,
        system_metrics=True if samples is None else samples,
        system_interval_s=given("system_metrics.interval_s") or SYSTEM_INTERVAL_S,
        origins=origins,
        faults={name: tuple(gathered.faults[name]) for name in chosen if name in gathered.faults},
    )


def _watched(gathered: Any, origins: dict[str, str]) -> tuple[WatchEntry, ...]:
    """The entries of `watch` that name a path, in the order in which they stand."""
    values: dict[str, dict[str, Any]] = {}
    for dotted in gathered.found:
        section, _, key = dotted.rpartition(".")
        if dotted.startswith(f"{SECTION}."):
            best = gathered.best(dotted)
            values.setdefault(section, {})[key] = best.value
            origins.setdefault(SECTION, best.origin)
    return tuple(entry_of(each) for each in values.values() if "path" in each)


def _no_circle(gathered: Any, watch: Sequence[WatchEntry], backends: Mapping[str, Mapping[str, Any]]) -> None:
    """What the backend `file` writes must not be collected: that would never end."""
    given = backends.get("file", {}).get("dir")
    for entry in watch:
        if isinstance(given, str) and given and is_within(entry, os.path.abspath(os.path.expanduser(given))):
            origin = gathered.best("backends.file.dir").origin
            what = f"the backend file writes to {given}, which is watched ({entry.path})"
            gathered.wrong(what, origin, "backends.file.dir", "choose another folder, or watch only a part")


def _traces_only(gathered: Any, chosen: Sequence[str]) -> tuple[str, str] | None:
    """The one backend that the trainer's own configuration sends traces to, and where it says so."""
    from verl_shipper.backends import known_names

    key = f"{TRACE}.backend"
    only = gathered.best(key)
    if only is None or only.value.lower() in (*NAMELESS, SHIPPER):
        return None
    if only.value not in known_names():
        hint = _backends_near(only.value)
        gathered.wrong(f"traces go to {only.value!r}, which is no backend", only.origin, key, hint)
    elif only.value not in chosen and chosen:
        gathered.wrong(
            f"traces go to {only.value!r}, which is not among the backends ({', '.join(chosen)})",
            only.origin,
            key,
            f"add {only.value} to them, or --set {key}=null",
        )
    return only.value, only.origin


def _with_traces(
    name: str, flat: dict[str, Any], only: tuple[str, str] | None, root: Node, origins: dict[str, str]
) -> dict[str, Any]:
    """What the trainer's own section says about traces, where nobody said it in ours."""
    from verl_shipper.config_tree import model_path

    if only is not None and "traces.enabled" not in flat and only[0] != name:
        flat["traces.enabled"] = False
        origins[f"backends.{name}.sampling.traces.enabled"] = only[1]
    if flat.get("traces.token2text") and "traces.tokenizer" not in flat:
        found = model_path(root)
        if found is not None:
            flat["traces.tokenizer"] = found.value
            origins[f"backends.{name}.sampling.traces.tokenizer"] = found.origin
    return flat


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        section, _, name = path.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return nested


def _from_environment(key: str, variable: str, origins: dict[str, str]) -> str | None:
    value = os.environ.get(variable) or None
    if value is not None:
        origins[key] = f"${variable}"
    return value
