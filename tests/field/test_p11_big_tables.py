"""P11: big validation tables. Here they go up in parts, once each, and neither scalars nor the trainer feel them."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from servers.faults import Fault, Rule
from support import oracle
from support.four_trackers import FourTrackers
from support.mlflow_server import MlflowServer
from support.processes import rss_bytes, wait_for
from support.site import Site
from support.trainer import Trainer, run_script, write_script

TRAINER = """
import json, os, sys, time
from verl_shipper_client import Client

project, samples, validations, report = sys.argv[1:]
samples, validations = int(samples), int(validations)

def rss_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

client = Client(project, "exp", run_id="r1")
outputs = [(f"q{n}", f"{n:06d}" + "x" * (32 * 1024 - 6), n / 8) for n in range(samples)]
rows_s, scalars_s, before_bytes = [], [], None
for step in range(validations):
    if step == validations // 2:
        open(report + ".half", "w").close()
        while not os.path.exists(report + ".go"):
            time.sleep(0.02)
    began_s = time.perf_counter()
    client.log({f"val/{n}": step + n / 32 for n in range(30)}, step=step)
    between_s = time.perf_counter()
    client.log_generations(outputs, step=step)
    rows_s.append(time.perf_counter() - between_s)
    scalars_s.append(between_s - began_s)
    before_bytes = before_bytes or rss_bytes()
    time.sleep(0.05)
client.finish(exit_code=0)
with open(report, "w") as file:
    json.dump({"rows_s": rows_s, "scalars_s": scalars_s, "grown_bytes": rss_bytes() - before_bytes}, file)
"""
IS_LONG = bool(os.environ.get("VERL_SHIPPER_TEST_LONG"))
SAMPLES, VALIDATIONS = (512 if IS_LONG else 34), 20
LIMIT_BYTES = 10 * 1024 * 1024
MIB = 1024 * 1024


def _traffic(trackers: FourTrackers) -> dict[str, int]:
    """Bytes that each server was sent so far."""
    return {name: sum(request["bytes"] for request in server.requests()) for name, server in trackers.servers.items()}


def _parts(samples: int, validations: int) -> int:
    per_part = 1_000_000 // (32 * 1024 + 10)
    return -(-samples // per_part) * validations


@pytest.mark.timeout(1800 if IS_LONG else 300)
def test_p11_big_tables_arrive_in_parts_and_traffic_grows_with_their_number(
    site: Site, mlflow_server: MlflowServer
) -> None:
    report = site.root / "report.json"
    with FourTrackers(site, mlflow_server, front=True) as trackers:
        for server in trackers.servers.values():
            server.rules(Rule(Fault.TOO_LARGE, above_bytes=LIMIT_BYTES))
        with (
            trackers.daemon() as daemon,
            Trainer(site, write_script(site, TRAINER), trackers.project, SAMPLES, VALIDATIONS, report) as trainer,
        ):
            half = site.root / "report.json.half"
            wait_for(half.exists, 120, "half of the validations are logged")
            daemon.wait_settled(1 + VALIDATIONS // 2 + _parts(SAMPLES, VALIDATIONS // 2), timeout_s=900)
            first = _traffic(trackers)
            (site.root / "report.json.go").touch()
            trainer.wait(300)
            logged = 2 + VALIDATIONS + _parts(SAMPLES, VALIDATIONS)
            status = daemon.wait_settled(logged, timeout_s=900)
            oracle.assert_law(status, pending=0)
            both = _traffic(trackers)
            assert rss_bytes(daemon.pid) < 200 * MIB

        payload = SAMPLES * VALIDATIONS * 32 * 1024
        for name in trackers.names:
            assert status["backends"][name]["delivered"] == logged, name
            for key in ("val/0", "val/29"):
                expected = [(step, step + int(key[4:]) / 32) for step in range(VALIDATIONS)]
                oracle.assert_exactly(trackers.values(name, "r1", key), expected, f"{name} {key}")
            _assert_rows(trackers, name)
        for name in trackers.servers:
            assert both[name] < 2.5 * first[name], (
                f"{name}: {first[name]} bytes for the first half, {both[name]} in all"
            )
            assert both[name] < 2.5 * payload, f"{name}: {both[name]} bytes for {payload}"
    told = json.loads(report.read_text())
    assert max(told["scalars_s"]) < 0.1, told
    assert sorted(told["rows_s"])[-2] < 0.1, told
    assert told["grown_bytes"] < 100 * MIB, told


def _assert_rows(trackers: FourTrackers, name: str) -> None:
    """Every sample of every validation is there once and whole."""
    found: dict[tuple[Any, str], int] = {}
    for step, rows in trackers.tables(name, "r1"):
        for row in rows:
            assert len(row[1]) == 32 * 1024
            found[step, row[0]] = found.get((step, row[0]), 0) + 1
    assert found == {(step, f"q{n}"): 1 for step in range(VALIDATIONS) for n in range(SAMPLES)}, name


ODD = r"""
import sys
from verl_shipper_client import Client

project, = sys.argv[1:]
with Client(project, "exp", run_id="r1") as client:
    client.log_generations([("q", "x" * 15_000_000, 1.0), ("q2", "short", 0.0)], step=1)
    client.log_generations([(f"q{n}", "\U0001F600" * 8192, n / 8) for n in range(300)], step=2)
    client.log_generations([(f"q{n}", "\u5956" * 10922, n / 8) for n in range(100)], step=3)
    client.log_generations([(f"q{n}", '"\\' * 16384, n / 8) for n in range(100)], step=4)
    client.log_generations([(f"q{n}", "y", n / 8) for n in range(20000)], step=5)
    client.log_generations([], step=6)
    client.log({"ok": 1.0}, step=7)
"""


def test_p11_signs_that_take_many_bytes_and_single_giants_are_shown_too(
    site: Site, mlflow_server: MlflowServer
) -> None:
    """Siblings: one sample of 15 MB, emoji and quotes that grow when written as JSON, many small rows, none."""
    with FourTrackers(site, mlflow_server, front=True) as trackers:
        for server in trackers.servers.values():
            server.rules(Rule(Fault.TOO_LARGE, above_bytes=LIMIT_BYTES))
        with trackers.daemon() as daemon:
            run_script(site, ODD, trackers.project)
            status = daemon.wait_settled(9, timeout_s=200)
            oracle.assert_law(status, pending=0)

        for name in trackers.names:
            figures = status["backends"][name]
            assert figures["dead_lettered"] == 0, (name, figures)
            assert trackers.values(name, "r1", "ok") == [(7, 1.0)], name
            found = [(step, row) for step, rows in trackers.tables(name, "r1") for row in rows]
            rows = {1: 2, 2: 300, 3: 100, 4: 100, 5: 20_000}
            assert {step: sum(each == step for each, _ in found) for step in rows} == rows, name
            giant = next(row for step, row in found if step == 1 and row[0] == "q")
            assert "[cut: 1000000 of 15000000 characters]" in giant[1], name
            assert all(row[1] == "\U0001f600" * 8192 for step, row in found if step == 2), name
