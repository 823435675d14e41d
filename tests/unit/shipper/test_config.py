"""The configuration: what a person may write, and what goes before what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.configs import FILE, load, refused, without_variables
from verl_shipper.config import Config, load_config
from verl_shipper.config_keys import NODE_QUOTA_BYTES
from verl_shipper.errors import ConfigError
from verl_shipper.policy.wishes import CHOICES, MAY_CHOOSE


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_variables(monkeypatch)


# What may be written


def test_a_file_gives_backends_and_places(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        FILE
        + "spool_dir: /s\nstate_dir: /t\nsocket: /x.sock\nadopt: [/a, ~/b]\nnode_quota_bytes: 5\nlog_level: info\n",
    )

    assert found.backends == {"file": {"dir": "./records"}}
    assert (found.spool_dir, found.state_dir, found.socket) == ("/s", "/t", "/x.sock")
    assert found.adopt[0] == "/a"
    assert found.adopt[1].startswith("/")
    assert (found.node_quota_bytes, found.log_level) == (5, "INFO")


def test_everything_has_a_default() -> None:
    found = load_config(None, (), ("console",))

    default = Config({"console": {}}, source="command line", sampling={"console": {}}, system_metrics=True)
    assert found == default
    assert not Config({}).system_metrics, "nobody who makes one by hand wants records that nobody logged"
    assert found.node_quota_bytes == NODE_QUOTA_BYTES
    assert found.run_may_choose == MAY_CHOOSE


def test_overrides_go_before_the_file(tmp_path: Path) -> None:
    found = load(tmp_path, FILE, "backends.file.dir=/elsewhere", "node_quota_bytes=77")

    assert found.backends["file"]["dir"] == "/elsewhere"
    assert found.node_quota_bytes == 77


def test_a_plus_in_front_is_what_hydra_wants_for_new_keys(tmp_path: Path) -> None:
    found = load(tmp_path, FILE, "+trainer.project_name=p", "++sampling.rank=all")

    assert (found.project, found.sampling["file"]) == ("p", {"rank": "all"})


@pytest.mark.parametrize(
    ("logger", "sections", "chosen"),
    [
        ("[console, file]", "{file: {dir: /d}, mlflow: {tracking_uri: 'http://t'}}", ["console", "file"]),
        ("[console, shipper]", "{file: {dir: /d}}", ["file"]),
        ("[console, shipper]", "{}", ["console"]),
        ("console", "{file: {dir: /d}}", ["console"]),
        ("[]", "{file: {dir: /d}}", ["file"]),
    ],
)
def test_the_trainers_list_goes_before_sections_unless_we_are_in_it(
    logger: str, sections: str, chosen: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"trainer: {{logger: {logger}}}\nbackends: {sections}\n")

    assert list(load_config(str(path)).backends) == chosen


def test_named_backends_go_before_sections_and_use_them(tmp_path: Path) -> None:
    found = load(tmp_path, "backends: {file: {dir: x}, console: {}}", backends=("file", "file"))

    assert found.backends == {"file": {"dir": "x"}}


@pytest.mark.parametrize(
    ("logger", "names"),
    [
        ('["console", "shipper"]', ["console"]),
        ("console", ["console"]),
        ("console, file", ["console", "file"]),
        ('\'["console","file"]\'', ["console", "file"]),
        ("${oc.env:VERL_SHIPPER_TEST_LOGGER,console}", ["console"]),
        ("${oc.env:VERL_SHIPPER_TEST_LOGGER, 'console'}", ["console"]),
    ],
)
def test_the_trainers_own_list_names_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: str, names: list[str]
) -> None:
    monkeypatch.delenv("VERL_SHIPPER_TEST_LOGGER", raising=False)
    found = load(tmp_path, f"trainer:\n  logger: {logger}\n  steps: 3\nactor_rollout_ref: {{rollout: {{n: 8}}}}\n")

    assert list(found.backends) == names


def test_the_environment_is_read_as_verl_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SHIPPER_TEST_DIR", "/from/env")

    assert load(tmp_path, "backends: {file: {dir: '${oc.env:VERL_SHIPPER_TEST_DIR}/x'}}").backends == {
        "file": {"dir": "/from/env/x"}
    }


def test_keys_may_refer_to_each_other(tmp_path: Path) -> None:
    content = "trainer: {project_name: p}\nbackends: {file: {dir: '/data/${trainer.project_name}'}}\n"

    assert load(tmp_path, content).backends["file"]["dir"] == "/data/p"


def test_what_only_the_trainer_can_resolve_is_left_to_it(tmp_path: Path) -> None:
    content = FILE + "trainer: {default_local_dir: '${data.nowhere}', other: '${x'}\n"

    assert list(load(tmp_path, content).backends) == ["file"]


def test_a_backend_may_be_switched_off(tmp_path: Path) -> None:
    found = load(tmp_path, "backends: {file: {dir: x, enabled: off}, console: {enabled: true}}")

    assert found.backends == {"console": {}}


def test_an_empty_file_is_none(tmp_path: Path) -> None:
    assert load(tmp_path, "", backends=("console",)).backends == {"console": {}}


def test_parts_may_be_written_once_and_used_twice(tmp_path: Path) -> None:
    content = (
        "backends:\n  console: {sampling: &few {log_frequency: 10, rank: all}}\n  file: {dir: x, sampling: *few}\n"
    )
    content += "sampling: {traces: {<<: {rate: 0.5}, max_length: 3}}\n"

    found = load(tmp_path, content)

    assert found.sampling["file"] == {"log_frequency": 10, "rank": "all", "traces": {"rate": 0.5, "max_length": 3}}
    assert found.sampling["console"] == found.sampling["file"]


# What YAML 1.1 and the environment make of it


@pytest.mark.parametrize(
    ("written", "names"),
    [("no", "no"), ("007", "007"), ("on", "on"), ("1e-3", "1e-3"), ("2026-01-01", "2026-01-01"), ("'a: b'", "a: b")],
)
def test_a_text_is_what_was_typed(tmp_path: Path, written: str, names: str) -> None:
    assert load(tmp_path, FILE + f"trainer: {{experiment_name: {written}}}").experiment == names
    assert load(tmp_path, FILE, f"trainer.experiment_name={written}").experiment == names


@pytest.mark.parametrize("spelled", ["10", "'10'", "1e1", "010", "10.0", "${oc.env:VERL_SHIPPER_TEST_TEN}"])
def test_a_number_may_be_spelled_in_many_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: str) -> None:
    monkeypatch.setenv("VERL_SHIPPER_TEST_TEN", "10")

    found = load(tmp_path, FILE + f"sampling:\n  log_frequency: {spelled}\n  rank_timeout_s: {spelled}\n")

    assert found.sampling["file"] == {"log_frequency": 10, "rank_timeout_s": 10.0}
    assert load(tmp_path, FILE, f"sampling.log_frequency={spelled}").sampling["file"] == {"log_frequency": 10}


@pytest.mark.parametrize(
    ("spelled", "is_on"), [("on", True), ("'yes'", True), ("1", True), ("off", False), ("No", False)]
)
def test_a_switch_may_be_spelled_in_many_ways(tmp_path: Path, spelled: str, is_on: bool) -> None:
    assert load(tmp_path, f"backends: {{wandb: {{save_code: {spelled}}}}}").backends["wandb"]["save_code"] is is_on


@pytest.mark.parametrize("spelled", ["1:30", ".inf", ".nan", "0x10", "[10]", "yes", "''' '''"])
def test_what_is_no_number_is_refused(tmp_path: Path, spelled: str) -> None:
    assert "rank_timeout_s" in refused(tmp_path, FILE + f"sampling: {{rank_timeout_s: {spelled}}}")


@pytest.mark.parametrize("spelled", ["'actor/*,critic/*'", "[actor/*, critic/*]", '\'["actor/*", "critic/*"]\''])
def test_patterns_may_be_a_list_or_a_text_with_commas(tmp_path: Path, spelled: str) -> None:
    found = load(tmp_path, FILE + f"sampling: {{include: {spelled}, exclude: perf/*}}")

    assert found.sampling["file"] == {"include": ["actor/*", "critic/*"], "exclude": ["perf/*"]}


def test_a_frequency_may_be_said_by_pattern(tmp_path: Path) -> None:
    content = FILE + "sampling: {log_frequency: {'*': 100, actor/*: '10'}}"

    assert load(tmp_path, content).sampling["file"] == {"log_frequency": {"*": 100, "actor/*": 10}}
    found = load(tmp_path, content, "sampling.log_frequency.actor.x/*=3")
    assert found.sampling["file"] == {"log_frequency": {"*": 100, "actor/*": 10, "actor.x/*": 3}}


@pytest.mark.parametrize(
    ("spelled", "names"),
    [
        ("all", CHOICES),
        ("true", CHOICES),
        ("none", ()),
        ("false", ()),
        ("[]", ()),
        ("[logger]", ("logger",)),
        ("traces", ("traces",)),
    ],
)
def test_an_operator_says_what_a_run_may_choose(tmp_path: Path, spelled: str, names: tuple[str, ...]) -> None:
    assert load(tmp_path, FILE + f"sampling: {{run_may_choose: {spelled}}}").run_may_choose == names


# What goes before what


def test_the_narrower_section_goes_before_the_wider_and_ours_before_the_trainers(tmp_path: Path) -> None:
    content = (
        "backends: {console: {sampling: {log_frequency: 2}}, file: {dir: x}}\n"
        "sampling: {log_frequency: 3, traces: {max_length: 30}}\n"
        "trainer: {log_frequency: 4, log_val_generations: 40}\n"
        "actor_rollout_ref: {rollout: {trace: {max_length: 50, include_prompt: no}}}\n"
    )

    found = load(tmp_path, content).sampling

    assert found["console"]["log_frequency"] == 2
    assert found["file"]["log_frequency"] == 3
    assert found["file"]["log_val_generations"] == 40
    assert found["file"]["traces"] == {"max_length": 30, "include_prompt": False}


@pytest.mark.parametrize("key", ["backends.console.sampling", "sampling", "trainer"])
def test_the_command_line_goes_before_the_whole_file(tmp_path: Path, key: str) -> None:
    content = "backends: {console: {sampling: {log_frequency: 2}}}\nsampling: {log_frequency: 3}\n"

    assert load(tmp_path, content, f"{key}.log_frequency=9").sampling["console"] == {"log_frequency": 9}


def test_no_samples_in_a_trainers_section_says_nothing_since_verl_has_it_by_default(tmp_path: Path) -> None:
    assert load(tmp_path, FILE + "trainer: {log_val_generations: 0}").sampling == {"file": {}}
    assert load(tmp_path, FILE + "sampling: {log_val_generations: 0}").sampling["file"] == {"log_val_generations": 0}


def test_what_nobody_gave_is_not_there(tmp_path: Path) -> None:
    assert load(tmp_path, FILE + "sampling: {rank: null, traces: {rate: }}").sampling == {"file": {}}


def test_everything_a_lane_is_told_survives_json(tmp_path: Path) -> None:
    content = (
        "backends: {wandb: {tags: [2024, no], settle_s: 1e0}}\n"
        "sampling: {log_frequency: {'*': 2}, include: [a], traces: {rate: 1}}\n"
    )
    found = load(tmp_path, content)

    told = [found.backends, found.sampling, list(found.run_may_choose), found.project]
    assert json.loads(json.dumps(told)) == told
    assert found.backends["wandb"] == {"tags": ["2024", "no"], "settle_s": 1.0}


def test_the_environment_names_backends_when_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_LOGGER", "console,shipper,wandb")
    assert list(load_config().backends) == ["console", "wandb"]
    assert list(load(tmp_path, "trainer: {logger: [console]}").backends) == ["console"]
    assert list(load(tmp_path, FILE).backends) == ["file"]
    assert list(load_config(None, (), ("swanlab",)).backends) == ["swanlab"]

    monkeypatch.setenv("VERL_LOGGER", "console,wnadb")
    with pytest.raises(ConfigError, match=r"'wnadb' \[\$VERL_LOGGER\]; did you mean 'wandb'"):
        load_config()


def test_the_environment_names_project_and_experiment_when_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_PROJECT", "from-env")
    monkeypatch.setenv("VERL_EXPERIMENT", "e")

    found = load(tmp_path, FILE)
    assert (found.project, found.experiment) == ("from-env", "e")
    assert load(tmp_path, FILE + "trainer: {project_name: p}").project == "p"
