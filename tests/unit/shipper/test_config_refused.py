"""What a person may not write into a configuration: one line each, with the place and a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.configs import FILE, refused, without_variables
from verl_shipper.config import examine_config, load_config
from verl_shipper.errors import ConfigError


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_variables(monkeypatch)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no backend"),
        ("backend: {}", "did you mean backends"),
        ("zzz: 1", "known keys"),
        ("1: 2", "unknown key '1'"),
        ("null: 2", "key"),
        ("just words", "not a map"),
        ("[1, 2]", "not a map"),
        ("backends: [", "config.yaml:1"),
        ("backends: {file: {dir: ${oc.env:X}}}", "quotes around ${…}"),
        ("a:\n b: c: d", "config.yaml:2"),
        ("\x00", "YAML"),
        ("[\n", "YAML"),  # the trouble is behind the last line
        (b"\xff\xfe", "YAML"),
        ("backends: {file: !!python/object:os.system {}}", "YAML"),
        ("backends: [file]", "not a map of names"),
        ("backends: file", "not a map of names"),
        ("backends: {file: [1]}", "backends.file"),
        ("backends: {file: true}", "backends.file"),
        ("backends: {fiel: {dir: x}}", "config.yaml:1]; did you mean 'file'"),
        ("backends: {oracle9: {}}", "known backends"),
        ("backends: {file: {}}", "backends.file.dir"),
        ("backends: {file: {dri: x}}", "did you mean backends.file.dir?"),
        ("backends: {file: {dir: '???'}}", "no value"),
        ("backends: &a {file: *a}", "holds itself"),
        ("backends: {file: {dir: 2026-01-01}}", "2026-01-01, not a path"),
        ("backends: {file: {dir: '${oc.env:VERL_SHIPPER_TEST_ABSENT}'}}", "VERL_SHIPPER_TEST_ABSENT is not set"),
        ("backends.file.dir: x", "sections"),
        ("? [a, b]\n: 1\n", "unknown key"),
        ("trainer: {logger: 5}", "trainer.logger"),
        ("trainer: {logger: {console: 1}}", "trainer.logger"),
        ("trainer: {logger: [null]}", "unknown backend"),
        ("trainer: {logger: [console, tensorbord]}", "known backends"),
        ("trainer: 5", "not a map"),
        (FILE + "trainer: {wandb: 5}", "not a map"),
        (FILE + "log_level: loud", "'loud'"),
        (FILE + "spool_dir: [1]", "spool_dir"),
        (FILE + "state_dir: 5", "state_dir"),
        (FILE + "adopt: {a: 1}", "adopt"),
        (FILE + "adopt: [1]", "adopt"),
        (FILE + "node_quota_bytes: 10GiB", "node_quota_bytes"),
        (FILE + "node_quota_bytes: 0", "node_quota_bytes"),
        (FILE + "node_quota_bytes: true", "node_quota_bytes"),
    ],
)
def test_a_file_that_cannot_work_is_one_line_with_a_hint(tmp_path: Path, content: str | bytes, words: str) -> None:
    assert words in refused(tmp_path, content)


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ("sampling:\n  log_freqency: 3", 3, "did you mean sampling.log_frequency?"),
        ("sampling:\n  log_frequency: 0", 3, "1 or more"),
        ("sampling:\n  log_frequency: {'a': x}", 3, "whole number"),
        ("sampling:\n  traces:\n    rate: 1.5", 4, "0 to 1"),
        ("sampling:\n  traces:\n    rat: 1", 4, "did you mean sampling.traces.rate?"),
        ("sampling:\n  log_mode: median", 3, "last, mean, min, max"),
        ("sampling:\n  rank: on", 3, "rank0, all"),
        ("sampling:\n  log_val_generations: -1", 3, "`sampling.log_val_generations` is -1"),
        ("sampling:\n  run_may_choose: [logger, foo]", 3, "foo"),
        ("sampling:\n  include: {a: b}", 3, "list of patterns"),
        ("sampling: 5", 2, "not a map"),
        ("max_length: 5", 2, "did you mean sampling.traces.max_length?"),
        ("trainer:\n  project_name: p\n  projet_name: x", 4, "did you mean trainer.project_name?"),
        ("trainer:\n  log_freq: 10", 3, "did you mean trainer.log_frequency?"),
        ("trainer:\n  wandb:\n    save_cod: no", 4, "did you mean trainer.wandb.save_code?"),
        ("trainer:\n  log_frequency: often", 3, "`trainer.log_frequency` is 'often'"),
        ("actor_rollout_ref:\n  rollout:\n    trace:\n      max_lenght: 5", 5, "trace.max_length?"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_the_nearest_name(
    tmp_path: Path, lines: str, line: int, words: str
) -> None:
    told = refused(tmp_path, FILE + lines)

    assert f"config.yaml:{line}" in told
    assert words in told


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("backends.wandb.log_frequency", "backends.wandb.sampling.log_frequency"),
        ("backends.wandb.traces.rate", "backends.wandb.sampling.traces"),
        ("backends.wandb.sampling.max_length", "backends.wandb.sampling.traces.max_length"),
        ("backends.file.sampling.run_may_choose", "sampling.run_may_choose"),
        ("backends.wandb.api_key", "backends.wandb.api_key_file"),
        ("sampling.enabled", "sampling.traces.enabled"),
        ("log_frequency", "sampling.log_frequency"),
        ("logger", "trainer.logger"),
    ],
)
def test_the_right_name_in_the_wrong_place_is_recognised(tmp_path: Path, written: str, meant: str) -> None:
    assert f"did you mean {meant}?" in refused(tmp_path, FILE, f"{written}=1", backends=("file",))


def test_a_key_that_stands_twice_is_told_with_both_lines(tmp_path: Path) -> None:
    told = refused(tmp_path, "backends:\n  file: {dir: a}\n  console: {}\n  file: {dir: b}\n")

    assert "'file' stands twice, in lines 2 and 4" in told
    assert "config.yaml:4" in told


def test_all_mistakes_are_found_and_the_first_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("backends: {file: {dri: x}}\nlog_level: loud\nzzz: 1\nsampling: {rank: x}\n")

    _, problems = examine_config(str(path), ["node_quota_bytes=-1"], [])

    told = [problem.line() for problem in problems]
    assert [word in line for word, line in zip(("dri", "log_level", "zzz", "rank", "quota"), told, strict=True)] == [
        True
    ] * 5
    assert refused(tmp_path, path.read_text()) == told[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("x", "KEY=VALUE"),
        ("=x", "KEY=VALUE"),
        ("  =x", "KEY=VALUE"),
        ("a..b=x", "KEY=VALUE"),
        ("backends=foo", "not a map"),
        ("backends.file.dir=[", "--set backends.file.dir=["),
        ("backends.file.dir={a", "--set backends.file.dir={a"),
        ("backends[=1", "did you mean backends?"),
        ("backends.file.dir=${oc.env:VERL_SHIPPER_TEST_ABSENT}", "VERL_SHIPPER_TEST_ABSENT"),
        ("backends.file.dir=${nothing}", "nothing"),
        ("backends.file.dir=${x", "resolved"),
        ("backends.file.dir=???", "no value"),
        ("backends.file=null", "backends.file.dir"),
        ("backends.file.dir.x=1", "not a path"),
        ("sampling.traces.rate=2", "[--set sampling.traces.rate=2]"),
    ],
)
def test_an_override_that_cannot_work_is_one_line_with_a_hint(tmp_path: Path, override: str, words: str) -> None:
    assert words in refused(tmp_path, FILE, override)


@pytest.mark.parametrize(
    ("name", "words"), [("fiel", "mean 'file'?"), ("FILE", "mean 'file'?"), ("", "known"), ("shipper", "known")]
)
def test_a_name_that_is_no_backend_is_told_with_the_nearest(tmp_path: Path, name: str, words: str) -> None:
    assert words in refused(tmp_path, FILE, backends=(name,))


def test_a_file_that_is_not_there_or_no_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(ConfigError) as raised:
            load_config(str(path))
        assert str(path) in raised.value.line()
        assert raised.value.hint


def test_what_a_backend_has_against_its_settings_is_told_with_the_line(tmp_path: Path) -> None:
    told = refused(tmp_path, "backends:\n  mlflow:\n    tracking_uri: /a/folder\n")

    assert "config.yaml:3: backends.mlflow.tracking_uri" in told


@pytest.mark.parametrize(
    "override", ["backends.wandb.api_key=very-secret", "backends.mlflow.tracking_uri=ftp://u:very-secret@x"]
)
def test_a_message_shows_no_secret(tmp_path: Path, override: str) -> None:
    assert "very-secret" not in refused(tmp_path, "", override)
