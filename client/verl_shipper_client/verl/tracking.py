"""verl's Tracking, and the two loggers that go past it, shipped.

    trainer.logger            what happens
    [console, shipper]        metrics, generations and the end of the run are shipped; console stays verl's
    [console, wandb], taken   wandb and the others of job.TAKEN are shipped instead of called: none of them is imported;
                              a list of nothing but console is shipped, too
    [console, wandb]          nothing, and one line that says so

    Tracking(…)                        the run begins, with the whole configuration
    Tracking.log(data, step)           metrics
    Tracking.finish(exit_code)         the run's end; a mere `__del__` says nothing about it
    ValidationGenerationsLogger.log    generations, in any process: fully async training validates where no Tracking is
    DapoFilteredRewardTableLogger.log  the table training/filter_groups/filtered_reward_counts

The signatures of verl 0.4 to 0.9 are the same where we look; whatever else is passed goes through untouched.

Must not know: rollouts. On failure: told once, and verl's own call goes on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from verl_shipper_client.client import Client
from verl_shipper_client.verl import job
from verl_shipper_client.verl.job import JOB, TAKEN, names_in, wishes_of
from verl_shipper_client.verl.patch import safely, tell_once, wrap
from verl_shipper_spool.location import TAKEOVER_VARIABLE
from verl_shipper_spool.verl_names import PLUGIN_NAME as NAME

REWARD_COUNTS = "training/filter_groups/filtered_reward_counts"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of a job's trackers are verl's own affair, and which are ours. `ships`: whether the run is shipped."""

    left: Any
    ours: tuple[str, ...]
    ships: bool


@dataclass(slots=True)
class Shipped:
    """A Tracking whose run is shipped."""

    client: Client
    names: tuple[str, ...]
    is_dying: bool = False


# Beside the objects, not in them: a Tracking may be copied and pickled, a client cannot.
_shipped: weakref.WeakKeyDictionary[Any, Shipped] = weakref.WeakKeyDictionary()


def patch(module: ModuleType) -> None:
    """Change `verl.utils.tracking`."""
    tracking = getattr(module, "Tracking", None)
    if tracking is not None:
        if NAME not in tracking.supported_backend:
            tracking.supported_backend = [*tracking.supported_backend, NAME]
        wrap(tracking, "__init__", _begin)
        wrap(tracking, "log", _log)
        wrap(tracking, "finish", _finish)
        wrap(tracking, "__del__", _die)
    for name, make in (
        ("ValidationGenerationsLogger", _log_generations),
        ("DapoFilteredRewardTableLogger", _log_reward_counts),
    ):
        logger = getattr(module, name, None)
        if logger is not None:
            wrap(logger, "log", make)


def choose(loggers: Any, *, takeover: bool) -> Choice:
    """`left` is what verl goes on to do itself: the same object when that is all of it."""
    names = names_in(loggers)
    wanted = TAKEN | {NAME} if takeover else {NAME}
    ours = tuple(name for name in names if name in wanted)
    left = [name for name in names if name not in wanted] if ours else loggers
    return Choice(left, ours, ships=takeover or bool(ours))


def _begin(original: Any) -> Any:
    @functools.wraps(original)
    def begin(
        self: Any,
        project_name: Any,
        experiment_name: Any,
        default_backend: Any = "console",
        config: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        choice = safely(lambda: choose(default_backend, takeover=wishes_of(config).takeover))
        left = default_backend if choice is None else choice.left
        original(self, project_name, experiment_name, left, config, *args, **kwargs)
        if choice is not None:
            safely(lambda: _start(self, project_name, experiment_name, choice, config))

    return begin


def _start(tracking: Any, project: Any, experiment: Any, choice: Choice, config: Any) -> None:
    if not choice.ships:
        names = ", ".join(names_in(choice.left))
        tell_once(f"not asked to ship this run: put {NAME} into trainer.logger ({names}), or set {TAKEOVER_VARIABLE}=1")
        return
    client = JOB.head(project, experiment, config)
    _shipped[tracking] = Shipped(client, choice.ours)
    taken = ", ".join(name for name in choice.ours if name != NAME)
    instead = f" instead of calling {taken}" if taken else ""
    tell_once(f"shipping run {client.run_id} ({project}/{experiment}){instead}")


def _log(original: Any) -> Any:
    @functools.wraps(original)
    def log(self: Any, data: Any, step: Any, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        safely(lambda: _record(self, data, step, backend))  # ours first: another tracker may raise
        return original(self, data, step, backend, *args, **kwargs)

    return log


def _record(tracking: Any, data: Any, step: Any, backend: Any) -> None:
    shipped = client_of(tracking)
    if shipped is not None and (backend is None or any(name in backend for name in (*shipped.names, NAME))):
        shipped.client.log(data, step)


def client_of(tracking: Any) -> Shipped | None:
    """What is shipped for a Tracking, if anything."""
    try:
        return _shipped.get(tracking)
    except TypeError:  # an object that can be no key is no Tracking
        return None


def _finish(original: Any) -> Any:
    @functools.wraps(original)
    def finish(self: Any, exit_code: Any = 0, *args: Any, **kwargs: Any) -> Any:
        shipped = safely(lambda: client_of(self))
        if shipped is not None and not shipped.is_dying:
            safely(lambda: shipped.client.finish(exit_code, timeout_s=job.FINISH_S))
        return original(self, exit_code, *args, **kwargs)

    return finish


def _die(original: Any) -> Any:
    @functools.wraps(original)
    def die(self: Any) -> None:
        shipped = safely(lambda: client_of(self))
        if shipped is not None:
            shipped.is_dying = True  # the end of an object is not the end of a training
        original(self)

    return die


def _log_generations(original: Any) -> Any:
    @functools.wraps(original)
    def log(self: Any, loggers: Any, samples: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        left = _ship(self, loggers, lambda client: client.log_generations(samples, step))
        return original(self, left, samples, step, *args, **kwargs)

    return log


def _log_reward_counts(original: Any) -> Any:
    @functools.wraps(original)
    def log(self: Any, loggers: Any, reward_counts: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        def act(client: Any) -> None:
            row = (step, counts_text(reward_counts))
            client.log_generations([row], step, columns=("step", "reward_counts"), name=REWARD_COUNTS)

        left = _ship(self, loggers, act)
        return original(self, left, reward_counts, step, *args, **kwargs)

    return log


def _ship(logger: Any, loggers: Any, act: Any) -> Any:
    """What is left of `loggers` when ours has had its share."""
    choice = safely(lambda: choose(loggers, takeover=JOB.wishes.takeover))
    if choice is None or not choice.ships:
        return loggers
    names = getattr(logger, "project_name", None), getattr(logger, "experiment_name", None)
    safely(lambda: act(JOB.helper(*names)))
    return choice.left


def counts_text(reward_counts: Mapping[Any, Any]) -> str:
    """Rewards with how many groups had nothing else, smallest first: `0:12, 1:30`, as verl's own table has them."""
    pairs = sorted((float(value), int(count)) for value, count in reward_counts.items())
    return ", ".join(f"{value:g}:{count}" for value, count in pairs)
