"""Configurations as a person writes them: loaded, or refused with one line.

Must not know: which keys there are. On failure: AssertionError.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_shipper.config import Config, check_backends, load_config
from verl_shipper.errors import ConfigError

FILE = "backends: {file: {dir: ./records}}\n"
VARIABLES = ("VERL_LOGGER", "VERL_PROJECT", "VERL_EXPERIMENT", "VERL_SHIPPER_TEST_ABSENT", "MLFLOW_TRACKING_URI")


def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment says anything."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def load(tmp_path: Path, content: str | bytes, *overrides: str, backends: tuple[str, ...] = ()) -> Config:
    """The configuration of a file with this content."""
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_config(str(path), overrides, backends)


def refused(tmp_path: Path, content: str | bytes, *overrides: str, backends: tuple[str, ...] = ()) -> str:
    """The one line with which it is refused."""
    with pytest.raises(ConfigError) as raised:
        check_backends(load(tmp_path, content, *overrides, backends=backends))
    assert raised.value.exit_code == 2
    assert raised.value.hint, raised.value.line()
    assert "\n" not in raised.value.line()
    return raised.value.line()
