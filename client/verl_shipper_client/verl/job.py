"""The verl job this process belongs to: what it wants of us, its run id, and the clients of this process.

    what is wanted   VERL_SHIPPER_{TAKEOVER, SPOOL_DIR, SOCKET, RUN_ID}, and the same in the job's configuration:
                     trainer.shipper.{takeover, spool_dir, socket, run_id}; variables first
    run id           as given → made of Ray's session, its job and the names, so that trainer, rollout workers and
                     rollouter agree on it without asking each other → a fresh one
    head             the process that has verl's Tracking: the run begins and ends with it
    helper           rollout workers and the rollouter: they add to the run

verl logs from one process per run, whatever rank that has, so our clients are rank 0 of 1.

Must not know: verl's classes. On failure: no client; the job goes on without us.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_shipper_client.client import Client
from verl_shipper_client.verl.patch import safely
from verl_shipper_spool.location import (
    EXPERIMENT_VARIABLE,
    PROJECT_VARIABLE,
    RUN_ID_VARIABLE,
    SOCKET_VARIABLE,
    SPOOL_VARIABLE,
    TAKEOVER_VARIABLE,
)
from verl_shipper_spool.verl_names import MODULES_VARIABLE, PLUGIN_MODULE, TRUE_WORDS

# Trackers whose place we take when asked to. The console stays verl's own: it imports nothing and sends nothing.
TAKEN = frozenset(
    {"wandb", "tracking", "mlflow", "swanlab", "vemlp_wandb", "tensorboard", "clearml", "trackio", "file", "weave"}
)
FINISH_S = 3.0  # how long the end of a training may wait for the daemon; the rest it takes from the spool
JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's own, in the driver of a submitted job
_RUN_ID_BYTES = 8
# The parts of a configuration that decide how a helper's records are sampled; the head brings the whole of it.
_TRAINER_KEYS = ("logger", "log_frequency", "log_val_generations", "wandb_proxy")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a job asks of us. Empty texts: not said."""

    takeover: bool = False
    spool_dir: str = ""
    socket: str = ""
    run_id: str = ""


class Job:
    """What one process knows of its job."""

    def __init__(self) -> None:
        # Reentrant, for a signal handler that ends the run; and fresh in a fork child, whose threads are gone.
        self._lock = threading.RLock()
        self._heads: list[Client] = []
        self._helpers: dict[tuple[str, str], Client] = {}
        self._config: Any = None
        self._tokenizer = ""

    def note(self, config: Any, tokenizer: Any = None) -> None:
        """The job's configuration, as a process without Tracking meets it; where its tokenizer lies."""
        self._config = config
        place = getattr(tokenizer, "name_or_path", None)
        self._tokenizer = place if isinstance(place, str) else ""

    def note_if_unknown(self, config: Any) -> None:
        if self._config is None:
            self._config = config

    @property
    def wishes(self) -> Wishes:
        return wishes_of(self._config)

    def head(self, project: Any, experiment: Any, config: Any) -> Client:
        """A client of the process that logs for the run. Each call begins one: outside of Ray it is another run."""
        self._config = config if config is not None else self._config
        client = self._client(project, experiment, config if config is not None else {}, head=True)
        with self._lock:
            self._heads.append(client)
        return client

    def heads(self) -> list[Client]:
        """The heads of this process, in the order they began."""
        with self._lock:
            return list(self._heads)

    def helper(self, project: Any, experiment: Any) -> Client:
        """A client that adds to the run: the newest head where there is one in this process."""
        with self._lock:
            if self._heads:
                named = [head for head in self._heads if (head.project, head.experiment) == (project, experiment)]
                return (named or self._heads)[-1]
            key = str(project), str(experiment)
            if key not in self._helpers:
                self._helpers[key] = self._client(project, experiment, self._excerpt(), head=False)
            return self._helpers[key]

    def after_fork(self) -> None:
        """In the child; its clients know by themselves."""
        self._lock = threading.RLock()

    def _client(self, project: Any, experiment: Any, config: Any, *, head: bool) -> Client:
        settings = config if head and config else self._config
        wishes, trainer = wishes_of(settings), _section(settings, "trainer")
        # Whatever names a Tracking or a trace is given: those of the configuration are the same in every process.
        names = (_get(trainer, "project_name") or project, _get(trainer, "experiment_name") or experiment)
        return Client(
            project if head else names[0],
            experiment if head else names[1],
            config=config,
            run_id=wishes.run_id or job_run_id(str(names[0]), str(names[1])),
            rank=0,
            world=1,
            spool_dir=wishes.spool_dir or None,
            socket=wishes.socket or None,
            head=head,
        )

    def _excerpt(self) -> dict[str, Any] | None:
        """Of the configuration, what a daemon needs that sees only this process."""
        if self._config is None:
            return None
        trainer, actor = (_section(self._config, name) for name in ("trainer", "actor_rollout_ref"))
        path = self._tokenizer or _get(_section(actor, "model"), "path")
        wanted = {key: _get(trainer, key) for key in _TRAINER_KEYS}
        trace = _plain(_section(_section(actor, "rollout"), "trace"))
        return {
            "trainer": {key: _plain(value) for key, value in wanted.items() if value is not None},
            "actor_rollout_ref": {"rollout": {"trace": trace}, "model": {"path": path}},
        }


JOB = Job()
os.register_at_fork(after_in_child=JOB.after_fork)


def wishes_of(config: Any) -> Wishes:
    """What variables and a configuration say."""
    section = _section(_section(config, "trainer"), "shipper")

    def text(variable: str, key: str) -> str:
        value = os.environ.get(variable) or _get(section, key)
        return "" if value is None else str(value).strip()

    takeover = os.environ.get(TAKEOVER_VARIABLE) or str(_get(section, "takeover"))
    return Wishes(
        takeover=takeover.strip().lower() in TRUE_WORDS,
        spool_dir=text(SPOOL_VARIABLE, "spool_dir"),
        socket=text(SOCKET_VARIABLE, "socket"),
        run_id=text(RUN_ID_VARIABLE, "run_id"),
    )


def job_run_id(project: str, experiment: str) -> str | None:
    """The run id that all processes of a Ray job find by themselves; None outside of Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not safely(ray.is_initialized):
        return None
    context = ray.get_runtime_context()
    job = safely(context.get_job_id)
    session = safely(context.get_session_name) if hasattr(context, "get_session_name") else None
    session = session or safely(lambda: ray._private.worker.global_worker.node.session_name)  # noqa: SLF001 - older Ray
    if not job or not session:
        return None
    facts = "\n".join((str(session), str(job), project, experiment))
    return hashlib.blake2b(facts.encode("utf-8", "surrogatepass"), digest_size=_RUN_ID_BYTES).hexdigest()


def travelling(config: Any) -> dict[str, str]:
    """Variables that Ray's workers need to find the same places and the same run: verl forwards none of ours."""
    wishes = wishes_of(config)
    spool = os.path.abspath(os.path.expanduser(wishes.spool_dir)) if wishes.spool_dir else ""
    found = {SPOOL_VARIABLE: spool, SOCKET_VARIABLE: wishes.socket, RUN_ID_VARIABLE: wishes.run_id}
    found[TAKEOVER_VARIABLE] = "1" if wishes.takeover else ""
    for variable in (PROJECT_VARIABLE, EXPERIMENT_VARIABLE):
        found[variable] = os.environ.get(variable, "")
    modules = os.environ.get(MODULES_VARIABLE, "")
    found[MODULES_VARIABLE] = modules if PLUGIN_MODULE in modules.split(",") else ""
    brought = safely(_brought_along) or {}
    return {name: value for name, value in found.items() if value and name not in brought}


def _brought_along() -> Any:
    """Variables that `ray job submit` has given the job's processes; Ray refuses a job that says one of them again."""
    try:
        return json.loads(os.environ.get(JOB_CONFIG_VARIABLE) or "{}").get("runtime_env", {}).get("env_vars")
    except ValueError:
        return None


def names_in(loggers: Any) -> list[str]:
    """Names in `trainer.logger`, which is a list or a single name."""
    if isinstance(loggers, str):
        return [loggers]
    return [str(name) for name in loggers] if loggers is not None else []


def _section(config: Any, key: str) -> Any:
    """A mapping below `key`, ours or OmegaConf's; an empty one when there is none."""
    found = _get(config, key)
    return found if hasattr(found, "get") else {}


def _get(config: Any, key: str) -> Any:
    if not hasattr(config, "get"):
        return None
    return safely(lambda: config.get(key))


def _plain(value: Any) -> Any:
    """OmegaConf's containers as Python's: they are read lazily, and a record is not."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {key: _plain(_get(value, key)) for key in value}
    return [_plain(element) for element in value] if isinstance(value, (list, tuple)) or _is_list(value) else value


def _is_list(value: Any) -> bool:
    return type(value).__name__ == "ListConfig"
