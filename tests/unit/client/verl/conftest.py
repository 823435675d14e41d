"""A job of one process with a spool of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.client.verl.stand_in import Tracker
from verl_shipper_client.client import Client
from verl_shipper_client.verl import job, patch, rollout


@pytest.fixture(autouse=True)
def fresh_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The spool of a process that has not shipped anything yet."""
    spool = tmp_path / "spool"
    for name in ("VERL_SHIPPER_TAKEOVER", "VERL_SHIPPER_SOCKET", "VERL_SHIPPER_RUN_ID", "VERL_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VERL_SHIPPER_SPOOL_DIR", str(spool))
    monkeypatch.setattr(job, "FINISH_S", 0.0)
    monkeypatch.setattr(Tracker, "broken", False)
    fresh = job.Job()
    for name, value in vars(job.JOB).items():
        monkeypatch.setattr(job.JOB, name, getattr(fresh, name, value))
    monkeypatch.setattr(patch, "_told", set())
    monkeypatch.setattr(rollout, "_samples", {})
    clients: list[Client] = []
    begin = Client.__init__

    def count(self: Client, *args: object, **kwargs: object) -> None:
        begin(self, *args, **kwargs)  # type: ignore[arg-type]
        clients.append(self)

    monkeypatch.setattr(Client, "__init__", count)
    yield spool
    for client in clients:
        client.finish(timeout_s=0.0)
