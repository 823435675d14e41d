"""What a command beside the daemon names by itself, and what it is given."""

from __future__ import annotations

from importlib import metadata

import pytest

from verl_shipper.command import additions, trackers_in
from verl_shipper.config import Request
from verl_shipper.errors import ConfigError

PLUGIN = "verl_shipper_client.verl_plugin"


@pytest.mark.parametrize(
    ("argument", "names"),
    [
        ('trainer.logger=["console","mlflow"]', ["mlflow"]),
        ("trainer.logger=[console, 'wandb', swanlab]", ["wandb", "swanlab"]),
        ("+trainer.logger=mlflow", ["mlflow"]),
        ("trainer.logger=[console,shipper]", []),
        ("trainer.logger=[clearml,mlflow,mlflow]", ["mlflow"]),  # clearml is none of ours
        ("trainer.logger=", []),
        ("trainer.logger_x=[mlflow]", []),
    ],
)
def test_backends_are_those_of_ours_that_a_trainer_lists(argument: str, names: list[str]) -> None:
    assert trackers_in(["python", "-m", "verl.trainer.main_ppo", argument, "trainer.nnodes=1"]) == names


def test_the_last_argument_of_a_name_counts_as_it_does_for_the_trainer() -> None:
    assert trackers_in(["trainer.logger=[wandb]", "trainer.logger=[mlflow]"]) == ["mlflow"]


def test_a_commands_own_list_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("python", "trainer.logger=[console,mlflow]")
    monkeypatch.delenv("VERL_LOGGER", raising=False)
    assert list(Request(command=command).load().backends) == ["mlflow"]
    assert list(Request(command=command, backends=("console",)).load().backends) == ["console"]
    monkeypatch.setenv("VERL_LOGGER", "console")
    assert list(Request(command=command).load().backends) == ["console"]


def test_a_command_that_names_none_of_ours_leaves_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_LOGGER", raising=False)
    with pytest.raises(ConfigError, match="no backend chosen"):
        Request(command=("python", "trainer.logger=[console]")).load()


@pytest.mark.parametrize(
    ("version", "modules", "given"),
    [
        ("0.9.1", "", None),
        ("0.8.0", "", PLUGIN),
        ("0.7.1", "mine", f"mine,{PLUGIN}"),
        ("0.6.1", PLUGIN, None),
        ("0.5.0", "", None),
        (None, "", None),
    ],
)
def test_a_verl_that_needs_to_be_told_of_the_plugin_is_told(
    monkeypatch: pytest.MonkeyPatch, version: str | None, modules: str, given: str | None
) -> None:
    def installed(_name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(metadata, "version", installed)
    assert additions({"VERL_USE_EXTERNAL_MODULES": modules}).get("VERL_USE_EXTERNAL_MODULES") == given


def test_trackers_are_taken_over_unless_somebody_has_said_otherwise() -> None:
    assert additions({})["VERL_SHIPPER_TAKEOVER"] == "1"
    assert "VERL_SHIPPER_TAKEOVER" not in additions({"VERL_SHIPPER_TAKEOVER": "0"})
