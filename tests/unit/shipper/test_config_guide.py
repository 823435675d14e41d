"""The examples of the guide to trackers, as an operator would hand them to the daemon: each means what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_shipper.config import Config, check_backends, load_config


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VERL_LOGGER", "VERL_PROJECT", "VERL_EXPERIMENT", "MLFLOW_TRACKING_URI", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def _told(*overrides: str) -> Config:
    return _checked(load_config(None, overrides))


def _written(tmp_path: Path, content: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(content, encoding="utf-8")
    return _checked(load_config(str(path)))


def _checked(config: Config) -> Config:
    check_backends(config)
    return config


def test_wandb_behind_a_proxy() -> None:
    found = _told(
        'trainer.logger=["console","wandb"]',
        "trainer.project_name=llm_rlhf",
        "trainer.experiment_name=qwen2-7b-grpo",
        "trainer.wandb_proxy=http://proxy.example.com:8080",
    )

    assert found.backends == {"console": {}, "wandb": {"wandb_proxy": "http://proxy.example.com:8080"}}
    assert (found.project, found.experiment) == ("llm_rlhf", "qwen2-7b-grpo")


def test_mlflow_on_a_local_database_with_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////data/mlflow/mlruns.db")
    found = _told(
        'trainer.logger=["console","mlflow"]',
        "trainer.project_name=agentic_rl",
        "actor_rollout_ref.rollout.trace.backend=mlflow",
        "actor_rollout_ref.rollout.trace.token2text=True",
    )

    assert found.backends == {"console": {}, "mlflow": {}}
    assert found.sampling["mlflow"] == {"traces": {"token2text": True}}
    assert found.sampling["console"]["traces"]["enabled"] is False


def test_swanlab_with_a_local_folder(tmp_path: Path) -> None:
    found = _written(
        tmp_path,
        """
trainer:
  logger: ['console', 'swanlab']
  project_name: "verl_research"
  experiment_name: "multiturn_training"
  swanlab:
    log_dir: "./swanlab_logs"  # where local logs go
""",
    )

    assert found.backends == {"console": {}, "swanlab": {"log_dir": "./swanlab_logs"}}
    assert (found.project, found.experiment) == ("verl_research", "multiturn_training")


def test_traces_of_many_turns_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    found = _written(
        tmp_path,
        """
trainer: {logger: [mlflow]}
actor_rollout_ref:
  rollout:
    trace:
      backend: mlflow          # where traces go
      token2text: True         # text instead of token ids
      max_length: 2048         # of one text
      include_prompt: True     # the whole conversation
""",
    )

    assert found.sampling["mlflow"]["traces"] == {"token2text": True, "max_length": 2048, "include_prompt": True}


def test_what_storage_costs(tmp_path: Path) -> None:
    found = _written(
        tmp_path,
        """
trainer:
  logger: [wandb]
  log_val_generations: 20
  log_frequency: 100
  wandb:
    save_code: False
    log_artifact: False
""",
    )

    assert found.backends == {"wandb": {"save_code": False, "log_artifact": False}}
    assert found.sampling == {"wandb": {"log_val_generations": 20, "log_frequency": 100}}


@pytest.mark.parametrize(
    ("environment", "names", "project"),
    [
        ({}, ["console"], "default"),
        ({"VERL_LOGGER": "console"}, ["console"], "default"),
        ({"VERL_LOGGER": "console,wandb", "VERL_PROJECT": "rlhf-production"}, ["console", "wandb"], "rlhf-production"),
    ],
)
def test_environments_are_kept_apart_by_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], names: list[str], project: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = _written(
        tmp_path,
        """
trainer:
  logger: ${oc.env:VERL_LOGGER, 'console'}
  project_name: ${oc.env:VERL_PROJECT, 'default'}
""",
    )

    assert list(found.backends) == names
    assert found.project == project


def test_several_tools_complete_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")

    assert list(_written(tmp_path, "trainer:\n  logger: ['console', 'mlflow', 'swanlab']\n").backends) == [
        "console",
        "mlflow",
        "swanlab",
    ]
