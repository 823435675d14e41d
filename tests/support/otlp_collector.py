"""Fixtures for whoever sends to a collector: one for a module, and a world without OpenTelemetry's variables.

__all__ = ["collector", "own_world", "server"]      in a test module that imports them
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from servers.process import ServerProcess
from verl_shipper.backends import otlp_http

SECRET = "hush0123456789hush"


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("otlp_server", tmp_path_factory.mktemp("otlp") / "server") as started:
        yield started


@pytest.fixture(autouse=True)
def own_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    otlp_http._wait_until_s.clear()


@pytest.fixture
def server(collector: ServerProcess) -> Iterator[ServerProcess]:
    yield collector
    collector.rules()
    collector.options(headers={}, refuse=[], warning="", answer=None)
