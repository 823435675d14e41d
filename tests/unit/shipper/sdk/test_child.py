"""A disposable process: it answers, its failures are told apart, and nothing of it outlives whoever asked."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import is_alive, wait_for
from verl_shipper.backends.sdk.child import Child, ChildError

TESTS = Path(__file__).parents[3]
MODULE = "unit.shipper.sdk.echo_child"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TESTS)}


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    made = Child(MODULE, folder=str(tmp_path), environment=ENVIRONMENT)
    yield made
    made.end()


def test_what_is_asked_is_answered_in_any_size(child: Child) -> None:
    for value in (None, 1.5, {"a": [1, "ä😀"]}, "x" * 5_000_000, b"\0" * 3_000_000):
        assert child.call("echo", 20, value=value) == value


def test_a_process_with_many_open_files_is_served_too(tmp_path: Path) -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    child = Child(MODULE, folder=str(tmp_path), environment=ENVIRONMENT)
    try:
        assert child.call("echo", 20, value="x" * 500_000) == "x" * 500_000
    finally:
        child.end()
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_what_the_package_raises_is_an_answer_and_the_process_goes_on(child: Child) -> None:
    for op, kind in (("fail", "LookupError"), ("leave", "SystemExit"), ("nothing", "KeyError")):
        with pytest.raises(ChildError) as caught:
            child.call(op, 20, **({"text": "no such run"} if op == "fail" else {}))
        assert caught.value.kind == kind
    assert child.call("echo", 20, value=1) == 1


def test_a_secret_in_what_was_raised_is_not_passed_on(child: Child) -> None:
    with pytest.raises(ChildError) as caught:
        child.call("fail", 20, text="proxy http://user:hunter2@proxy:80 refused")
    assert "hunter2" not in str(caught.value)


def test_a_child_that_hangs_is_given_up_in_time_and_asked_no_more(child: Child) -> None:
    began_s = time.monotonic()
    with pytest.raises(ChildError) as caught:
        child.call("sleep", 0.5, seconds=60)
    assert caught.value.kind == "hung"
    assert time.monotonic() - began_s < 10
    assert not child.is_alive
    with pytest.raises(ChildError, match="ended"):
        child.call("echo", 5, value=1)


def test_a_child_that_does_not_read_is_given_up_in_time(child: Child) -> None:
    with pytest.raises(ChildError):
        child.call("sleep", 0.2, seconds=60)
    child.is_spent = False
    with pytest.raises(ChildError) as caught:
        child.call("echo", 0.5, value="x" * 10_000_000)
    assert caught.value.kind == "hung"


def test_a_child_that_dies_is_told_with_its_last_words(child: Child) -> None:
    with pytest.raises(ChildError, match="out of luck") as caught:
        child.call("die", 20, words="something\nout of luck")
    assert caught.value.kind == "gone"


def test_ending_takes_the_helpers_along(child: Child) -> None:
    helper = child.call("helper", 20)
    child.end()
    child.end()
    wait_for(lambda: not is_alive(helper), 10, "the helper is gone")
    assert not is_alive(child.pid)


def test_nothing_outlives_whoever_asked(tmp_path: Path) -> None:
    program = f"""
import os, signal
from verl_shipper.backends.sdk.child import Child
child = Child({MODULE!r}, folder={str(tmp_path)!r}, environment=os.environ)
print(child.pid, child.call("helper", 20), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_for(lambda: not any(map(is_alive, pids)), 10, "child and helper are gone")


def test_a_kept_descriptor_is_held_until_the_child_is_gone(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    made = Child(MODULE, folder=str(tmp_path), environment=ENVIRONMENT, keep_fds=[write_fd])
    os.close(write_fd)
    os.set_blocking(read_fd, False)
    assert made.call("echo", 20, value=1) == 1
    with pytest.raises(BlockingIOError):
        os.read(read_fd, 1)
    made.end()
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)
