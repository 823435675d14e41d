"""Stand-ins for the few classes of verl that the plugin changes, in the shape that verl 0.9 gives them.

The plugin meets the real ones in tests/verl; here are the edges that a real job does not reach: trackers that raise,
configurations of odd shape, a finish nobody called. Trackers that a real one would import are `Tracker`s that count.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

TRACKERS = ("wandb", "mlflow", "swanlab", "console")


class Tracker:
    """A tracker of verl's own. `broken` raises whenever it is called."""

    broken = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[Any] = []

    def log(self, data: Any, step: Any) -> None:
        self.calls.append((step, data))
        if Tracker.broken:
            raise RuntimeError(f"{self.name} is out of order")


def tracking_module() -> types.ModuleType:
    """Like verl.utils.tracking."""

    class Tracking:
        supported_backend: ClassVar[list[str]] = list(TRACKERS)

        def __init__(
            self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None
        ) -> None:
            names = [default_backend] if isinstance(default_backend, str) else default_backend
            for name in names:
                assert name in self.supported_backend, f"{name} is not supported"
            self.logger = {name: Tracker(name) for name in names if name in TRACKERS}
            self.finished: list[int] = []

        def log(self, data: Any, step: Any, backend: Any = None) -> None:
            for name, tracker in self.logger.items():
                if backend is None or name in backend:
                    tracker.log(data=data, step=step)

        def finish(self, exit_code: int = 0) -> None:
            self.finished.append(exit_code)

        def __del__(self) -> None:
            self.finish()

    @dataclass
    class ValidationGenerationsLogger:
        project_name: Any = None
        experiment_name: Any = None

        def log(self, loggers: Any, samples: Any, step: Any) -> list[str]:
            return [name for name in TRACKERS if name in loggers]

    @dataclass
    class DapoFilteredRewardTableLogger:
        project_name: Any = None
        experiment_name: Any = None

        def log(self, loggers: Any, reward_counts: Any, step: Any) -> list[str]:
            return [name for name in TRACKERS if name in loggers]

    return _module("verl.utils.tracking", Tracking, ValidationGenerationsLogger, DapoFilteredRewardTableLogger)


def trace_module() -> types.ModuleType:
    """Like verl.utils.rollout_trace: for every backend but ours it does nothing here."""

    class RolloutTraceConfig:
        _instance: Any = None
        backend: Any = None
        project_name: Any = None
        experiment_name: Any = None
        max_samples_per_step_per_worker: Any = None

        @classmethod
        def get_instance(cls) -> Any:
            if cls._instance is None:
                cls._instance = cls()
            return cls._instance

        @classmethod
        def init(
            cls, project_name: Any, experiment_name: Any, backend: Any, token2text: bool = False, limit: Any = None
        ) -> None:
            config = cls.get_instance()
            config.project_name, config.experiment_name, config.backend = project_name, experiment_name, backend
            config.max_samples_per_step_per_worker = limit

        @classmethod
        def get_backend(cls) -> Any:
            return cls.get_instance().backend

    @contextlib.contextmanager
    def rollout_trace_attr(**_attributes: Any) -> Iterator[None]:
        yield

    def rollout_trace_op(func: Any) -> Any:
        return func

    module = _module("verl.utils.rollout_trace", RolloutTraceConfig)
    module.rollout_trace_attr = rollout_trace_attr  # type: ignore[attr-defined]
    module.rollout_trace_op = rollout_trace_op  # type: ignore[attr-defined]
    return module


def _module(name: str, *classes: type) -> types.ModuleType:
    module = types.ModuleType(name)
    for each in classes:
        setattr(module, each.__name__, each)
    return module
