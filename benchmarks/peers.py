"""Who is measured: ours, the peers, and the limit. A new subject is one function and one line in SUBJECTS.

A subject is opened in an empty folder of its own, in a process of its own, offline, with telemetry off. It gives back
what a trainer would call for each step, and how to end. What it buys for its price differs; README.md says so.

Must not know: clocks, statistics. On failure: the exception of the SDK; a missing package is `is_installed() == False`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Metrics: TypeAlias = dict[str, float]
Log: TypeAlias = Callable[[Metrics, int], object]
Close: TypeAlias = Callable[[], object]

QUIET = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "TRACKIO_TELEMETRY": "0",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """`daemon` is the state of verl-shipper's daemon during the measurement; peers have none."""

    name: str
    module: str
    open: Callable[[str], tuple[Log, Close]]
    daemon: str = ""

    @property
    def is_ours(self) -> bool:
        return self.module == "verl_shipper_client"

    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


def _verl_shipper(folder: str) -> tuple[Log, Close]:
    from verl_shipper_client import Client

    # Where the daemon is, the environment says, as it does for a trainer.
    client = Client("benchmark", "log-latency", run_id=os.path.basename(folder))
    return client.log, lambda: client.finish(exit_code=0, timeout_s=0.1)


def _limit(folder: str) -> tuple[Log, Close]:
    """No framing, no checksum, no lock, no conversion: what remains is MessagePack and write(2)."""
    import msgpack

    pack = msgpack.Packer().pack
    fd = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return lambda data, step: os.write(fd, pack((step, data))), lambda: os.close(fd)


def _wandb(folder: str) -> tuple[Log, Close]:
    import wandb

    settings = wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off", x_save_requirements=False)
    run = wandb.init(project="benchmark", mode="offline", dir=folder, settings=settings)
    return run.log, run.finish


def _mlflow(folder: str) -> tuple[Log, Close]:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.set_experiment("benchmark")
    mlflow.start_run()
    return lambda data, step: mlflow.log_metrics(data, step, synchronous=True), mlflow.end_run


def _swanlab(folder: str) -> tuple[Log, Close]:
    import swanlab

    run = swanlab.init(project="benchmark", mode="offline", log_dir=folder)
    return run.log, run.finish


def _trackio(folder: str) -> tuple[Log, Close]:
    os.environ["TRACKIO_DIR"] = folder
    import trackio

    run = trackio.init(project="benchmark", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    return run.log, run.finish


SUBJECTS = (
    Subject("verl-shipper, daemon healthy", "verl_shipper_client", _verl_shipper, daemon="healthy"),
    Subject("verl-shipper, daemon stopped", "verl_shipper_client", _verl_shipper, daemon="stopped"),
    Subject("verl-shipper, daemon absent", "verl_shipper_client", _verl_shipper, daemon="absent"),
    Subject("limit: msgpack + write(2)", "msgpack", _limit),
    Subject("wandb offline", "wandb", _wandb),
    Subject("mlflow sync sqlite", "mlflow", _mlflow),
    Subject("swanlab offline", "swanlab", _swanlab),
    Subject("trackio", "trackio", _trackio),
)
