"""A real verl job, its command line as it was, beside a daemon: all is at a real MLflow server, and on its pages.

The job lists wandb and traces to weave, neither of which is installed; a collector takes connections and never answers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.browser import Browser
from support.daemon import without_samples
from support.mlflow_server import MlflowServer
from support.site import Site
from support.verl_job import Finished, job_environment, ppo_overrides, ray_folder, ray_overrides, run_command

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]

TRACKERS = ['trainer.logger=["console","wandb"]']
TRACES = ["actor_rollout_ref.rollout.trace.backend=weave", "actor_rollout_ref.rollout.trace.token2text=True"]
LOG_PROBS = ["actor_rollout_ref.rollout.calculate_log_probs=True"]
TRAJECTORIES = 2 * 4 * 2 + 2 * 4  # two steps of four prompts, two rollouts each; two validations of four
DRAIN_S = 20.0  # what a collector that never answers may cost at the end


@dataclass(frozen=True)
class Shipped:
    """A job that is over, and where its records are."""

    site: Site
    server: MlflowServer
    finished: Finished

    def mlflow(self) -> Any:
        import mlflow

        mlflow.set_tracking_uri(self.server.uri)
        return mlflow

    def run(self) -> Any:
        client = self.mlflow().MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
        return run

    def traces(self, condition: str = "") -> list[Any]:
        run = self.run()
        found: list[Any] = self.mlflow().search_traces(
            locations=[run.info.experiment_id],
            run_id=run.info.run_id,
            filter_string=condition or None,
            return_type="list",
            max_results=500,
        )
        return found

    def account(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "verl_shipper", "status", "--json"]
        told = subprocess.run(command, env=self.site.env(), capture_output=True, check=True, timeout=60)
        backends: dict[str, Any] = json.loads(told.stdout)["backends"]
        return backends


@pytest.fixture(scope="module")
def job(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shipped]:
    """One job for all tests below."""
    folder = tmp_path_factory.mktemp("shipped")
    site = Site(folder / "site")
    server = MlflowServer(folder / "mlflow")
    server.start()
    mute = socket.create_server(("127.0.0.1", 0))
    try:
        with ray_folder() as ray:
            job = [*ppo_overrides(inputs, folder), *ray_overrides(ray), *TRACKERS, *TRACES, *LOG_PROBS]
            command = [sys.executable, "-m", "verl_shipper", "run", "--drain-timeout", str(DRAIN_S)]
            command += without_samples([])
            command += site.mlflow_backend(server.uri)
            command += [
                "--backend",
                "otlp",
                "--set",
                f"backends.otlp.endpoint=http://127.0.0.1:{mute.getsockname()[1]}",
            ]
            command += ["--", sys.executable, "-m", "verl.trainer.main_ppo", *job]
            environment = job_environment(folder) | {key: value for key, value in site.env().items() if key != "PATH"}
            yield Shipped(site, server, run_command(command, folder, environment))
    finally:
        mute.close()
        server.stop()


def test_the_job_ends_well_though_a_tracker_never_answers(job: Shipped) -> None:
    job.finished.check()
    assert "instead of calling wandb" in job.finished.output
    assert "instead of calling weave" in job.finished.output


def test_metrics_are_there_at_their_steps_and_the_run_has_succeeded(job: Shipped) -> None:
    run, client = job.run(), job.mlflow().MlflowClient()

    def steps(name: str) -> list[int]:
        return [point.step for point in client.get_metric_history(run.info.run_id, name)]

    assert run.info.status == "FINISHED"
    assert steps("actor/grad_norm") == [1, 2]
    assert steps("val-core/sums/acc/mean_at_1") == [0, 2]
    assert [point.value for point in client.get_metric_history(run.info.run_id, "training/global_step")] == [1.0, 2.0]


def test_the_configuration_is_there_as_params(job: Shipped) -> None:
    params = job.run().data.params
    assert params["algorithm/adv_estimator"] == "grpo"
    assert params["trainer/experiment_name"] == "first"
    assert params["actor_rollout_ref/rollout/n"] == "2"


def test_validations_are_there_with_their_texts(job: Shipped, tmp_path: Path) -> None:
    client = job.mlflow().MlflowClient()
    for step in (0, 2):
        path = client.download_artifacts(job.run().info.run_id, f"val_generations/step_{step}.json", str(tmp_path))
        rows = json.loads(Path(path).read_text())
        assert len(rows) == 2
        assert all("What is" in row["input"] and "The answer is" in row["output"] for row in rows)
        assert {row["score"] for row in rows} == {1.0}


def test_every_trajectory_is_a_trace_of_the_run(job: Shipped) -> None:
    traces = job.traces()
    assert len(traces) == TRAJECTORIES
    assert {trace.info.tags["validate"] for trace in traces} == {"True", "False"}
    rollouts = {(t.info.tags["uid"], t.info.tags["rollout_n"]) for t in traces if t.info.tags["validate"] == "False"}
    assert len(rollouts) == 2 * 4 * 2
    assert {trace.info.tags["reward"] for trace in traces} == {"0.0", "1.0"}


def test_traces_are_found_by_their_step(job: Shipped) -> None:
    for step in (1, 2):
        trained = [trace for trace in job.traces(f"tags.step = '{step}'") if trace.info.tags["validate"] == "False"]
        assert len(trained) == 4 * 2


def test_a_trace_shows_question_tool_call_and_answer_in_text(job: Shipped) -> None:
    trace = next(trace for trace in job.traces("tags.step = '1'") if len(trace.data.spans) == 7)
    spans = trace.data.spans
    root = spans[0]
    by_id = {span.span_id: span for span in spans}
    (question,) = root.inputs["messages"]
    assert question["content"].startswith("What is ")
    assert root.outputs["messages"][0]["content"].startswith("The answer is ")
    assert root.outputs["reward_extra_info"]["format"] == "ok"
    tool = next(span for span in spans if span.name == "tool calculator")
    assert (tool.span_type, set(tool.inputs)) == ("TOOL", {"arguments"})
    assert tool.outputs["response"]["text"].isdecimal()
    assert by_id[tool.parent_id].name == "ToolAgentLoop.run"
    assert by_id[by_id[tool.parent_id].parent_id] is root
    first, second = [span for span in spans if span.name == "LLMServerClient.generate"]
    assert "<tool_call>" in first.outputs["text"]
    assert question["content"] in first.inputs["prompt_text"]
    assert question["content"] not in second.inputs["prompt_text"]  # written once
    assert tool.outputs["response"]["text"] in second.inputs["prompt_text"]
    assert second.outputs["text"].startswith("The answer is ")


def test_an_answer_without_tools_is_there_in_text_too(job: Shipped) -> None:
    trace = next(trace for trace in job.traces("tags.step = '1'") if len(trace.data.spans) == 3)
    assert trace.data.spans[0].outputs["messages"][0]["content"].startswith("The answer is ")


def test_the_account_is_exact_and_what_the_mute_collector_lacks_is_kept(job: Shipped) -> None:
    account = job.account()
    for name in ("mlflow", "otlp"):
        told = account[name]
        rest = told["sampled_out"] + told["dead_lettered"] + sum(told["dropped"].values()) + told["pending"]
        assert told["logged"] == told["delivered"] + rest
    assert account["mlflow"]["pending"] == 0
    assert account["otlp"]["pending"] > 0


def test_the_pages_of_mlflow_show_it(job: Shipped, tmp_path: Path) -> None:
    run = job.run()
    trace = next(trace for trace in job.traces("tags.step = '1'") if len(trace.data.spans) == 7)
    pictures = Path(os.environ.get("VERL_SHIPPER_TEST_PICTURES", tmp_path))
    place = f"{job.server.uri}/#/experiments/{run.info.experiment_id}"
    with Browser(tmp_path / "browser") as browser:
        browser.open(f"{place}/runs/{run.info.run_id}/model-metrics")
        browser.wait_for("first (actor/grad_norm)", "val-core/sums/acc")
        browser.click("Close")  # a panel for an assistant
        browser.settle()
        browser.shoot(pictures / "mlflow-run.png")
        browser.open(f"{place}/traces?selectedEvaluationId={trace.info.trace_id}")
        browser.wait_for("tool calculator", "ToolAgentLoop.run")
        browser.click("Got it")
        browser.click("Full screen")
        browser.wait_for("What is ", "The answer is ")
        browser.settle()
        browser.shoot(pictures / "mlflow-trace.png")
    for name in ("mlflow-run.png", "mlflow-trace.png"):
        assert (pictures / name).stat().st_size > 20_000
