"""Kill anything at any moment: at `file` and at a real MLflow server every record is there once, in order.

A round is one `kill -9`. What is held against the product is the ledger: a line per `log()` that has returned.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import pytest

from support import oracle
from support.daemon import Daemon
from support.fault_http import BlackHole
from support.mlflow_server import MlflowServer
from support.processes import kill, wait_for
from support.seeds import seeded
from support.site import Site
from support.trainer import Ledger, Trainer, counting_trainer

pytestmark = pytest.mark.alone

SETTLE_S = 120.0
PACE_S = 0.005


class Storm:
    """A daemon, a trainer, and somebody who kills them. `kills` counts the rounds, by victim."""

    def __init__(self, site: Site, project: str, server: MlflowServer, rng: random.Random) -> None:
        self.site = site
        self.project = project
        self.rng = rng
        self.ledger = Ledger(site.root / "ledger")
        self.daemon = Daemon(site, *site.file_backend(), *site.mlflow_backend(server.uri))
        self.kills = {"trainer": 0, "daemon": 0, "lane": 0}
        self.trainer = self._trainer(0)

    def _trainer(self, first: int) -> Trainer:
        return counting_trainer(self.site, self.ledger, project=self.project, first=first, pace_s=PACE_S)

    def _wait(self, limit_s: float) -> None:
        time.sleep(self.rng.uniform(0, limit_s))

    def kill_trainer(self) -> None:
        """Kill it in the middle of its work; the next life skips the one value that may or may not be logged."""
        self.ledger.wait_for(self.ledger.last() + 1)
        self._wait(0.3)
        self.trainer.kill()
        self.trainer = self._trainer(self.ledger.last() + 2)

    def kill_daemon(self) -> None:
        """Kill it at work, or while it starts; now and then leave it dead for a while."""
        self._wait(1.5)
        self.daemon.kill()
        self._wait(0.3)
        self.daemon.start(wait=self.rng.random() < 0.7)

    def kill_lane(self) -> None:
        wait_for(self.daemon.lanes, 30, "a lane lives")
        self._wait(1.0)
        lanes = self.daemon.lanes()
        if not lanes:
            wait_for(self.daemon.lanes, 30, "a lane lives")
            lanes = self.daemon.lanes()
        kill(self.rng.choice(lanes))

    def round(self, victim: str) -> None:
        actions: dict[str, Callable[[], None]] = {
            "trainer": self.kill_trainer,
            "daemon": self.kill_daemon,
            "lane": self.kill_lane,
        }
        actions[victim]()
        self.kills[victim] += 1

    def close(self) -> None:
        self.trainer.close()
        self.daemon.close()


@pytest.mark.parametrize(
    ("victims", "rounds"),
    [(["trainer"], 12), (["daemon"], 12), (["lane"], 12), (["trainer", "daemon", "lane"], 18)],
    ids=["trainer", "daemon", "lane", "everything"],
)
def test_every_record_arrives_once_whatever_is_killed(
    site: Site, mlflow_server: MlflowServer, victims: list[str], rounds: int
) -> None:
    rng = seeded(f"kill {'-'.join(victims)}")
    project = f"kill-{'-'.join(victims)}-{time.time_ns()}"
    storm = Storm(site, project, mlflow_server, rng)

    try:
        storm.daemon.start()
        for _ in range(rounds):
            storm.round(rng.choice(victims))
        storm.trainer.kill()
        if not storm.daemon.is_running():
            storm.daemon.start()
        storm.daemon.wait_ready()
        # Starts and ends of runs are counted, too: that as many are logged does not say that the last values are.
        wait_for(lambda: not site.stream_folders(), SETTLE_S, "the dead trainers' spools are taken")
        status = storm.daemon.wait_settled(len(storm.ledger.values()), timeout_s=SETTLE_S)
    finally:
        storm.close()

    _assert_arrived(storm, mlflow_server, writer_kills=storm.kills["trainer"] + 1)
    oracle.assert_law(status, pending=0)
    for name in ("file", "mlflow"):
        assert status["backends"][name]["dead_lettered"] == 0
        assert sum(status["backends"][name]["dropped"].values()) == 0


def _assert_arrived(storm: Storm, server: MlflowServer, *, writer_kills: int) -> None:
    logged = storm.ledger.values()
    lines = oracle.read_lines(storm.site.output(storm.project, "exp", "r1"))
    oracle.assert_once_in_order(lines)
    at_file = [int(value) for _, value in oracle.values(lines, "n")]
    oracle.assert_ledger(at_file, logged, writer_kills, "file")
    run = oracle.mlflow_run(server.uri, storm.project, "r1", "n")
    points = run.history("n")
    oracle.assert_exactly(points, [(value, float(value)) for value in at_file], "mlflow")


def test_a_daemon_that_comes_after_the_whole_run_delivers_all_of_it(site: Site, mlflow_server: MlflowServer) -> None:
    project = f"absent-{time.time_ns()}"
    ledger = Ledger(site.root / "ledger")
    counting_trainer(site, ledger, project=project, count=2000, pace_s=0).wait()
    counting_trainer(site, ledger, project=project, first=2000, count=1000, pace_s=0).wait()

    with Daemon(site, *site.file_backend(), *site.mlflow_backend(mlflow_server.uri)) as daemon:
        status = daemon.wait_settled(3004)

    assert ledger.values() == list(range(3000))
    lines = oracle.read_lines(site.output(project, "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(3000)], "file")
    run = oracle.mlflow_run(mlflow_server.uri, project, "r1", "n")
    oracle.assert_exactly(run.history("n"), [(n, float(n)) for n in range(3000)], "mlflow")
    oracle.assert_law(status, pending=0)


def test_a_daemon_stopped_and_then_killed_costs_nothing(site: Site, mlflow_server: MlflowServer) -> None:
    project = f"stopped-{time.time_ns()}"
    ledger = Ledger(site.root / "ledger")
    daemon = Daemon(site, *site.file_backend(), *site.mlflow_backend(mlflow_server.uri)).start()
    with daemon, counting_trainer(site, ledger, project=project, count=1500, pace_s=0.001) as trainer:
        ledger.wait_for(200)
        daemon.pause()
        ledger.wait_for(1499)
        trainer.wait(timeout_s=20)
        daemon.kill()

        daemon.start()
        status = daemon.wait_settled(1502)

    lines = oracle.read_lines(site.output(project, "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(1500)], "file")
    run = oracle.mlflow_run(mlflow_server.uri, project, "r1", "n")
    oracle.assert_exactly(run.history("n"), [(n, float(n)) for n in range(1500)], "mlflow")
    oracle.assert_law(status, pending=0)


def test_a_daemon_that_is_only_stopped_for_a_while_costs_nothing(site: Site) -> None:
    ledger = Ledger(site.root / "ledger")
    daemon = Daemon(site, *site.file_backend()).start()
    with daemon, counting_trainer(site, ledger, count=1000, pace_s=0.001) as trainer:
        ledger.wait_for(200)
        daemon.pause()
        ledger.wait_for(700)
        daemon.resume()
        trainer.wait()
        status = daemon.wait_settled(1002)

    lines = oracle.read_lines(site.output("count", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(1000)], "file")
    oracle.assert_law(status, pending=0)


def test_a_backend_that_hangs_for_ever_delays_nobody_and_no_stop(site: Site) -> None:
    ledger = Ledger(site.root / "ledger")
    with (
        BlackHole() as hole,
        Daemon(site, *site.file_backend(), *site.mlflow_backend(hole.url)) as daemon,
        counting_trainer(site, ledger, count=2000, pace_s=0.001) as trainer,
    ):
        trainer.wait()
        status = daemon.wait_settled(2002, backends=["file"], timeout_s=30)
        took_s = daemon.stop()

    assert took_s < 10
    lines = oracle.read_lines(site.output("count", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(2000)], "file")
    oracle.assert_law(status)
    assert status["backends"]["mlflow"]["delivered"] == 0
    assert status["backends"]["mlflow"]["pending"] == status["backends"]["mlflow"]["logged"]


def test_a_lane_that_is_stopped_neither_keeps_the_daemon_from_ending_nor_survives_it(site: Site) -> None:
    """SIGSTOP to a lane: it can not take part in its own end. What it had not delivered comes by the next daemon."""
    ledger = Ledger(site.root / "ledger")
    with Daemon(site, *site.file_backend()) as daemon:
        wait_for(daemon.lanes, 30, "a lane lives")
        for lane in daemon.lanes():
            kill(lane, signal.SIGSTOP)
        counting_trainer(site, ledger, count=500, pace_s=0).wait()
        took_s = daemon.stop()
        daemon.start()
        status = daemon.wait_settled(502)

    assert took_s < 10
    lines = oracle.read_lines(site.output("count", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(500)], "file")
    oracle.assert_law(status, pending=0)
