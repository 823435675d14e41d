"""What an operator chose to deliver of a run to one backend: the knobs of sampling as frozen values.

    sampling:
      log_frequency: 100            or {pattern: steps}; the pattern with the most letters wins
      log_mode: last                last | mean | min | max over the steps between two that are kept
      log_val_generations: 20       rows of each validation; "all"
      include, exclude              patterns of metric names
      rank: rank0                   rank0 | all | mean | min | max | sum
      rank_timeout_s: 30
      traces: {enabled, rate, max_samples_per_step_per_worker, max_length, include_prompt, token2text, tokenizer}

Values come checked (config.py does that); here they only get their types. Must not know: files, trackers, the
configuration's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ANY = "*"
LOG_MODES = ("last", "mean", "min", "max")
RANK_0 = "rank0"
RANK_ALL = "all"
REDUCTIONS = ("mean", "min", "max", "sum")
RANK_MODES = (RANK_0, RANK_ALL, *REDUCTIONS)
ALL_ROWS = "all"
RANK_TIMEOUT_S = 30.0  # a rank that is this much later than the first at the same step is left out


@dataclass(frozen=True, slots=True)
class TraceSampling:
    """Which rollout traces are delivered, and how much of each. `max_length` in characters per text."""

    enabled: bool = True
    rate: float = 1.0
    max_samples_per_step_per_worker: int | None = None
    max_length: int | None = None
    include_prompt: bool = True
    token2text: bool = False
    tokenizer: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TraceSampling:
        return cls(**{name: value for name, value in values.items() if name in cls.__slots__ and value is not None})


@dataclass(frozen=True, slots=True)
class Sampling:
    """All knobs of one backend. `log_frequency`: steps by pattern; `log_val_generations`: None for all rows."""

    log_frequency: Mapping[str, int] = field(default_factory=dict)
    log_mode: str = "last"
    log_val_generations: int | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rank: str = RANK_0
    rank_timeout_s: float = RANK_TIMEOUT_S
    traces: TraceSampling = field(default_factory=TraceSampling)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Sampling:
        """Sampling of a checked `sampling` section; what it does not name has its default."""
        given = {name: value for name, value in values.items() if name in cls.__slots__ and value is not None}
        frequency = given.get("log_frequency", {})
        given["log_frequency"] = frequency if isinstance(frequency, Mapping) else {ANY: frequency}
        if given.get("log_val_generations") == ALL_ROWS:
            del given["log_val_generations"]
        for name in ("include", "exclude"):
            given[name] = tuple(given.get(name, ()))
        given["traces"] = TraceSampling.of(given.get("traces", {}))
        return cls(**given)
