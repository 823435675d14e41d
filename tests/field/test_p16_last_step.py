"""P16: the last steps never reached the trackers. Here sampling keeps first, last, whole steps and all validations.

Siblings: a trainer that is killed instead of finishing; steps that never fall on a multiple; a run that is resumed by a
new process; a daemon that is killed in the middle; validation inside the same call; patterns with frequencies of their
own; a folder that is flushed while nobody knows whether its writer lives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support import oracle
from support.daemon import Daemon, shipper
from support.four_trackers import FourTrackers
from support.mlflow_server import MlflowServer
from support.processes import wait_for
from support.site import Site
from support.trainer import Trainer, run_script, write_script

TRAINER = """
import json, os, signal, sys, time
from verl_shipper_client import Client

project, run_id, plan = sys.argv[1:]
plan = json.loads(plan)
client = Client(project, "exp", run_id=run_id)
for step in plan["steps"]:
    if plan.get("together"):
        more = {"val/score": float(step)} if step in plan["val"] else {}
        client.log({"train/loss": float(step), **more}, step=step)
    else:
        if step in plan["val"]:
            client.log({"val/score": float(step)}, step=step)
        if step or not plan["val"]:
            client.log({"train/loss": float(step)}, step=step)
            client.log({"timing/step_s": 1.0}, step=step)
    time.sleep(plan.get("pause_s", 0))
if plan.get("kill"):
    os.kill(os.getpid(), signal.SIGKILL)
client.finish(0, timeout_s=plan.get("patience_s", 10))
"""
VALIDATED = [0, 30, 60, 93, 95]
STEPS = list(range(96))
TENTH = ["--set", "sampling.log_frequency=10"]


def _plan(**values: Any) -> str:
    return json.dumps({"steps": STEPS, "val": VALIDATED} | values)


def _points(steps: Iterable[int]) -> list[tuple[int | None, Any]]:
    return [(step, float(step)) for step in steps]


def _steps(site: Site, key: str) -> list[int | None]:
    """Steps of a key at the backend file, every time it is there."""
    lines = [line for path in sorted(site.out.rglob("*.jsonl")) for line in oracle.read_lines(path)]
    return [line.step for line in lines if line.kind == "metrics" and key in line.data]


def _file(site: Site, *more: str | Path) -> Daemon:
    return Daemon(site, "--backend", "file", "--set", f"backends.file.dir={site.out}", *more)


def test_p16_the_last_step_the_validations_and_every_tenth_step_arrive_whole(
    site: Site, mlflow_server: MlflowServer
) -> None:
    """The case itself, at four trackers: 95 steps of two calls and five validations."""
    kept = [*range(10, 91, 10), 95]
    with FourTrackers(site, mlflow_server) as trackers, trackers.daemon(*TENTH) as daemon:
        run_script(site, TRAINER, trackers.project, "r1", _plan())
        status = daemon.wait_settled(2 + 195, timeout_s=120)
        oracle.assert_law(status, pending=0)

        trackers.assert_values("r1", "train/loss", _points(kept))
        trackers.assert_values("r1", "timing/step_s", [(step, 1.0) for step in kept])
        trackers.assert_values("r1", "val/score", _points(VALIDATED))
        for name in trackers.names:
            account = status["backends"][name]
            assert account["delivered"] == 2 + 2 * len(kept) + len(VALIDATED), name
            assert account["sampled_by"] == {"log_frequency": 2 * (95 - len(kept))}, name
            assert not account["dropped"], name


def test_p16_the_first_step_arrives_when_training_begins_it(site: Site) -> None:
    with _file(site, *TENTH) as daemon:
        run_script(site, TRAINER, "p", "r1", _plan(steps=list(range(1, 96)), val=[]))
        daemon.wait_settled(2 + 190)
    assert _steps(site, "train/loss") == _steps(site, "timing/step_s") == [1, *range(10, 91, 10), 95]


def test_p16_validation_inside_the_same_call_arrives_without_the_rest_of_its_step(site: Site) -> None:
    with _file(site, *TENTH) as daemon:
        run_script(site, TRAINER, "p", "r1", _plan(together=True))
        status = daemon.wait_settled(2 + 96)
    assert _steps(site, "val/score") == VALIDATED
    assert _steps(site, "train/loss") == [*range(0, 91, 10), 95]
    assert status["backends"]["file"]["ignored_values"] == {"sampled_out": 1}  # train/loss beside the validation of 93


def test_p16_steps_that_never_fall_on_a_multiple_are_kept_once_a_window(site: Site) -> None:
    with _file(site, *TENTH) as daemon:
        run_script(site, TRAINER, "p", "r1", _plan(steps=list(range(3, 200, 20)), val=[]))
        daemon.wait_settled(2 + 20)
    assert _steps(site, "train/loss") == list(range(3, 200, 20))


def test_p16_the_last_step_of_a_killed_trainer_arrives(site: Site) -> None:
    with _file(site, *TENTH) as daemon:
        script = write_script(site, TRAINER)
        with Trainer(site, script, "p", "r1", _plan(kill=True)) as trainer:
            wait_for(lambda: not trainer.is_running(), 60, "the trainer is dead")
        daemon.wait_settled(2 + 195, timeout_s=90)
    assert _steps(site, "train/loss") == [*range(10, 91, 10), 95]


def test_p16_a_resumed_run_has_the_last_step_of_both_lives(site: Site) -> None:
    with _file(site, *TENTH) as daemon:
        run_script(site, TRAINER, "p", "r1", _plan(steps=list(range(38)), val=[0]))
        run_script(site, TRAINER, "p", "r1", _plan(steps=list(range(35, 58)), val=[]))
        daemon.wait_settled(2 + 1 + 2 * 37 + 2 + 2 * 23)
    assert _steps(site, "train/loss") == [10, 20, 30, 37, 35, 40, 50, 57]


def test_p16_a_daemon_killed_again_and_again_keeps_the_same_steps(site: Site) -> None:
    script = write_script(site, TRAINER)
    daemon = _file(site, *TENTH)
    with daemon, Trainer(site, script, "p", "r1", _plan(pause_s=0.05)) as trainer:
        while trainer.is_running():
            wait_for(lambda: not trainer.is_running() or _steps(site, "train/loss"), 30, "something arrives")
            daemon.kill()
            daemon.start()
        daemon.wait_settled(2 + 195, timeout_s=60)
    assert _steps(site, "train/loss") == [*range(10, 91, 10), 95]
    assert _steps(site, "val/score") == VALIDATED


def test_p16_patterns_have_frequencies_of_their_own(site: Site) -> None:
    frequencies = '{"*": 10, "timing/*": 50, "val/*": 60}'
    with _file(site, "--set", f"sampling.log_frequency={frequencies}") as daemon:
        run_script(site, TRAINER, "p", "r1", _plan())
        daemon.wait_settled(2 + 195)
    assert _steps(site, "train/loss") == [*range(10, 91, 10), 95]
    assert _steps(site, "timing/step_s") == [50, 95]
    assert _steps(site, "val/score") == [0, 60, 95]


def test_p16_a_trackers_own_frequency_leaves_the_others_alone(site: Site, tmp_path: Path) -> None:
    with _file(
        site,
        "--backend",
        "mlflow",
        "--set",
        f"backends.mlflow.tracking_uri=sqlite:///{tmp_path}/m.db",
        "--set",
        "backends.mlflow.sampling.log_frequency=10",
    ) as daemon:
        run_script(site, TRAINER, "p", "r1", _plan())
        status = daemon.wait_settled(2 + 195, timeout_s=120)
    assert status["backends"]["file"]["sampled_out"] == 0
    assert status["backends"]["mlflow"]["sampled_out"] == 2 * 85


def test_p16_flush_delivers_the_last_step_of_a_writer_that_nobody_can_see(site: Site) -> None:
    """A spool from another machine, without an end: what waits for a next step does not wait for ever."""
    script = write_script(site, TRAINER)
    with Trainer(site, script, "p", "r1", _plan(kill=True, patience_s=0)) as trainer:
        wait_for(lambda: not trainer.is_running(), 60, "the trainer is dead")
    _make_foreign(site)

    result = shipper(site, "flush", site.spool, "--backend", "file", "--set", f"backends.file.dir={site.out}", *TENTH)

    assert result.returncode == 0, result.stderr
    assert _steps(site, "train/loss") == [*range(10, 91, 10), 95]


def _make_foreign(site: Site) -> None:
    """Headers as another machine writes them."""
    from dataclasses import replace

    from verl_shipper_spool.header import decode_header, encode_header

    for path in site.spool.glob("*/stream"):
        header = decode_header(path.read_bytes())
        process = replace(header.process, node="elsewhere", boot_id="f" * 36)
        path.write_bytes(encode_header(replace(header, process=process)))
