"""Where data lands when a folder is all that was said: behind a link, in a folder of SwanLab's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.daemon import Daemon
from support.site import Site
from support.trainer import run_script

READER = Path(__file__).parents[1] / "support" / "mlflow_reader.py"
TRAINER = """
from verl_shipper_client import Client

with Client("places", "exp", run_id="r1") as client:
    for step in range(10):
        client.log({"n": float(step)}, step=step)
    client.log_generations([("question", "answer", 1.0)], step=9)
"""
RECORDS = 13


def test_mlruns_that_is_a_link_fills_the_disk_behind_it(site: Site) -> None:
    data = site.root / "data" / "mlflow" / "mlruns"
    data.mkdir(parents=True)
    old = data / "0" / "meta.yaml"
    old.parent.mkdir()
    old.write_text("experiment_id: '0'\n")
    (site.root / "mlruns").symlink_to(data)

    with Daemon(site, "--backend", "mlflow") as daemon:
        run_script(site, TRAINER)
        daemon.wait_settled(RECORDS, timeout_s=120)
        words = daemon.words()

    assert (data / "mlflow.db").stat().st_size > 0
    assert list((data / "artifacts").rglob("step_9.json"))
    assert old.read_text() == "experiment_id: '0'\n"
    assert "no tracking URI is set, runs go to" in words
    assert "old file store" in words
    command = [sys.executable, str(READER), "sqlite:///mlruns/mlflow.db", "places", "n"]
    told = subprocess.run(command, cwd=site.root, env=site.env(), capture_output=True, check=True, timeout=120)
    (run,) = json.loads(told.stdout)
    assert run["points"]["n"] == [[step, float(step)] for step in range(10)]
    assert "val_generations/step_9.json" in run["artifacts"]


def test_swanlab_without_a_key_writes_the_folder_that_was_given(site: Site) -> None:
    place = site.root / "swan-logs"

    with Daemon(site, "--backend", "swanlab", "--set", f"backends.swanlab.log_dir={place}") as daemon:
        run_script(site, TRAINER)
        daemon.wait_settled(RECORDS, timeout_s=120)
        words = daemon.words()

    assert words.count("mode local") == 1
    assert [path.name for path in place.glob("run-*")]
