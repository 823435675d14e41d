"""Configuration: what a person may write, and one line with a hint for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_shipper.config import NODE_QUOTA_BYTES, Config, check_backends, load_config
from verl_shipper.errors import ConfigError

FILE = "backends: {file: {dir: ./records}}\n"


def _load(tmp_path: Path, content: str | bytes, *overrides: str, backends: tuple[str, ...] = ()) -> Config:
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_config(str(path), overrides, backends)


def _refused(tmp_path: Path, content: str | bytes, *overrides: str, backends: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as raised:
        check_backends(_load(tmp_path, content, *overrides, backends=backends))
    assert raised.value.exit_code == 2
    assert raised.value.hint, raised.value.line()
    assert "\n" not in raised.value.line()
    return raised.value.line()


# What may be written


def test_a_file_gives_backends_and_places(tmp_path: Path) -> None:
    found = _load(
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

    assert found == Config({"console": {}}, source="command line")
    assert found.node_quota_bytes == NODE_QUOTA_BYTES


def test_overrides_go_before_the_file(tmp_path: Path) -> None:
    found = _load(tmp_path, FILE, "backends.file.dir=/elsewhere", "node_quota_bytes=77")

    assert found.backends["file"]["dir"] == "/elsewhere"
    assert found.node_quota_bytes == 77


def test_named_backends_go_before_sections_and_use_them(tmp_path: Path) -> None:
    found = _load(tmp_path, "backends: {file: {dir: x}, console: {}}", backends=("file", "file"))

    assert found.backends == {"file": {"dir": "x"}}


@pytest.mark.parametrize(
    ("logger", "names"),
    [
        ('["console", "shipper"]', ["console"]),
        ("console", ["console"]),
        ("console, file", ["console", "file"]),
        ("${oc.env:VERL_SHIPPER_TEST_LOGGER,console}", ["console"]),
    ],
)
def test_the_trainers_own_list_names_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: str, names: list[str]
) -> None:
    monkeypatch.delenv("VERL_SHIPPER_TEST_LOGGER", raising=False)
    found = _load(tmp_path, f"trainer:\n  logger: {logger}\n  steps: 3\nactor_rollout_ref: {{rollout: {{n: 8}}}}\n")

    assert list(found.backends) == names


def test_the_environment_is_read_as_verl_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SHIPPER_TEST_DIR", "/from/env")

    assert _load(tmp_path, "backends: {file: {dir: '${oc.env:VERL_SHIPPER_TEST_DIR}/x'}}").backends == {
        "file": {"dir": "/from/env/x"}
    }


def test_a_backend_may_be_switched_off(tmp_path: Path) -> None:
    found = _load(tmp_path, "backends: {file: {dir: x, enabled: false}, console: {enabled: true}}")

    assert found.backends == {"console": {}}


def test_an_empty_file_is_none(tmp_path: Path) -> None:
    assert _load(tmp_path, "", backends=("console",)).backends == {"console": {}}


# What may not


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no backend"),
        ("backend: {}", "did you mean 'backends'"),
        ("zzz: 1", "known keys"),
        ("1: 2", "unknown key '1'"),
        ("null: 2", "key"),
        ("just words", "not a map"),
        ("[1, 2]", "not a map"),
        ("backends: [", "config.yaml:1"),
        ("a:\n b: c: d", "config.yaml:2"),
        ("\x00", "YAML"),
        (b"\xff\xfe", "YAML"),
        ("backends: {file: !!python/object:os.system {}}", "YAML"),
        ("backends: [file]", "not a map of names"),
        ("backends: file", "not a map of names"),
        ("backends: {file: [1]}", "backends.file"),
        ("backends: {file: true}", "backends.file"),
        ("backends: {fiel: {dir: x}}", "did you mean 'file'"),
        ("backends: {oracle9: {}}", "known backends"),
        ("backends: {file: {}}", "backends.file.dir"),
        ("backends: {file: {dri: x}}", "backends.file.dir"),
        ("backends: {file: {dir: '???'}}", "no value"),
        ("backends: &a {file: *a}", "resolved"),
        ("backends: {file: {dir: 2026-01-01}}", "resolved"),
        ("trainer: {logger: 5}", "trainer.logger"),
        ("trainer: {logger: {console: 1}}", "trainer.logger"),
        ("trainer: {logger: [null]}", "unknown backend"),
        (FILE + "log_level: loud", "LOUD"),
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
    assert words in _refused(tmp_path, content)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("x", "KEY=VALUE"),
        ("=x", "KEY=VALUE"),
        ("  =x", "KEY=VALUE"),
        ("backends=foo", "not a map"),
        ("backends.file.dir=[", "resolved"),
        ("backends.file.dir={a", "resolved"),
        ("backends[=1", "not a map"),
        ("backends.file.dir=${oc.env:VERL_SHIPPER_TEST_ABSENT}", "VERL_SHIPPER_TEST_ABSENT"),
        ("backends.file.dir=${nothing}", "nothing"),
        ("backends.file.dir=${x", "resolved"),
        ("backends.file=null", "backends.file.dir"),
    ],
)
def test_an_override_that_cannot_work_is_one_line_with_a_hint(tmp_path: Path, override: str, words: str) -> None:
    assert words in _refused(tmp_path, FILE, override)


@pytest.mark.parametrize(
    ("name", "words"), [("fiel", "'file'"), ("FILE", "known"), ("", "known"), ("shipper", "known")]
)
def test_a_name_that_is_no_backend_is_told_with_the_nearest(tmp_path: Path, name: str, words: str) -> None:
    assert words in _refused(tmp_path, FILE, backends=(name,))


def test_a_file_that_is_not_there_or_no_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(ConfigError) as raised:
            load_config(str(path))
        assert str(path) in raised.value.line()
        assert raised.value.hint
