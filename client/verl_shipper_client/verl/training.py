"""How a training ends, and what its workers need to know: verl says the first to nobody and forwards nothing of ours.

    a trainer's `fit` returns     the run ends with exit code 0
    an exception leaves `fit`     with exit code 1, and the exception goes on
    the process dies              nothing to do here: the daemon finds the writer dead and ends the run as failed
    get_ppo_ray_runtime_env       our variables are added, so that workers of a cluster that runs already have them

Trainers of recipes are subclasses of verl's and define `fit` anew: each is wrapped as it is made.

Must not know: trackers, rollouts. On failure: told once; training is not touched.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType, TracebackType
from typing import Any

from verl_shipper_client.process_exit import as_code
from verl_shipper_client.verl import job
from verl_shipper_client.verl.job import JOB, travelling
from verl_shipper_client.verl.patch import MARK, safely, wrap
from verl_shipper_client.verl.tracking import client_of

# Where a script of its own defines one (torchrun -m verl.trainer.sft_trainer), its process ends like any other.
TRAINERS = {
    "verl.trainer.ppo.ray_trainer": "RayPPOTrainer",
    "verl.trainer.ppo.v1.trainer_base": "PPOTrainer",
    "verl.trainer.main_ppo_sync": "PPOTrainer",
    "verl.trainer.sft_trainer": "SFTTrainer",
    "verl.trainer.sft_trainer_ray": "SFTTrainer",
    "verl.trainer.fsdp_sft_trainer": "FSDPSFTTrainer",
}
ENVIRONMENT_MODULE = "verl.trainer.constants_ppo"
_FITTING = "_verl_shipper_fitting"


def patch_trainer(module: ModuleType) -> None:
    """Watch the end of a trainer's `fit`, and of its subclasses'."""
    trainer = getattr(module, TRAINERS[module.__name__], None)
    if trainer is not None:
        wrap(trainer, "fit", _watched)
        watch_subclasses(trainer, "fit", _watched)


def patch_environment(module: ModuleType) -> None:
    """Let our variables travel to Ray's workers."""
    wrap(module, "get_ppo_ray_runtime_env", _with_ours)


def watch_subclasses(base: Any, method: str, make: Any) -> None:
    """Wrap `method` of every class that is derived from `base` from now on and defines it."""
    if hasattr(vars(base).get("__init_subclass__"), MARK):
        return
    inherited = base.__init_subclass__.__func__ if "__init_subclass__" in vars(base) else None

    def watch(cls: type[Any], /, **kwargs: Any) -> None:
        if inherited is not None:
            inherited(cls, **kwargs)
        else:
            super(base, cls).__init_subclass__(**kwargs)
        safely(lambda: wrap(cls, method, make))

    hook = classmethod(watch)
    setattr(hook, MARK, True)
    base.__init_subclass__ = hook


def _watched(original: Any) -> Any:
    """`fit` with its end recorded. One that calls its parent's ends once, at the outermost."""
    if inspect.iscoroutinefunction(original):  # Ray asks the same of the methods of an actor

        @functools.wraps(original)
        async def fit_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _Fit(self):
                return await original(self, *args, **kwargs)

        return fit_async

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Fit(self) as block:
            result = original(self, *args, **kwargs)
            if not inspect.iscoroutine(result):
                return result
            block.abandon()  # somebody's decorator hides that it is asynchronous: it has not begun yet
        return _awaited(self, result)

    return fit


async def _awaited(trainer: Any, coroutine: Any) -> Any:
    with _Fit(trainer):
        return await coroutine


class _Fit:
    """One `fit` of one trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_outermost = not getattr(trainer, _FITTING, False)
        self._before: list[Any] = []
        self._is_abandoned = False

    def __enter__(self) -> _Fit:
        if self._is_outermost:
            safely(self._begin)
        return self

    def abandon(self) -> None:
        """Nothing has happened yet, so nothing has ended."""
        self._is_abandoned = True

    def _begin(self) -> None:
        setattr(self._trainer, _FITTING, True)
        self._before = JOB.heads()
        JOB.note_if_unknown(getattr(self._trainer, "config", None))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_outermost:
            safely(lambda: setattr(self._trainer, _FITTING, False))
            if not self._is_abandoned:
                code = as_code(error.code) if isinstance(error, SystemExit) else int(kind is not None)
                safely(lambda: self._end(code))

    def _end(self, exit_code: int) -> None:
        """The runs that this training has begun, or whose Tracking the trainer holds; else those that are there."""
        began = [head for head in JOB.heads() if head not in self._before]
        held = client_of(getattr(self._trainer, "logger", None))
        for client in ([held.client] if held is not None else began) or self._before:
            client.finish(exit_code, timeout_s=job.FINISH_S)


def _with_ours(original: Any) -> Any:
    @functools.wraps(original)
    def get_ppo_ray_runtime_env(*args: Any, **kwargs: Any) -> Any:
        environment = original(*args, **kwargs)
        config = args[0] if args else kwargs.get("config")

        def add() -> None:
            variables = environment.setdefault("env_vars", {})
            for name, value in travelling(config).items():
                variables.setdefault(name, value)

        safely(add)
        return environment

    return get_ppo_ray_runtime_env
