"""What every test of the contract suite is given: a kit of kits.py, its backend, a lane over a real spool.

After each test everything that the backend said is looked through (`diary`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contract import kits
from contract.bench import Bench, Diary, Direct, watched
from contract.kits import Kit
from support.mlflow_trackers import empty_database, own_environment
from verl_shipper.backends.base import Backend

__all__ = ["empty_database", "own_environment"]  # fixtures


@pytest.fixture(scope="session", params=kits.names())
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    made = kits.KITS[request.param](tmp_path_factory.mktemp(request.param) / "kit", request.getfixturevalue)
    yield made
    made.close()


@pytest.fixture
def diary(kit: Kit) -> Iterator[Diary]:
    made = Diary()
    yield made
    kit.heal()
    made.check(kit.secret)


@pytest.fixture
def backend(kit: Kit, diary: Diary) -> type[Backend]:
    return watched(kit, diary)


@pytest.fixture
def bench(kit: Kit, diary: Diary, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "state", kit)
    yield made
    kit.heal()
    made.close()


@pytest.fixture
def direct(kit: Kit, backend: type[Backend]) -> Iterator[Direct]:
    made = Direct(kit, backend)
    yield made
    made.close()
