"""What is in effect: every key, where it comes from, no secret; and that it is a configuration again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from verl_shipper.config import Request
from verl_shipper.config_show import Shown, effective, json_of, lines_of

CONTENT = """\
backends:
  file:
    dir: /data/records
  wandb:
    tags: [a, 'b: c']
    wandb_proxy: http://user:very-secret@proxy:8080
sampling:
  log_frequency: {'*': 100, actor/*: 10}
trainer:
  project_name: ${oc.env:VERL_SHIPPER_TEST_NAME}
"""


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Shown]:
    monkeypatch.setenv("VERL_SHIPPER_TEST_NAME", "on")
    monkeypatch.setenv("VERL_EXPERIMENT", "from-env")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setenv("VERL_SHIPPER_STATE_DIR", str(tmp_path / "state"))
    for name in ("WANDB_BASE_URL", "VERL_SHIPPER_SPOOL_DIR", "VERL_SHIPPER_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "c.yaml").write_text(CONTENT)
    request = Request(str(tmp_path / "c.yaml"), ("backends.file.sampling.rank=all",), socket="/x.sock")
    return {each.path: each for each in effective(request.load())}


@pytest.mark.parametrize(
    ("path", "value", "origin"),
    [
        ("backends.file.dir", "/data/records", "c.yaml:3"),
        ("backends.file.sampling.rank", "all", "--set backends.file.sampling.rank=all"),
        ("backends.wandb.sampling.rank", "rank0", "default"),
        ("backends.wandb.sampling.log_frequency", {"*": 100, "actor/*": 10}, "c.yaml:8"),
        ("backends.wandb.entity", "team", "$WANDB_ENTITY"),
        ("backends.wandb.base_url", "https://api.wandb.ai", "default"),
        ("backends.wandb.group", None, "default: none"),
        ("trainer.project_name", "on", "c.yaml:10"),
        ("trainer.experiment_name", "from-env", "$VERL_EXPERIMENT"),
        ("socket", "/x.sock", "--socket"),
        ("log_level", "WARNING", "default"),
    ],
)
def test_every_value_has_its_origin(shown: dict[str, Shown], path: str, value: object, origin: str) -> None:
    assert shown[path].value == value
    assert shown[path].origin.endswith(origin)


def test_places_are_shown_as_they_will_be(shown: dict[str, Shown], tmp_path: Path) -> None:
    assert shown["state_dir"] == Shown("state_dir", str(tmp_path / "state"), "$VERL_SHIPPER_STATE_DIR")
    assert shown["spool_dir"].origin == "default"
    assert shown["adopt"].value == [shown["spool_dir"].value]


def test_no_secret_is_shown(shown: dict[str, Shown]) -> None:
    assert "very-secret" not in json.dumps(json_of(shown.values()))
    assert shown["backends.wandb.wandb_proxy"].value == "http://[redacted]@proxy:8080"


def test_it_is_yaml_a_line_per_key_and_every_line_says_where_from(shown: dict[str, Shown]) -> None:
    lines = list(lines_of(shown.values()))

    assert sum("  # " in line for line in lines) == len(shown)
    assert all(line.endswith(":") for line in lines if "  # " not in line)
    again = yaml.safe_load("\n".join(lines))
    for path, each in shown.items():
        found = again
        for name in path.split("."):
            found = found[name]
        assert found == each.value, path


@pytest.mark.parametrize("value", ["a # b", "line\nline", "yes", "010", "'", "…", "", "a: b", "x" * 5000, "{a", None])
def test_odd_values_come_back_as_they_were(value: object) -> None:
    lines = list(lines_of([Shown("a.b", value, "x"), Shown("a.c.d", 1, "y")]))

    assert len(lines) == 4
    assert yaml.safe_load("\n".join(lines)) == {"a": {"b": value, "c": {"d": 1}}}
