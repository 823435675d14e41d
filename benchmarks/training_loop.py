"""A small training run in torch on one thread, which logs every step: what training_interference.py times.

    stdin   "steps N"          stdout   "ready" once, then for each order [ns of each step, ns of CPU time] as JSON

A step is the same work every time: a two-layer transformer on a fixed batch, forward, backward, optimizer, and the
twenty numbers that a trainer logs. Its time is that of the whole turn of the loop, `log()` included. Processor time is
that of the whole process, with the threads of whoever logs.

Must not know: trackers' health, other subjects. On failure: the exception.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Log = Callable[[dict[str, float], int], object]
WARM_UP_STEPS = 20
NAMES = [f"{group}/metric_{n}/mean" for group in ("actor", "critic", "timing_s", "perf") for n in range(5)]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SDKs have to say is no answer
    log = LOGGERS[sys.argv[1]](sys.argv[2])
    train = Training()
    for _ in range(WARM_UP_STEPS):
        train.step(log)
    answers.write("ready\n")
    answers.flush()
    for order in sys.stdin:
        cpu_ns = time.process_time_ns()
        times_ns = [train.step(log) for _ in range(int(order.split()[1]))]
        answers.write(json.dumps([times_ns, time.process_time_ns() - cpu_ns]) + "\n")
        answers.flush()


class Training:
    """The model and where it stands."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        torch.manual_seed(1)
        layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self._model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._input = torch.randn(4, 32, 128)
        self._target = torch.randn(4, 32, 128)
        self._loss: Any = torch.nn.functional.mse_loss
        self._number = 0

    def step(self, log: Log) -> int:
        """One turn of the loop; its ns."""
        begun_ns = time.perf_counter_ns()
        loss = self._loss(self._model(self._input), self._target)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        value = loss.item()
        log({name: value + place for place, name in enumerate(NAMES)}, self._number)
        self._number += 1
        return time.perf_counter_ns() - begun_ns


def _bare(_folder: str) -> Log:
    return lambda _data, _step: None


def _shipper(_folder: str) -> Log:
    from verl_shipper_client import Client

    return Client("benchmark", "interference").log


def _wandb(folder: str) -> Log:
    import wandb

    log: Log = wandb.init(project="benchmark", mode="offline", dir=folder).log
    return log


def _mlflow(_folder: str) -> Log:
    import mlflow

    mlflow.set_experiment("benchmark")
    mlflow.start_run()
    return lambda data, step: mlflow.log_metrics(data, step, synchronous=True)


LOGGERS: dict[str, Callable[[str], Log]] = {
    "bare": _bare,
    "verl-shipper": _shipper,
    "wandb offline": _wandb,
    "mlflow sync": _mlflow,
}

if __name__ == "__main__":
    main()
