"""What all verl jobs of a session share: a tiny model and data, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.verl_job import make_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))
