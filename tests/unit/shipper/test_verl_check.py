"""`doctor --verl`: which road a version takes, why it is or is not active, and who has shipped."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from support.streams import make_header
from verl_shipper import verl_check
from verl_shipper.checks import Finding, Level
from verl_shipper.ingest import Ingest
from verl_shipper_spool.header import HEADER_NAME, encode_header

PLUGIN = "verl_shipper_client.verl_plugin"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS", "VERL_SHIPPER_TAKEOVER", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(verl_check, "CLUSTER_FILE", "/nowhere")


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: version)


def one(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_without_verl_it_says_with_which_python_to_ask() -> None:
    finding = one(verl_check.verl_findings())
    assert finding.level is Level.WARN
    assert "-m verl_shipper doctor --verl" in finding.hint
    assert list(verl_check.driver_findings()) == list(verl_check.worker_findings()) == []


@pytest.mark.parametrize(
    ("policy", "level"), [("", Level.OK), ("auto", Level.OK), ("none", Level.FAIL), ("other", Level.FAIL)]
)
def test_verl_0_9_loads_the_entry_point_unless_its_policy_says_no(
    monkeypatch: pytest.MonkeyPatch, policy: str, level: Level
) -> None:
    install(monkeypatch, "0.9.1")
    if policy:
        monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    assert one(verl_check.verl_findings()).level is level
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other, shipper")
    assert one(verl_check.verl_findings()).level is Level.OK


def test_an_environment_without_our_entry_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.9.1")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    finding = one(verl_check.verl_findings())
    assert finding.level is Level.FAIL
    assert "pip install" in finding.hint


def test_an_older_verl_wants_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.8.0")
    finding = one(verl_check.verl_findings())
    assert finding.level is Level.FAIL
    assert f"export VERL_USE_EXTERNAL_MODULES={PLUGIN}" in finding.hint
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", f"mine,{PLUGIN}")
    assert one(verl_check.verl_findings()).level is Level.OK
    install(monkeypatch, "0.5.0")
    assert one(verl_check.verl_findings()).level is Level.WARN


@pytest.mark.parametrize(
    ("returncode", "stdout", "stderr", "level"),
    [
        (0, "True\n", "", Level.OK),
        (0, "False\n", "", Level.FAIL),
        (1, "", "Traceback\nImportError: no torch\n", Level.FAIL),
    ],
)
def test_the_driver_is_looked_at_by_an_import(
    monkeypatch: pytest.MonkeyPatch, returncode: int, stdout: str, stderr: str, level: Level
) -> None:
    install(monkeypatch, "0.9.1")
    done: Any = subprocess.CompletedProcess([], returncode, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    finding = one(verl_check.driver_findings())
    assert finding.level is level
    assert ("no torch" in finding.what) == bool(stderr)


def test_an_import_that_takes_for_ever_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 1)

    install(monkeypatch, "0.9.1")
    monkeypatch.setattr(subprocess, "run", hang)
    assert one(verl_check.driver_findings()).level is Level.WARN


def test_workers_of_a_cluster_that_runs_have_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "0.8.0")
    assert "inherit" in one(verl_check.worker_findings()).what
    cluster = tmp_path / "ray_current_cluster"
    cluster.write_text("10.0.0.1:6379\n")
    monkeypatch.setattr(verl_check, "CLUSTER_FILE", str(cluster))
    finding = one(verl_check.worker_findings())
    assert finding.level is Level.WARN
    assert "10.0.0.1:6379" in finding.what
    assert f"VERL_USE_EXTERNAL_MODULES={PLUGIN}" in finding.hint
    install(monkeypatch, "0.9.1")
    assert one(verl_check.worker_findings()).level is Level.OK


def test_whether_anything_would_be_shipped_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "trainer.logger" in one(verl_check.asked_findings()).what
    monkeypatch.setenv("VERL_SHIPPER_TAKEOVER", "yes")
    assert "shipped, not called" in one(verl_check.asked_findings()).what


def test_processes_that_have_shipped_are_counted_wherever_their_streams_are(tmp_path: Path) -> None:
    spool, state = tmp_path / "spool", tmp_path / "state"
    waiting = make_header(run_id="r1", forked=True)
    folder = spool / waiting.stream_id
    folder.mkdir(parents=True)
    (folder / HEADER_NAME).write_bytes(encode_header(waiting))
    ingest = Ingest(str(state), 1 << 30)
    ingest.open()
    for header in (make_header(run_id="r1"), make_header(run_id="r1", forked=True), waiting):
        ingest.greet(header)
    ingest.settle()
    ingest.close()

    what = one(verl_check.seen_findings(str(spool), str(state / "daemon.sqlite3"))).what
    assert "run r1 (project/experiment): its trainer (pid 4242) and 2 workers" in what


def test_a_machine_that_has_seen_nothing_says_so(tmp_path: Path) -> None:
    assert "no process" in one(verl_check.seen_findings(str(tmp_path), str(tmp_path / "none"))).what
