"""What a run asks for in its own configuration, and how much of it the operator lets it have.

    trainer.log_frequency, trainer.log_val_generations
    actor_rollout_ref.rollout.trace.{backend, token2text, max_length, include_prompt, max_samples_per_step_per_worker}
    actor_rollout_ref.model.{tokenizer_path, path}    where the tokenizer is, for token2text
    trainer.logger                        the backends it wants (without `shipper`)

What an operator has set stands; a run may fill in the rest, as far as `run_may_choose` names it. A wish that makes no
sense (wrong type, out of range) is none: a run's configuration is not ours to refuse.

Must not know: where the configuration came from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

LOGGER, TRACES, PROXY = "logger", "traces", "wandb_proxy"
CHOICES = ("log_frequency", "log_val_generations", TRACES, LOGGER, PROXY)
MAY_CHOOSE = ("log_frequency", "log_val_generations", TRACES)


def wishes_of(config: Any) -> dict[str, Any]:
    """The wishes in a run's configuration, by the names of CHOICES; of `traces` by key."""
    trainer = _section(config, "trainer")
    actor = _section(config, "actor_rollout_ref")
    trace, model = _section(_section(actor, "rollout"), "trace"), _section(actor, "model")
    traces = {
        "backend": _text(trace.get("backend")),
        "token2text": _flag(trace.get("token2text")),
        "include_prompt": _flag(trace.get("include_prompt")),
        "max_length": _count(trace.get("max_length"), 1),
        "max_samples_per_step_per_worker": _count(trace.get("max_samples_per_step_per_worker"), 1),
        "tokenizer": _text(model.get("tokenizer_path")) or _text(model.get("path")),
    }
    found = {
        "log_frequency": _frequency(trainer.get("log_frequency")),
        # 0 is what verl says when nobody has asked for anything; whoever logs samples all the same wants them.
        "log_val_generations": _count(trainer.get("log_val_generations"), 1),
        TRACES: {key: value for key, value in traces.items() if value is not None} or None,
        LOGGER: _names(trainer.get("logger")),
        PROXY: _url(trainer.get("wandb_proxy")),
    }
    return {name: value for name, value in found.items() if value is not None}


def effective(
    given: Mapping[str, Any],
    wishes: Mapping[str, Any],
    may_choose: Collection[str],
    backend: str,
    known: Collection[str],
) -> dict[str, Any]:
    """The values of sampling for a run at a backend: the operator's, and the run's where it may choose."""
    allowed = {name: wish for name, wish in wishes.items() if name in may_choose}
    values = dict(given)
    for name in ("log_frequency", "log_val_generations"):
        if name in allowed:
            values.setdefault(name, allowed[name])
    wished = dict(allowed.get(TRACES, {}))
    chosen = wished.pop("backend", None)
    if chosen in known:
        wished["enabled"] = chosen == backend
    values[TRACES] = {**wished, **given.get(TRACES, {})}
    return values


def is_wanted(wishes: Mapping[str, Any], may_choose: Collection[str], backend: str) -> bool:
    """Whether a run wants this backend at all."""
    names = wishes.get(LOGGER) if LOGGER in may_choose else None
    return not names or "shipper" in names or backend in names


def _section(values: Any, key: str) -> Mapping[Any, Any]:
    found = values.get(key) if isinstance(values, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _count(value: Any, least: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _url(value: Any) -> str | None:
    return value if isinstance(value, str) and value.startswith(("http://", "https://")) else None


def _frequency(value: Any) -> int | dict[str, int] | None:
    if isinstance(value, Mapping):
        found = {key: every for key, every in value.items() if isinstance(key, str) and _count(every, 1)}
        return found or None
    return _count(value, 1)


def _names(value: Any) -> list[str] | None:
    listed = value.split(",") if isinstance(value, str) else value
    return [name.strip() for name in listed if isinstance(name, str)] or None if isinstance(listed, list) else None
