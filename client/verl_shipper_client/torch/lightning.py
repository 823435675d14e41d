"""A logger for Lightning, under both of its names: lightning.pytorch and pytorch_lightning.

    from verl_shipper_client.torch.lightning import ShipperLogger

    Trainer(logger=ShipperLogger("pretrain", "1b"))

    log_metrics         metrics, at Lightning's step
    log_hyperparams     the run's configuration; what comes after the first metrics, a text `hyperparameters`
    finalize            the run's end: exit code 0 for "success", else 1. A job that Slurm requeues goes on

As Lightning has it, only rank 0 logs. Nothing here reads a tensor: what is on a device stays there.

Must not know: torch, trackers. On failure: as a client, never into training.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from verl_shipper_client.client import Client
from verl_shipper_client.launcher import safely
from verl_shipper_client.torch.late import LateClient

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
FINISH_S = 3.0  # how long the end of a stage may wait for the daemon; the rest it takes from the spool
HYPERPARAMETERS = "hyperparameters"
_REQUEUED = "finished"  # Lightning's word when Slurm's signal stops a job that is to begin again


def _bases() -> tuple[Any, ...]:
    """Lightning's base class, of the name the program has imported; of both, when it uses both."""
    names = [name for name in PACKAGES if name in sys.modules]
    for name in names or PACKAGES:
        safely(lambda name=name: importlib.import_module(f"{name}.loggers.logger"))  # type: ignore[misc]
    modules = [sys.modules.get(f"{name}.loggers.logger") for name in names or PACKAGES]
    found = [module.Logger for module in modules if module is not None]
    if not found:
        raise ImportError("ShipperLogger needs lightning or pytorch-lightning")
    return tuple(found if names else found[:1])


class ShipperLogger(*_bases()):  # type: ignore[misc]
    """Lightning's logger over a `Client`.

    project, experiment, run_id, config: as for `DistributedClient`. `client`: one of yours, which you end yourself.
    `save_dir`: where Lightning puts checkpoints, in <project>/<run id>; default: the Trainer's folder. `prefix` stands
    in front of every name, with a slash.
    """

    LOGGER_JOIN_CHAR = "/"

    def __init__(
        self,
        project: str | None = None,
        experiment: str | None = None,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        client: Client | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self._arguments: dict[str, Any] = {"project": project, "experiment": experiment, "run_id": run_id}
        self._config = config
        self._client = client
        self._is_ours = client is None
        self._save_dir = None if save_dir is None else os.fspath(save_dir)
        self._front = f"{prefix}{self.LOGGER_JOIN_CHAR}" if prefix else ""

    @property
    def experiment(self) -> Any:
        """The client; of other ranks than 0 something that takes every call and does nothing."""
        if rank_zero_only.rank != 0:
            return _Nothing()
        if self._client is None:
            self._client = LateClient(**self._arguments, config=self._config)
        return self._client

    @property
    def name(self) -> str | None:
        """The project, as checkpoints are sorted."""
        given = self._arguments["project"] if self._is_ours else self.experiment.project
        return str(given or "verl-shipper")

    @property
    def version(self) -> str | None:
        """The run id."""
        found = self.experiment.run_id if rank_zero_only.rank == 0 else self._arguments["run_id"]
        return None if found is None else str(found)

    @property
    def save_dir(self) -> str | None:
        return self._save_dir

    @rank_zero_only  # type: ignore[untyped-decorator]
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        named = {f"{self._front}{name}": value for name, value in metrics.items()} if self._front else dict(metrics)
        self.experiment.log(named, step=step)

    @rank_zero_only  # type: ignore[untyped-decorator]
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        values = params
        if isinstance(params, argparse.Namespace):
            values = vars(params)
        if not isinstance(values, Mapping):
            values = safely(lambda: dict(params)) or {"params": str(params)}
        client = self.experiment
        if not (isinstance(client, LateClient) and client.add_config(values)):
            client.log_text(HYPERPARAMETERS, str(dict(values)))

    @rank_zero_only  # type: ignore[untyped-decorator]
    def finalize(self, status: str) -> None:
        if self._client is not None and self._is_ours and status != _REQUEUED:
            self._client.finish(exit_code=int(status != "success"), timeout_s=FINISH_S)


class _Nothing:
    """Takes every call, item and attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, _: Any) -> Any:
        return self
