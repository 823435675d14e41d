"""The examples of the guide that this project grew from, typed as they stand there, and what they promise.

Its `trainer.…` keys stand in the daemon's configuration or behind `--set`; its environment variables are the daemon's
and the trainer's. Trackers are real SDKs against our own servers, and a real MLflow database. What is not ours to test
is left out: the trainer itself, and `nohup mlflow ui`. SwanLab's `log_dir` and the link `./mlruns` have tests in
test_data_places.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from servers.process import ServerProcess
from support import oracle, swanlab_reader, wandb_reader
from support.daemon import Daemon, shipper
from support.mlflow_server import MlflowServer
from support.site import Site
from support.trainer import run_script
from verl_shipper.backends.swanlab import cuid
from verl_shipper.backends.wandb_rows import STEP_KEY

KEY = {"WANDB_API_KEY": "k" * 40, "SWANLAB_API_KEY": swanlab_reader.API_KEY}
STEPS = 250

TRAINER = """
import sys
from verl_shipper_client import Client

with Client(run_id=sys.argv[1]) as client:
    for step in range(1, int(sys.argv[2]) + 1):
        client.log({"actor/pg_loss": step / 2, "critic/score/mean": float(step)}, step=step)
        if step % 100 == 0:
            client.log({"val-core/acc": step / 1000}, step=step)
            client.log_generations([(f"question {n}", f"answer {n} at {step}", n / 40) for n in range(40)], step=step)
"""

AGENT = """
import sys
from verl_shipper_client import Client

with Client(run_id=sys.argv[1]) as client:
    for step in (1, 2):
        attributes = {"step": step, "sample_index": 7, "rollout_n": 0, "validate": False}
        asked = {"messages": [{"role": "user", "content": "What is 2+2?"}], "prompt_ids": [1, 2, 3, 2]}
        with client.span("agent_loop", inputs=asked, attributes=attributes) as root:
            with client.span("calculator", inputs={"expression": "2+2"}, attributes={"step": step}) as tool:
                tool.set_outputs({"result": "4"})
            root.set_outputs({"response_ids": [4], "thoughts": "x" * 5000, "reward": 1.0})
"""

TRACES = """
import json, sys
from mlflow.tracking import MlflowClient

client = MlflowClient(tracking_uri=sys.argv[1])
found = client.get_experiment_by_name(sys.argv[2])
told = []
for trace in client.search_traces(locations=[found.experiment_id], filter_string=sys.argv[3] or None):
    spans = [{"name": span.name, "inputs": span.inputs, "outputs": span.outputs} for span in trace.data.spans]
    told.append({"tags": trace.info.tags, "spans": spans})
print(json.dumps(told))
"""


@pytest.fixture
def wandb(site: Site) -> Iterator[ServerProcess]:
    with ServerProcess("wandb_server", site.root / "wandb-server") as server:
        yield server


@pytest.fixture
def swanlab(site: Site) -> Iterator[ServerProcess]:
    with ServerProcess("swanlab_server", site.root / "swanlab-server") as server:
        yield server


def written(site: Site, text: str) -> list[str | Path]:
    """A configuration file, as arguments."""
    path = site.root / "shipper.yaml"
    path.write_text(text)
    return ["--config", path]


def trained(site: Site, run_id: str = "r1", steps: int = STEPS, **env: str) -> None:
    run_script(site, TRAINER, run_id, steps, env=env)


def kept(every: int, last: int = STEPS) -> list[int]:
    return sorted({1, *range(every, last + 1, every), last})


def wandb_steps(server: ServerProcess, project: str, run_id: str, key: str) -> list[Any]:
    return [row[STEP_KEY] for row in wandb_reader.rows(server, project, run_id) if key in row]


def mlflow_traces(site: Site, uri: str, project: str, filtered: str = "") -> list[dict[str, Any]]:
    command = [sys.executable, "-c", TRACES, uri, project, filtered]
    told = subprocess.run(command, env=site.env(), capture_output=True, text=True, timeout=120, check=True).stdout
    return list(json.loads(told))


def test_wandb_with_key_project_name_and_proxy(site: Site, wandb: ServerProcess) -> None:
    """export WANDB_API_KEY; trainer.logger='["console","wandb"]' trainer.project_name … trainer.wandb_proxy=…"""
    overrides = [
        'trainer.logger=["console","wandb"]',
        'trainer.project_name="llm_rlhf"',
        'trainer.experiment_name="qwen2-7b-grpo"',
        "backends.wandb.settle_s=0.5",
    ]
    told = [part for override in overrides for part in ("--set", override)]
    # Nobody there: that it is used shows in the way it fails.
    proxied = [*told, "--set", "trainer.wandb_proxy=http://127.0.0.1:9"]
    env = {"WANDB_API_KEY": KEY["WANDB_API_KEY"], "WANDB_BASE_URL": wandb.url}
    with Daemon(site, *proxied, env=env) as daemon:
        trained(site, steps=20)
        status = daemon.wait_until(lambda status: "proxy" in status["backends"]["wandb"]["last_error"], 60)
        assert "127.0.0.1:9" in status["backends"]["wandb"]["last_error"]
        daemon.stop()
        daemon.arguments = told
        daemon.start()
        status = daemon.wait_settled(22, timeout_s=90)
    assert set(status["backends"]) == {"console", "wandb"}
    assert wandb_steps(wandb, "llm_rlhf", "r1", "actor/pg_loss") == list(range(1, 21))
    assert wandb_reader.run(wandb, "llm_rlhf", "r1")["display_name"] == "qwen2-7b-grpo"
    assert "critic/score/mean:" in daemon.all_words()  # the console


def test_mlflow_in_a_database_with_traces_decoded(site: Site, tmp_path: Path) -> None:
    """export MLFLOW_TRACKING_URI=sqlite:////…; trainer.logger='["console","mlflow"]' … trace.{backend,token2text}"""
    database = f"sqlite:////{str(tmp_path).lstrip('/')}/mlruns.db"
    overrides = {
        "trainer.logger": '["console","mlflow"]',
        "trainer.project_name": '"agentic_rl"',
        "actor_rollout_ref.rollout.trace.backend": "mlflow",
        "actor_rollout_ref.rollout.trace.token2text": "True",
        "actor_rollout_ref.model.path": str(model(tmp_path)),
    }
    told = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    with Daemon(site, *told, env={"MLFLOW_TRACKING_URI": database}) as daemon:
        trained(site, "curves", 10)
        run_script(site, AGENT, "traced")
        status = daemon.wait_settled(12 + 6, timeout_s=120)

    assert status["backends"]["console"]["sampled_by"] == {"traces": 4}
    assert oracle.mlflow_run(database, "agentic_rl", "curves", "actor/pg_loss").history("actor/pg_loss")[-1] == (
        10,
        5.0,
    )
    (trace,) = mlflow_traces(site, database, "agentic_rl", "tags.step = '2'")
    spans = {span["name"]: span for span in trace["spans"]}
    assert spans["agent_loop"]["inputs"]["prompt_text"].split() == ["What", "2", "+", "2"]
    (answer,) = spans["agent_loop"]["outputs"]["messages"]  # as a conversation: MLflow shows it as one
    assert answer == {"role": "assistant", "content": "4"}
    assert spans["calculator"]["outputs"] == {"result": "4"}


def test_many_ranks_under_a_launcher_upload_once(site: Site, wandb: ServerProcess) -> None:
    """--nproc_per_node=8 … trainer.logger='["console","wandb"]': only the main rank uploads, nothing is there twice."""
    told = ["--set", 'trainer.logger=["console","wandb"]', "--set", 'trainer.project_name="distributed_rlhf"']
    told += ["--set", 'trainer.experiment_name="qwen2-7b-dp8"', "--set", "backends.wandb.settle_s=0.5"]
    env = {"WANDB_API_KEY": KEY["WANDB_API_KEY"], "WANDB_BASE_URL": wandb.url}
    with Daemon(site, *told, env=env) as daemon:
        for rank in range(8):
            trained(site, "dp8", 10, RANK=str(rank), WORLD_SIZE="8")
        status = daemon.wait_settled(8 * 12, timeout_s=120)
    oracle.assert_law(status, pending=0)
    assert status["backends"]["wandb"]["sampled_by"] == {"rank": 7 * 10}
    assert wandb_steps(wandb, "distributed_rlhf", "dp8", "actor/pg_loss") == list(range(1, 11))


def test_traces_are_cut_and_keep_their_prompt_as_configured(
    site: Site, mlflow_server: MlflowServer, tmp_path: Path
) -> None:
    """actor_rollout_ref.rollout.trace: {backend: mlflow, token2text: True, max_length: 2048, include_prompt: True}"""
    project = f"agents-{time.time_ns()}"
    text = f"""
backends:
  mlflow: {{tracking_uri: "{mlflow_server.uri}"}}
trainer:
  project_name: {project}
actor_rollout_ref:
  model:
    path: {model(tmp_path)}
  rollout:
    trace:
      backend: mlflow
      token2text: True
      max_length: 2048
      include_prompt: True
"""
    with Daemon(site, *written(site, text)) as daemon:
        run_script(site, AGENT, "with")
        daemon.wait_settled(6, timeout_s=90)
        site.root.joinpath("shipper.yaml").write_text(text.replace("include_prompt: True", "include_prompt: False"))
        daemon.stop()
        daemon.start()
        run_script(site, AGENT, "without")
        daemon.wait_settled(12, timeout_s=90)

    roots = [
        span
        for trace in mlflow_traces(site, mlflow_server.uri, project)
        for span in trace["spans"]
        if span["name"] == "agent_loop"
    ]
    assert len(roots) == 4
    for root in roots:
        assert root["outputs"]["thoughts"] == "x" * 2048 + "… [2952 characters cut]"
    shown = [root["inputs"]["messages"] for root in roots]
    assert shown.count([{"role": "user", "content": "What is 2+2?"}]) == 2
    assert shown.count("[prompt left out]") == 2


def test_the_cost_of_storage_is_what_the_file_says(site: Site, wandb: ServerProcess) -> None:
    """trainer: {log_val_generations: 20, log_frequency: 100, wandb: {save_code: False, log_artifact: False}}"""
    text = f"""
trainer:
  logger: ['file', 'wandb']
  project_name: cheap
  log_val_generations: 20
  log_frequency: 100
  wandb:
    save_code: False
    log_artifact: False
backends:
  file: {{dir: {site.out}}}
  wandb: {{settle_s: 0.5}}
"""
    env = {"WANDB_API_KEY": KEY["WANDB_API_KEY"], "WANDB_BASE_URL": wandb.url}
    with Daemon(site, *written(site, text), env=env) as daemon:
        trained(site)
        status = daemon.wait_settled(2 + STEPS + 4, timeout_s=120)
    oracle.assert_law(status, pending=0)
    assert wandb_steps(wandb, "cheap", "r1", "actor/pg_loss") == kept(100)
    assert wandb_steps(wandb, "cheap", "r1", "val-core/acc") == [100, 200]
    tables = [line.data["rows"] for line in _lines(site) if line.kind == "generations"]
    questions = [[row[0] for row in rows] for rows in tables]
    assert [len(rows) for rows in questions] == [20, 20]
    assert questions[0] == questions[1]
    assert not wandb.state().get("artifacts"), "tables are files of the run, not artifacts"


@pytest.mark.parametrize(
    ("env", "names", "project"),
    [
        ({}, {"console"}, "default"),
        ({"VERL_LOGGER": "console"}, {"console"}, "default"),
        ({"VERL_LOGGER": "console,file", "VERL_PROJECT": "rlhf-production"}, {"console", "file"}, "rlhf-production"),
    ],
)
def test_the_environment_chooses_trackers_and_project(
    env: Mapping[str, str], names: set[str], project: str, site: Site
) -> None:
    """logger: ${oc.env:VERL_LOGGER, 'console'}, project_name: ${oc.env:VERL_PROJECT, 'default'}"""
    text = """
trainer:
  logger: ${oc.env:VERL_LOGGER, 'console'}
  project_name: ${oc.env:VERL_PROJECT, 'default'}
"""
    more = f"backends: {{console: {{}}, file: {{dir: {site.out}}}}}\n" if "file" in names else ""
    arguments = written(site, text + more)
    shown = shipper(site, "config", "show", *arguments, env=env)
    assert shown.returncode == 0, shown.stderr
    with Daemon(site, *arguments, env=env) as daemon:
        trained(site, steps=3)
        status = daemon.wait_settled(5)
    assert set(status["backends"]) == names
    assert {run["project"] for run in status["runs"].values()} == {project}


def test_three_trackers_at_once_complete_each_other(
    site: Site, swanlab: ServerProcess, mlflow_server: MlflowServer
) -> None:
    """logger: ['console', 'mlflow', 'swanlab']"""
    project = f"three-{time.time_ns()}"
    text = f"""
trainer:
  logger: ['console', 'mlflow', 'swanlab']
  project_name: {project}
backends:
  swanlab: {{settle_s: 0.5}}
"""
    env = {
        "MLFLOW_TRACKING_URI": mlflow_server.uri,
        "SWANLAB_API_HOST": swanlab.url,
        "SWANLAB_API_KEY": KEY["SWANLAB_API_KEY"],
    }
    with Daemon(site, *written(site, text), env=env) as daemon:
        trained(site, steps=100)
        status = daemon.wait_settled(2 + 100 + 2, timeout_s=120)
    oracle.assert_law(status, pending=0)
    run = oracle.mlflow_run(mlflow_server.uri, project, "r1", "actor/pg_loss")
    assert len(run.history("actor/pg_loss")) == 100
    assert "val_generations/step_100.json" in run.artifacts
    assert len(swanlab_reader.points(swanlab, cuid("r1"), "actor/pg_loss")) == 100
    assert daemon.all_words().count("actor/pg_loss:") == 100


def model(folder: Path) -> Path:
    """A model's folder with a tokenizer of four words."""
    from tokenizers import Tokenizer, models

    place = folder / "model"
    if not place.exists():
        place.mkdir()
        tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "What": 1, "2": 2, "+": 3, "4": 4}, unk_token="<s>"))
        tokenizer.save(str(place / "tokenizer.json"))
    return place


def _lines(site: Site) -> list[oracle.Line]:
    return [line for path in sorted(site.out.rglob("*.jsonl")) for line in oracle.read_lines(path)]
