"""A callback for Hugging Face's Trainer, and for trainers made of it (trl, sentence-transformers, setfit).

    from verl_shipper_client.torch.huggingface import ShipperCallback

    Trainer(…, callbacks=[ShipperCallback("finetune", "qwen")])

    on_train_begin   the run begins: configuration of the arguments, the model and its adapters
    on_log           metrics at `global_step`, named as by the Trainer's own trackers: train/…, eval/…, test/…
    on_train_end     the run ends with exit code 0. An exception ends it with the process, as failed
    a search         each trial is a run of its own

Only the world's first process logs. Evaluations after the end of a training still arrive.

Must not know: torch, trackers. On failure: as a client, never into training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback

from verl_shipper_client import identity
from verl_shipper_client.client import Client
from verl_shipper_client.launcher import safely
from verl_shipper_client.torch.distributed import DistributedClient

FINISH_S = 3.0  # how long the end of a training may wait for the daemon; the rest it takes from the spool
_PREFIXES = {"eval_": "eval/", "test_": "test/"}


class ShipperCallback(TrainerCallback):  # type: ignore[misc]
    """Hugging Face's callback over a `Client`.

    project, experiment, run_id: as for `DistributedClient`; the experiment is by default the arguments' `run_name`.
    `config`: goes beside what is found. `client`: one of yours, which you end yourself.
    """

    def __init__(
        self,
        project: str | None = None,
        experiment: str | None = None,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        client: Client | None = None,
    ) -> None:
        self.client = client
        self._project, self._experiment, self._run_id = project, experiment, run_id
        self._config = dict(config) if isinstance(config, Mapping) else {"config": config} if config else {}
        self._is_ours = client is None
        self._trials = 0

    def on_train_begin(self, args: Any, state: Any, _control: Any, model: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            self._begin(args, state, model)

    def on_log(self, args: Any, state: Any, _control: Any, logs: Any = None, model: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if self.client is None:  # an evaluation without a training
            self._begin(args, state, model)
        if self.client is not None:
            self.client.log({_named(str(key)): value for key, value in logs.items()}, step=state.global_step)

    def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self.client is not None and self._is_ours and state.is_world_process_zero:
            self.client.finish(exit_code=0, timeout_s=FINISH_S)

    def _begin(self, args: Any, state: Any, model: Any) -> None:
        is_search = getattr(state, "is_hyper_param_search", False)
        if self.client is not None and not (self._is_ours and is_search):
            return  # a training that goes on
        experiment = identity.experiment_or_none(self._experiment) or identity.name(getattr(args, "run_name", None))
        run_id = self._run_id
        if is_search:
            self._trials += 1
            trial = identity.name(state.trial_name) or f"trial-{self._trials}"
            experiment = f"{experiment}-{trial}" if experiment else trial
            run_id = f"{run_id}-{trial}" if run_id else None
        config = {**_config_of(args, model), **self._config}
        self.client = DistributedClient(self._project, experiment, config, run_id)


def _config_of(args: Any, model: Any) -> dict[str, Any]:
    """What the arguments, the model and its adapters are made with."""
    parts: dict[str, Callable[[], Any]] = {
        "model": lambda: model.config if isinstance(model.config, Mapping) else model.config.to_dict(),
        "peft": lambda: {name: adapter.to_dict() for name, adapter in model.peft_config.items()},
    }
    found = {name: value for name, part in parts.items() if (value := safely(part))}
    return {**(safely(lambda: dict(args.to_sanitized_dict())) or {}), **found}


def _named(key: str) -> str:
    for front, named in _PREFIXES.items():
        if key.startswith(front):
            return named + key[len(front) :]
    return f"train/{key}"
