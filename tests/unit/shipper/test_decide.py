"""What the place and the environment that the daemon was started in make of the settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from verl_shipper.backends import load_backend
from verl_shipper.backends.base import Decided
from verl_shipper.checks import Level
from verl_shipper.config import load_config
from verl_shipper.doctor import examine
from verl_shipper.errors import ConfigError

VARIABLES = (
    *("WANDB_MODE", "WANDB_API_KEY", "SWANLAB_MODE", "SWANLAB_API_KEY", "SWANLAB_LOG_DIR", "CREDENTIALS_DIRECTORY"),
    *("MLFLOW_TRACKING_URI", "NETRC"),
)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def decided(name: str, **settings: Any) -> Decided:
    backend = load_backend(name)
    backend.check(settings)
    return backend.decide(settings)


# --- modes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode"),
    [("wandb", "offline"), ("wandb", "Offline "), ("wandb", "dryrun"), ("swanlab", "offline"), ("swanlab", "local")],
)
def test_the_trackers_own_variable_gives_the_mode(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{name.upper()}_MODE", mode)
    backend = load_backend(name)
    backend.check({})

    places = [finding.what for finding in backend.diagnose({})]

    assert not any("key" in what or "https://" in what for what in places), places


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_setting_goes_before_the_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{name.upper()}_MODE", "disabled")

    assert decided(name, mode="offline").settings["mode"] == "offline"


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
@pytest.mark.parametrize("how", ["variable", "setting"])
def test_a_tracker_that_is_told_to_be_off_is_no_place_to_deliver_to(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "variable":
        monkeypatch.setenv(f"{name.upper()}_MODE", "disabled")
    place = f"{name.upper()}_MODE" if how == "variable" else f"backends.{name}.mode"

    with pytest.raises(ConfigError, match="told to be off") as refused:
        decided(name, **({"mode": "disabled"} if how == "setting" else {}))

    assert f"[{place}]; take {name} out of the backends" in refused.value.line()


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_an_unknown_mode_is_refused_with_its_origin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{name.upper()}_MODE", "sometimes")

    with pytest.raises(ConfigError, match=f"{name.upper()}_MODE"):
        decided(name)


# --- SwanLab without a key ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["setting", "variable"])
def test_a_folder_and_no_key_mean_a_folder(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "logs"
    settings = {"log_dir": str(place)} if how == "setting" else {}
    if how == "variable":
        monkeypatch.setenv("SWANLAB_LOG_DIR", str(place))

    made = decided("swanlab", **settings)

    assert made.settings["mode"] == "local"
    (note,) = made.notes
    assert str(place) in note
    assert "SWANLAB_API_KEY" in note


def test_with_a_key_a_mode_or_without_a_folder_it_is_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decided("swanlab") == Decided({})
    assert decided("swanlab", log_dir="logs", mode="online").settings["mode"] == "online"
    missing = {"log_dir": "logs", "api_key_file": str(tmp_path / "nowhere")}
    assert decided("swanlab", **missing) == Decided(missing)
    monkeypatch.setenv("SWANLAB_API_KEY", "k" * 21)
    assert decided("swanlab", log_dir="logs") == Decided({"log_dir": "logs"})


def test_doctor_shows_what_was_decided(tmp_path: Path) -> None:
    config = load_config(None, [f"backends.swanlab.log_dir={tmp_path}/logs", f"state_dir={tmp_path}/state"])

    lines = [line for line in examine(config) if line.topic == "swanlab"]

    assert lines[0].finding.level is Level.WARN
    assert "mode local" in lines[0].finding.what
    assert not any("no key" in line.finding.what for line in lines[1:])


# --- MLflow and folders ---------------------------------------------------------------------------------------


def test_mlruns_in_the_working_directory_gets_a_database(tmp_path: Path) -> None:
    (tmp_path / "mlruns").mkdir()

    made = decided("mlflow")

    assert made.settings["tracking_uri"] == f"sqlite:///{os.path.realpath(tmp_path)}/mlruns/mlflow.db"
    assert made.settings["artifact_location"] == f"{os.path.realpath(tmp_path)}/mlruns/artifacts"
    (note,) = made.notes
    assert "no tracking URI is set" in note


@pytest.mark.parametrize(
    "uri", ["", "./mlruns", "mlruns", "file:./mlruns", "file:mlruns", "file://DATA", "DATA", "DATA/"]
)
def test_a_link_to_a_big_disk_is_followed(tmp_path: Path, uri: str) -> None:
    data = tmp_path / "data" / "ml runs"
    data.mkdir(parents=True)
    (tmp_path / "mlruns").symlink_to(data)

    made = decided("mlflow", **({"tracking_uri": uri.replace("DATA", str(data))} if uri else {}))

    real = os.path.realpath(data)
    assert made.settings["tracking_uri"] == f"sqlite:///{real}/mlflow.db"
    assert made.settings["artifact_location"] == f"{real}/artifacts"


def test_an_old_file_store_is_left_alone_and_named(tmp_path: Path) -> None:
    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text("experiment_id: 0\n")

    (note,) = decided("mlflow", tracking_uri="./mlruns").notes

    assert "old file store; they are not touched" in note
    assert "migrate-filestore" in note


def test_a_uri_that_is_given_goes_before_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlruns").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000/")

    assert decided("mlflow") == Decided({})


def test_a_link_that_leads_nowhere_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "mlruns").symlink_to(tmp_path / "nowhere")

    with pytest.raises(ConfigError, match="no tracking URI"):
        decided("mlflow")
