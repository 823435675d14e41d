"""The spine: one real run from `log()` to file, console and MLflow, by the commands a person would type."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import oracle
from support.daemon import SHIPPER, Daemon, shipper, without_samples
from support.processes import wait_for
from support.site import Site
from support.trainer import Ledger, counting_trainer, write_script

pytestmark = pytest.mark.alone

TRAINER = """
import math, os, signal, sys, time
from verl_shipper_client import Client

config = {"lr": 1e-4, "model": {"name": "tiny", "layers": 2}, "secret": {"api_key": "SENTINEL"}}
with Client(project="spine", experiment="first", config=config, run_id="r1", rank=0) as client:
    for step in range(5):
        client.log({"loss": 1 / 8 / (step + 1), "actor": {"kl": 0.5}}, step=step)
    client.log({"bad": math.nan, "up": math.inf, "down": -math.inf, "fine": 1.0}, step=5)
    client.log_generations([("2+2?", "4", 1.0), ("cut \\ud83d here", "\\U0001F600", 0.0)], step=5)
    with client.span("rollout", inputs={"prompt": "2+2?"}, attributes={"step": 5}) as outer:
        with client.span("generate") as inner:
            inner.set_outputs({"text": "4"})
        outer.set_outputs("done")
    now_ns = time.time_ns()
    client.log_span("late", now_ns - 1000, now_ns, trace_id=outer.trace_id, parent_id=outer.span_id)
    client.log_text("note", "warm-up is over", step=5)
    client.finish(exit_code=0)
    client.finish(exit_code=0)
how = sys.argv[1]
if how.startswith("-"):
    os.kill(os.getpid(), int(how[1:]))
sys.exit(int(how))
"""
# start, 6 steps, generations, 3 spans, text, end
RECORDS = 13


def _run(site: Site, how: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = write_script(site, TRAINER)
    return shipper(site, "run", *arguments, "--", sys.executable, script, how, timeout_s=180)


def test_one_run_reaches_file_console_and_mlflow_by_one_command(site: Site) -> None:
    uri = f"sqlite:///{site.root}/ml.db"
    backends = [*site.file_backend(), "--backend", "console", *site.mlflow_backend(uri)]

    result = _run(site, "0", *backends, "--drain-timeout", "120")

    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    _check_file(oracle.read_lines(site.output("spine", "first", "r1")))
    _check_console(result.stdout + result.stderr)
    _check_mlflow(oracle.mlflow_run(uri, "spine", "r1", "loss", "actor/kl", "fine", "bad"))
    status = json.loads(shipper(site, "status", "--json").stdout)
    oracle.assert_law(status, pending=0)
    for name in ("file", "console", "mlflow"):
        assert status["backends"][name]["logged"] == RECORDS
        assert status["backends"][name]["delivered"] == RECORDS
        assert status["backends"][name]["runs"]["r1"]["delivered"] == RECORDS
        assert not status["backends"][name]["parked"]


def _check_file(lines: list[oracle.Line]) -> None:
    oracle.assert_once_in_order(lines)
    kinds = sorted(line.kind for line in lines)
    assert kinds == sorted(["run_start", *["metrics"] * 6, "generations", *["span"] * 3, "text", "run_finish"]), kinds
    assert {line.run_id for line in lines} == {"r1"}
    assert sorted(line.seq for line in lines) == list(range(RECORDS))
    oracle.assert_exactly(oracle.values(lines, "loss"), [(n, 0.125 / (n + 1)) for n in range(5)], "loss")
    (odd,) = [line.data for line in lines if line.kind == "metrics" and "bad" in line.data]
    assert odd == {"bad": "NaN", "up": "Infinity", "down": "-Infinity", "fine": 1.0}
    text = json.dumps([line.data for line in lines])
    assert "SENTINEL" not in text, "a secret of the configuration was shipped"
    (generations,) = oracle.of_kind(lines, "generations")
    assert generations.step == 5
    shown = json.dumps(generations.data, ensure_ascii=False)
    assert "\U0001f600" in shown
    assert "cut " in shown
    shown.encode("utf-8")  # a lone surrogate would raise
    spans = {line.data["name"]: line.data for line in oracle.of_kind(lines, "span")}
    assert set(spans) == {"rollout", "generate", "late"}
    assert spans["generate"]["parent_id"] == spans["rollout"]["span_id"] == spans["late"]["parent_id"]
    assert len({span["trace_id"] for span in spans.values()}) == 1
    (note,) = oracle.of_kind(lines, "text")
    assert note.data == {"note": "warm-up is over"}
    (end,) = oracle.of_kind(lines, "run_finish")
    assert end.data["exit_code"] == 0


def _check_console(text: str) -> None:
    assert "loss" in text
    assert "0.125" in text
    assert "SENTINEL" not in text


def _check_mlflow(run: oracle.MlflowRun) -> None:
    oracle.assert_exactly(run.history("loss"), [(n, 0.125 / (n + 1)) for n in range(5)], "mlflow loss")
    oracle.assert_exactly(run.history("actor/kl"), [(n, 0.5) for n in range(5)], "mlflow nested key")
    assert run.history("fine") == [(5, 1.0)]
    ((step, value),) = run.history("bad")
    assert step == 5
    assert math.isnan(value)
    assert run.name == "first"
    assert run.status == "FINISHED"
    assert run.params["model/name"] == "tiny"
    assert "SENTINEL" not in json.dumps([run.params, run.tags])
    assert any("generations" in path for path in run.artifacts), run.artifacts


@pytest.mark.parametrize(
    ("how", "code"),
    [("0", 0), ("7", 7), (f"-{signal.SIGTERM.value}", 143), (f"-{signal.SIGKILL.value}", 137)],
    ids=["success", "failure", "SIGTERM", "SIGKILL"],
)
def test_run_ends_with_the_exit_code_of_its_command_and_delivers_first(site: Site, how: str, code: int) -> None:
    result = _run(site, how, *site.file_backend())

    assert result.returncode == code, result.stderr
    assert len(oracle.read_lines(site.output("spine", "first", "r1"))) == RECORDS


def test_a_command_that_does_not_exist_is_told_and_is_no_traceback(site: Site) -> None:
    result = shipper(site, "run", *site.file_backend(), "--", "/no/such/command")

    assert result.returncode == 1, result.stderr
    assert "/no/such/command" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_signal_to_run_reaches_the_command_and_what_it_logged_is_delivered(site: Site) -> None:
    """A scheduler stops a job by SIGTERM: the trainer gets it, the records arrive, the exit code says it."""
    source = """
import sys, time
from verl_shipper_client import Client

client = Client("spine", "first", run_id="r1")
for step in range(10):
    client.log({"loss": float(step)}, step=step)
open(sys.argv[1], "w").close()
time.sleep(60)
"""
    up = site.root / "up"
    launcher = [
        *SHIPPER,
        "run",
        *without_samples([]),
        *site.file_backend(),
        "--",
        sys.executable,
        str(write_script(site, source)),
        str(up),
    ]
    with subprocess.Popen(launcher, env=site.env(), cwd=site.root, stderr=subprocess.PIPE, text=True) as process:
        wait_for(up.exists, 30, "the trainer has logged")
        process.terminate()
        _, errors = process.communicate(timeout=30)

    assert process.returncode == 143, errors
    lines = oracle.read_lines(site.output("spine", "first", "r1"))
    oracle.assert_exactly(oracle.values(lines, "loss"), [(n, float(n)) for n in range(10)], "file")


def test_run_beside_a_daemon_that_is_there_already_says_who_holds_the_spool(site: Site) -> None:
    with Daemon(site, *site.file_backend()) as daemon:
        result = _run(site, "0", *site.file_backend())

    assert result.returncode == 3, result.stderr
    assert str(daemon.pid) in result.stderr


def test_flush_delivers_an_offline_folder_and_says_nothing_new_the_second_time(site: Site, tmp_path: Path) -> None:
    ledger = Ledger(site.root / "ledger")
    counting_trainer(site, ledger, count=500, pace_s=0).wait()
    login = Site(tmp_path / "login")  # another place and another state, as on a login node

    first = shipper(login, "flush", site.spool, *login.file_backend())
    second = shipper(login, "flush", site.spool, *login.file_backend())

    assert first.returncode == 0, first.stderr
    lines = oracle.read_lines(login.output("count", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(500)], "file")
    assert second.returncode == 0, second.stderr
    assert "nothing new" in (second.stdout + second.stderr).lower()
    assert oracle.read_lines(login.output("count", "exp", "r1")) == lines
    status = json.loads(shipper(login, "status", "--json").stdout)
    oracle.assert_law(status, pending=0)
    assert status["backends"]["file"]["delivered"] == 502


def test_flush_that_leaves_something_ends_with_4_and_says_how_many(site: Site, tmp_path: Path) -> None:
    """The tracker is down and the person gives up with Ctrl-C; another flush, elsewhere, finds all of it."""
    ledger = Ledger(site.root / "ledger")
    counting_trainer(site, ledger, count=50, pace_s=0).wait()
    login = Site(tmp_path / "login")
    closed = login.mlflow_backend("http://127.0.0.1:9")  # the discard port: nobody listens there
    with subprocess.Popen(
        [*SHIPPER, "flush", str(site.spool), *closed],
        env=login.env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        time.sleep(5)  # it tries, fails, and would go on for ever
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=20)

    assert process.returncode == 4, told
    assert "52" in told
    assert "Traceback" not in told
    again = shipper(login, "flush", site.spool, *login.file_backend())
    assert again.returncode == 0, again.stderr
    assert len(oracle.read_lines(login.output("count", "exp", "r1"))) == 52


def test_cat_shows_a_spool_and_a_stream_as_json_lines(site: Site) -> None:
    ledger = Ledger(site.root / "ledger")
    counting_trainer(site, ledger, count=20, pace_s=0).wait()
    (stream,) = site.stream_folders()

    for place in (site.spool, stream):
        result = shipper(site, "cat", place)

        assert result.returncode == 0, result.stderr
        records = [json.loads(line) for line in result.stdout.splitlines()]
        assert [record["kind"] for record in records] == ["run_start", *["metrics"] * 20, "run_finish"]
        assert [record["data"]["n"] for record in records[1:-1]] == [float(n) for n in range(20)]


def test_dead_letters_of_a_healthy_spine_are_none(site: Site) -> None:
    _run(site, "0", *site.file_backend())

    result = shipper(site, "dead-letters", "list")

    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["run", "status", "flush", "cat", "dead-letters", "demo"])
def test_every_command_has_help_with_an_example(site: Site, command: str) -> None:
    result = shipper(site, command, "--help")

    assert result.returncode == 0, result.stderr
    examples = [line for line in result.stdout.splitlines() if line.strip().startswith(f"verl-shipper {command}")]
    assert examples, result.stdout
