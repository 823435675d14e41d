"""Who still lives: certain where the kernel tells, by heartbeat where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from support.processes import wait_for, zombies
from support.spools import dead_pid
from verl_shipper.liveness import DEAD_AGE_S, REBOOTED_AGE_S, Life, judge, silent_s
from verl_shipper_spool.header import this_process

HERE = this_process()
LONG_S = DEAD_AGE_S + 1


def test_this_process_lives_however_silent_it_is() -> None:
    assert judge(HERE, HERE, LONG_S) is Life.ALIVE


def test_a_process_that_ended_is_gone_at_once() -> None:
    assert judge(replace(HERE, pid=dead_pid()), HERE, 0.0) is Life.GONE


def test_a_pid_that_was_given_to_another_process_is_not_the_writer() -> None:
    assert judge(replace(HERE, start_ticks=HERE.start_ticks - 1), HERE, 0.0) is Life.GONE


def test_a_writer_without_a_start_time_is_known_by_its_pid() -> None:
    assert judge(replace(HERE, start_ticks=0), HERE, 0.0) is Life.ALIVE


def test_a_process_nobody_waited_for_writes_no_more() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    wait_for(lambda: child.pid in zombies(os.getpid()), 20.0, "the child ends")

    assert judge(replace(HERE, pid=child.pid, start_ticks=0), HERE, 0.0) is Life.GONE
    child.wait()


@pytest.mark.parametrize(
    ("silent", "life"), [(0.0, Life.UNKNOWN), (REBOOTED_AGE_S, Life.UNKNOWN), (REBOOTED_AGE_S + 1, Life.GONE)]
)
def test_a_writer_of_another_boot_is_gone_once_it_is_silent(silent: float, life: Life) -> None:
    """Two hosts may share a name and a file system: then the one that beats is no ghost of the other."""
    assert judge(replace(HERE, boot_id="f" * 36), HERE, silent) is life


@pytest.mark.parametrize(
    "changes",
    [
        {"node": "elsewhere", "boot_id": "f" * 36},
        {"pid_namespace": "pid:[1]"},
        {"pid_namespace": ""},
        {"boot_id": "", "pid_namespace": "pid:[1]"},
    ],
    ids=["host", "container", "unknown namespace", "unknown boot"],
)
def test_a_writer_we_cannot_see_is_judged_by_its_heartbeat(changes: dict[str, str]) -> None:
    writer = replace(HERE, **changes)  # type: ignore[arg-type]

    assert judge(writer, HERE, DEAD_AGE_S - 1) is Life.UNKNOWN
    assert judge(writer, HERE, LONG_S) is Life.GONE


def test_silence_is_the_age_of_the_youngest_file(tmp_path: Path) -> None:
    for name, age_s in (("old", 500.0), ("young", 100.0)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (0, time.time() - age_s))

    assert silent_s(str(tmp_path), time.time()) == pytest.approx(100.0, abs=5.0)


def test_silence_that_cannot_be_told_is_none(tmp_path: Path) -> None:
    assert silent_s(str(tmp_path / "absent"), time.time()) == 0.0
    assert silent_s(str(tmp_path), time.time()) == 0.0
    (tmp_path / "future").write_text("")
    os.utime(tmp_path / "future", (0, time.time() + 500))
    assert silent_s(str(tmp_path), time.time()) == 0.0
