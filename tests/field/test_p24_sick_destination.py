"""P24: one sick destination blocks the others. Here each has its own lane and its own position."""

from __future__ import annotations

import time

import pytest

from support import oracle
from support.daemon import Daemon
from support.fault_http import FaultServer, Mode
from support.mlflow_server import MlflowServer
from support.site import Site
from support.trainer import Ledger, counting_trainer

pytestmark = pytest.mark.alone

RECORDS = 5000  # of each of the two runs


def test_p24_healthy_destinations_finish_while_the_sick_one_keeps_its_place(
    site: Site, mlflow_server: MlflowServer
) -> None:
    project = f"p24-{time.time_ns()}"
    ledgers = [Ledger(site.root / f"ledger-{number}") for number in (1, 2)]

    with (
        FaultServer(mlflow_server.uri, Mode.HANG) as server,
        Daemon(
            site, *site.file_backend(), "--backend", "console", *site.mlflow_backend(server.url, timeout_s=5)
        ) as daemon,
        counting_trainer(site, ledgers[0], project=project, run_id="r1", count=RECORDS, pace_s=0) as first,
        counting_trainer(site, ledgers[1], project=project, run_id="r2", count=RECORDS, pace_s=0) as second,
    ):
        first.wait()
        second.wait()
        server.mode = Mode.BUSY
        healthy = daemon.wait_settled(2 * RECORDS + 4, backends=["file", "console"], timeout_s=30)
        assert healthy["backends"]["mlflow"]["pending"] == 2 * RECORDS + 4
        oracle.assert_law(healthy)
        daemon.wait_until(lambda status: status["backends"]["mlflow"]["last_error"], 60, "the sick one is told")

        server.mode = Mode.HANG
        took_s = daemon.stop()
        assert took_s < 10

        server.mode = Mode.PASS
        daemon.start()
        status = daemon.wait_settled(2 * RECORDS + 4, timeout_s=120)

    oracle.assert_law(status, pending=0)
    expected = [(n, float(n)) for n in range(RECORDS)]
    for run_id in ("r1", "r2"):
        lines = oracle.read_lines(site.output(project, "exp", run_id))
        oracle.assert_once_in_order(lines)
        oracle.assert_exactly(oracle.values(lines, "n"), expected, f"file {run_id}")
        run = oracle.mlflow_run(mlflow_server.uri, project, run_id, "n")
        oracle.assert_exactly(run.history("n"), expected, f"mlflow {run_id}")
