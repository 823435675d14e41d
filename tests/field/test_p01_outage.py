"""P01: an outage of a destination stops training, or halves its speed. Here it costs nothing, and nothing is lost."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest

from support import oracle
from support.daemon import Daemon
from support.fault_http import FaultServer, Mode
from support.mlflow_server import MlflowServer
from support.site import Site
from support.trainer import Ledger, Trainer, write_script

pytestmark = pytest.mark.alone

TRAINER = """
import json, os, sys, time
from verl_shipper_client import Client

project, ledger_path, report_path, pace_s, steps = sys.argv[1:]
ledger = os.open(ledger_path, os.O_WRONLY | os.O_APPEND)
client = Client(project, "exp", run_id="r1")
took_s = []
for step in range(int(steps)):
    data = {f"loss/{n}": step + n / 16 for n in range(12)}
    began_s = time.perf_counter()
    client.log(data, step=step)
    took_s.append(time.perf_counter() - began_s)
    os.write(ledger, b"%d %.6f\\n" % (step, time.time()))
    time.sleep(float(pace_s))
with open(report_path, "w") as report:
    json.dump(took_s, report)
client.finish(exit_code=0)
"""
PHASES = [Mode.HANG, Mode.RESET, Mode.ERROR, Mode.PASS]


def test_p01_four_phases_of_an_outage_cost_the_training_loop_nothing(site: Site, mlflow_server: MlflowServer) -> None:
    project = f"p01-{time.time_ns()}"
    ledger = Ledger(site.root / "ledger")
    report = site.root / "took.json"
    script = write_script(site, TRAINER)

    with (
        FaultServer(mlflow_server.uri, Mode.HANG) as server,
        Daemon(site, *site.mlflow_backend(server.url)) as daemon,
        Trainer(site, script, project, ledger.path, report, 0.02, 400) as trainer,
    ):
        for phase, mode in enumerate(PHASES):
            server.mode = mode
            ledger.wait_for(phase * 100 + 99)
        trainer.wait()
        status = daemon.wait_settled(402, timeout_s=120)

    run = oracle.mlflow_run(mlflow_server.uri, project, "r1", "loss/0", "loss/11")
    oracle.assert_exactly(run.history("loss/0"), [(n, float(n)) for n in range(400)], "mlflow")
    oracle.assert_exactly(run.history("loss/11"), [(n, n + 11 / 16) for n in range(400)], "mlflow")
    oracle.assert_law(status, pending=0)
    took_s = json.loads(report.read_text())
    for phase, mode in enumerate(PHASES):
        part = sorted(took_s[phase * 100 : phase * 100 + 100])
        assert part[98] < 0.005, f"{mode}: p99 of log() is {part[98] * 1000:.2f} ms"
        assert part[-1] < 0.050, f"{mode}: max of log() is {part[-1] * 1000:.2f} ms"


@pytest.mark.parametrize("mode", [Mode.RATE_LIMIT, Mode.BUSY, Mode.SWALLOW], ids=lambda mode: mode.value)
def test_other_outages_end_with_every_step_there_once(site: Site, mlflow_server: MlflowServer, mode: Mode) -> None:
    """Siblings: 429 with Retry-After, 503, and the answer that is lost after the server has taken the batch."""
    project = f"p01-{mode.name.lower()}-{time.time_ns()}"
    ledger = Ledger(site.root / "ledger")
    report = site.root / "took.json"
    script = write_script(site, TRAINER)

    with (
        FaultServer(mlflow_server.uri, mode) as server,
        Daemon(site, *site.mlflow_backend(server.url)) as daemon,
        Trainer(site, script, project, ledger.path, report, 0.002, 100) as trainer,
    ):
        ledger.wait_for(99)
        trainer.wait()
        seen_s = time.monotonic() + 30
        while server.seen(mode) < 2 and time.monotonic() < seen_s:
            time.sleep(0.05)
        assert server.seen(mode) >= 2, "the daemon tries again by itself"
        server.mode = Mode.PASS
        status = daemon.wait_settled(102, timeout_s=120)

    run = oracle.mlflow_run(mlflow_server.uri, project, "r1", "loss/0")
    oracle.assert_exactly(run.history("loss/0"), [(n, float(n)) for n in range(100)], "mlflow")
    oracle.assert_law(status, pending=0)


def test_inside_retry_after_no_request_is_sent(site: Site, mlflow_server: MlflowServer) -> None:
    ledger = Ledger(site.root / "ledger")
    script = write_script(site, TRAINER)

    with (
        FaultServer(mlflow_server.uri, Mode.RATE_LIMIT, retry_after_s=3) as server,
        Daemon(site, *site.mlflow_backend(server.url)),
        Trainer(site, script, f"p01-after-{time.time_ns()}", ledger.path, site.root / "took.json", 0, 100) as trainer,
    ):
        trainer.wait()
        deadline_s = time.monotonic() + 30
        while server.seen(Mode.RATE_LIMIT) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        times_s = [request.time_s for request in server.requests]

    assert len(times_s) >= 3
    pauses_s = [after - before for before, after in pairwise(times_s)]
    assert min(pauses_s) >= 2.9, f"asked again after {min(pauses_s):.2f} s"
