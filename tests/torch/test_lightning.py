"""A real fit of Lightning, under both of its names: parameters, metrics at their steps, the end as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support import oracle
from support.daemon import Daemon
from support.site import Site
from support.trainer import run_script

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

MODEL = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import {package} as pl
from verl_shipper_client import Client
from verl_shipper_client.torch.lightning import ShipperLogger

class Tiny(pl.LightningModule):
    def __init__(self, width=4, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        if index == {fail_at}:
            raise RuntimeError("as told")
        return loss

    def validation_step(self, batch, index):
        self.log("val/loss", self.layer(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

def loader():
    return torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)

def trainer(logger, **more):
    return pl.Trainer(
        logger=logger, max_epochs=2, accelerator="cpu", devices=1, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, **more,
    )
"""
FIT = """
logger = ShipperLogger("p", "e", run_id="r", config={"data": "ones"}, save_dir=sys.argv[1])
assert isinstance(logger, pl.loggers.Logger)
made = trainer(logger)
made.fit(Tiny(), loader(), loader())
assert made.checkpoint_callback.dirpath.endswith("/p/r/checkpoints"), made.checkpoint_callback.dirpath
made.validate(made.model, loader())
"""
FAIL = """
logger = ShipperLogger("p", "e", run_id="r", prefix="tiny")
trainer(logger, enable_checkpointing=False).fit(Tiny(), loader())
"""
# Two ranks, started by Lightning itself: only the first one logs. The client is the user's own, and the user ends it.
RANKS = """
if __name__ == "__main__":
    client = Client("p", "e", run_id="r", rank=0) if int(__import__("os").environ.get("LOCAL_RANK", 0)) == 0 else None
    logger = ShipperLogger(client=client) if client else ShipperLogger("p", "e", run_id="r")
    pl.Trainer(
        logger=logger, max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    ).fit(Tiny(), loader())
    if client:
        client.log({"after": 1.0}, step=9)
        client.finish(exit_code=5)
"""
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _fit(site: Site, body: str, package: str = "lightning.pytorch", fail_at: int = -1, code: int = 0) -> list[Any]:
    script = MODEL.format(package=package, fail_at=fail_at) + body
    with Daemon(site, *site.file_backend(), "--set", "sampling.rank=all") as daemon:
        result = run_script(site, script, site.root / "saved", env=ENV, code=code, timeout_s=120)
        status = daemon.wait_until(
            lambda status: status["backends"]["file"]["logged"] and not status["backends"]["file"]["pending"]
        )
        assert "Traceback" not in result.stderr or code
    oracle.assert_law(status, pending=0)
    return list(oracle.read_lines(site.output("p", "e", "r")))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_fit_brings_its_parameters_its_metrics_and_its_end(site: Site, package: str) -> None:
    lines = _fit(site, FIT, package)

    (start,) = oracle.of_kind(lines, "run_start")
    assert start.data["config"] == {"data": "ones", "width": 4, "lr": 0.1}
    assert [step for step, _ in oracle.values(lines, "loss")] == list(range(8))
    assert len(oracle.values(lines, "val/loss")) >= 2
    (finish,) = oracle.of_kind(lines, "run_finish")
    assert finish.data["exit_code"] == 0


def test_a_fit_that_fails_ends_the_run_as_failed(site: Site) -> None:
    lines = _fit(site, FAIL, fail_at=2, code=1)

    assert [step for step, _ in oracle.values(lines, "tiny/loss")] == [0, 1]
    assert [line.data["exit_code"] for line in oracle.of_kind(lines, "run_finish")] == [1]


def test_of_two_ranks_the_first_logs_and_a_client_of_ones_own_is_ones_own_to_end(site: Site) -> None:
    lines = _fit(site, RANKS)

    assert {line.rank for line in lines} == {0}
    assert [step for step, _ in oracle.values(lines, "loss")] == [0, 1]
    (text,) = oracle.of_kind(lines, "text")
    assert "'lr': 0.1" in json.dumps(text.data), "parameters that come after the start are a text"
    assert oracle.values(lines, "after") == [(9, 1.0)]
    assert [line.data["exit_code"] for line in oracle.of_kind(lines, "run_finish")] == [5]
