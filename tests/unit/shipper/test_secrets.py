"""Keys: found in order, read anew, refused where others could read them, and never shown."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest

from verl_shipper.backends.secrets import Key, diagnose_key, find_key
from verl_shipper.checks import Finding, Level
from verl_shipper.errors import ConfigError

SENTINEL = "SENTINEL"
NAMES = ("WANDB_API_KEY", "WANDB_KEY")
HOST = "api.wandb.ai"


@pytest.fixture(autouse=True)
def bare_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "NETRC", "CREDENTIALS_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def private_file(path: Path, content: str, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(mode)
    return path


def found(settings: dict[str, object] | None = None) -> tuple[str, str]:
    key = find_key(NAMES, settings or {}, HOST)
    assert key is not None
    return key.value, key.origin


def refused(settings: dict[str, object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        find_key(NAMES, settings, HOST)
    assert SENTINEL not in repr(caught.value)
    assert SENTINEL not in caught.value.line()
    return caught.value


def test_sources_are_asked_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_key(NAMES, {}, HOST) is None
    private_file(tmp_path / ".netrc", f"default password no\nmachine {HOST} login user password from-netrc")
    assert found() == ("from-netrc", f"netrc {tmp_path}/.netrc")
    monkeypatch.setenv("WANDB_KEY", "from-second\n")
    assert found() == ("from-second", "environment WANDB_KEY")
    monkeypatch.setenv("WANDB_API_KEY", "from-first")
    assert found() == ("from-first", "environment WANDB_API_KEY")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
    assert found()[1] == "environment WANDB_API_KEY"
    private_file(tmp_path / "credentials/wandb_api_key", "from-systemd\n", 0o440)
    assert found() == ("from-systemd", "systemd credential wandb_api_key")
    path = private_file(tmp_path / "key", "from-file\n", 0o400)
    assert found({"api_key_file": str(path)}) == ("from-file", f"file {path}")
    assert found({"api_key_file": "~/key"}) == ("from-file", f"file {path}")


def test_a_key_that_was_replaced_is_seen(tmp_path: Path) -> None:
    path = private_file(tmp_path / "key", "old")
    assert found({"api_key_file": str(path)})[0] == "old"

    private_file(tmp_path / "new", "new").replace(path)

    assert found({"api_key_file": str(path)})[0] == "new"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o700, 0o602])
def test_a_key_file_that_others_could_read_is_refused_with_the_command(tmp_path: Path, mode: int) -> None:
    path = private_file(tmp_path / "key", SENTINEL, mode)

    error = refused({"api_key_file": str(path)})

    assert f"{mode:04o}" in error.what
    assert error.hint == f"chmod 600 {path}"
    assert error.exit_code == 2


def test_a_netrc_that_others_could_read_is_refused_only_when_it_holds_our_key(tmp_path: Path) -> None:
    path = private_file(tmp_path / ".netrc", f"machine other login u password {SENTINEL}", 0o644)
    assert find_key(NAMES, {}, HOST) is None

    private_file(path, f"machine {HOST} login u password {SENTINEL}", 0o644)

    assert refused({}).hint == f"chmod 600 {path}"


def test_a_netrc_elsewhere_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = private_file(tmp_path / "elsewhere", f"machine {HOST} login user password k")
    monkeypatch.setenv("NETRC", str(path))

    assert found() == ("k", f"netrc {path}")


def test_a_broken_netrc_is_an_error_that_quotes_nothing(tmp_path: Path) -> None:
    private_file(tmp_path / ".netrc", f"machine {HOST}\n  login user\n  {SENTINEL} {SENTINEL}\n")

    assert "netrc cannot be read, line" in refused({}).what


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_key_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = private_file(tmp_path / "key", SENTINEL)
    os.chown(path, 65534, 65534)

    assert "belongs to nobody" in refused({"api_key_file": str(path)}).what


@pytest.mark.parametrize("content", ["", "\n", f"{SENTINEL} {SENTINEL}", f"{SENTINEL}\n{SENTINEL}", "schlüssel"])
def test_a_key_file_that_holds_no_key_is_refused(tmp_path: Path, content: str) -> None:
    refused({"api_key_file": str(private_file(tmp_path / "key", content))})


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)

    for name in ("missing", "pipe", "."):
        refused({"api_key_file": str(tmp_path / name)})


def test_a_source_that_cannot_be_used_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "good")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    private_file(tmp_path / "wandb_api_key", "")

    assert "is empty" in refused({}).what


def test_a_key_in_the_settings_is_refused_with_a_better_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "good")

    error = refused({"api_key": SENTINEL})

    assert "api_key_file" in error.hint
    assert "WANDB_API_KEY" in error.hint


def test_a_key_is_not_shown_by_anything_but_its_value() -> None:
    key = Key(SENTINEL, "here")

    for text in (repr(key), str(key), f"{key}", repr([key]), repr(copy.copy(key))):
        assert SENTINEL not in text
    assert pickle.loads(pickle.dumps(key)) == key


@pytest.mark.parametrize(
    ("environment", "settings", "level", "words"),
    [
        ({"WANDB_API_KEY": SENTINEL}, {}, Level.OK, "environment WANDB_API_KEY"),
        ({}, {}, Level.FAIL, "no key"),
        ({}, {"api_key": SENTINEL}, Level.FAIL, "settings"),
        ({}, {"api_key_file": "/nowhere"}, Level.FAIL, "/nowhere"),
    ],
)
def test_doctors_learn_where_the_key_is_and_not_what(
    environment: dict[str, str],
    settings: dict[str, str],
    level: Level,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    findings: list[Finding] = list(diagnose_key(NAMES, settings, HOST))

    assert [finding.level for finding in findings] == [level]
    assert words in findings[0].what
    assert findings[0].hint or level is Level.OK
    assert SENTINEL not in repr(findings)
