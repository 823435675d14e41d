"""Fixtures of the client's unit tests: a spool of its own and a clean environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from verl_shipper_client import Client
from verl_shipper_client.launcher import ROWS
from verl_shipper_spool.location import RUN_ID_VARIABLE, SOCKET_VARIABLE, SPOOL_VARIABLE

MakeClient: TypeAlias = Callable[..., Client]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, no shipper variables, and a home that is nobody's."""
    launchers = [name for row in ROWS for name in (row.rank, *row.world, *row.local_world, *row.needs)]
    for name in (*launchers, RUN_ID_VARIABLE, SOCKET_VARIABLE, SPOOL_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def make(spool: Path) -> Iterator[MakeClient]:
    """Makes clients on `spool` whose threads end with the test."""
    made: list[Client] = []

    def new(**arguments: Any) -> Client:
        defaults: dict[str, Any] = {"project": "project", "experiment": "experiment", "spool_dir": spool}
        made.append(Client(**(defaults | arguments)))
        return made[-1]

    yield new
    for client in made:
        client.finish(timeout_s=0.0)
