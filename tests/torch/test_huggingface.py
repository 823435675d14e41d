"""A real Trainer of Hugging Face with a tiny model: its configuration, metrics at their steps, its end, trials."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support import oracle
from support.daemon import Daemon
from support.site import Site
from support.trainer import run_script

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

TRAIN = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from verl_shipper_client.torch.huggingface import ShipperCallback

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5 and sys.argv[2] == "fail":
            raise RuntimeError("as told")
        return {"input_ids": torch.arange(8), "labels": torch.arange(8)}

if __name__ == "__main__":
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    arguments = TrainingArguments(
        output_dir=sys.argv[1], run_name="tiny", num_train_epochs=1, per_device_train_batch_size=2, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", eval_strategy="epoch", disable_tqdm=True,
        hub_token="hf_secret123",
    )
    callback = ShipperCallback("p", run_id="r", config={"data": "count"})
    trainer = Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[callback])
    trainer.train()
    trainer.evaluate(metric_key_prefix="test")
"""
ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _train(site: Site, how: str, code: int, logged: int) -> list[Any]:
    with Daemon(site, *site.file_backend()) as daemon:
        run_script(site, TRAIN, site.root / "model", how, env=ENV, code=code, timeout_s=120)
        status = daemon.wait_settled(logged)
    oracle.assert_law(status, pending=0)
    return list(oracle.read_lines(site.output("p", "tiny", "r")))


def test_a_training_brings_its_configuration_its_metrics_and_its_end(site: Site) -> None:
    lines = _train(site, "well", 0, 9)

    (start,) = oracle.of_kind(lines, "run_start")
    config = start.data["config"]
    assert (config["data"], config["learning_rate"], config["model"]["n_embd"]) == ("count", 5e-05, 8)
    assert "hf_secret123" not in str(config)
    assert [step for step, _ in oracle.values(lines, "train/loss")] == [1, 2, 3, 4]
    assert [step for step, _ in oracle.values(lines, "eval/loss")] == [4]
    assert [step for step, _ in oracle.values(lines, "test/loss")] == [4], "after the end of the training"
    assert [line.data["exit_code"] for line in oracle.of_kind(lines, "run_finish")] == [0]


def test_a_training_that_fails_ends_the_run_as_failed(site: Site) -> None:
    lines = _train(site, "fail", 1, 2)

    assert [line.data["exit_code"] for line in oracle.of_kind(lines, "run_finish")] == [1]


class _Client:
    """Notes what it is told."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.arguments, self.more = arguments, more
        self.logged: list[Any] = []
        self.ends: list[Any] = []

    def log(self, data: Any, step: Any = None) -> None:
        self.logged.append((data, step))

    def finish(self, exit_code: Any = None, timeout_s: float = 5.0) -> bool:
        self.ends.append(exit_code)
        return True


def _state(**changed: Any) -> Any:
    state = {"is_world_process_zero": True, "global_step": 3, "is_hyper_param_search": False, "trial_name": None}
    return SimpleNamespace(**(state | changed))


def test_other_processes_than_the_worlds_first_log_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_shipper_client.torch import huggingface

    callback = huggingface.ShipperCallback("p")
    state = _state(is_world_process_zero=False)

    callback.on_train_begin(object(), state, None, model=None)
    callback.on_log(object(), state, None, logs={"loss": 1.0})
    callback.on_train_end(object(), state, None)

    assert callback.client is None


def test_each_trial_of_a_search_is_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_shipper_client.torch import huggingface

    made: list[_Client] = []

    def make(*arguments: Any, **more: Any) -> _Client:
        made.append(_Client(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(huggingface, "DistributedClient", make)
    callback = huggingface.ShipperCallback("p", "e", run_id="r")

    for trial in ("run-0", None):
        state = _state(is_hyper_param_search=True, trial_name=trial)
        callback.on_train_begin(object(), state, None)
        callback.on_log(object(), state, None, logs={"loss": 1.0, "eval_loss": 2.0})
        callback.on_train_end(object(), state, None)

    assert [each.arguments[1] for each in made] == ["e-run-0", "e-trial-2"]
    assert [each.arguments[3] for each in made] == ["r-run-0", "r-trial-2"]
    assert made[0].logged == [({"train/loss": 1.0, "eval/loss": 2.0}, 3)]
    assert all(each.ends for each in made)


def test_a_client_of_ones_own_is_ones_own_to_end() -> None:
    from verl_shipper_client.torch import huggingface

    client: Any = _Client()
    callback = huggingface.ShipperCallback(client=client)

    callback.on_train_begin(object(), _state(), None)
    callback.on_log(object(), _state(), None, logs={"rewards/format/mean": 0.5})
    callback.on_train_end(object(), _state(), None)

    assert client.logged == [({"train/rewards/format/mean": 0.5}, 3)]
    assert client.ends == []
