"""Fixtures of all tiers. No test leaves a process behind: whatever is left is ended, and the test fails."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import children, command_line, kill, wait_for, wait_gone, zombies
from support.site import Site

pytest_plugins = ["support.mlflow_server"]  # the session-wide fixture `mlflow_server`

PR_SET_CHILD_SUBREAPER = 36
LEFT_S = 5.0  # how long an orphan may take to notice that its parent is gone


def pytest_configure(config: pytest.Config) -> None:
    """Orphans of killed processes become our children, so that the leak check sees them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail a test that leaves a child process behind."""
    before = set(children(os.getpid()))
    waiting = set(zombies(os.getpid()))

    yield

    def left() -> list[int]:
        new = set(children(os.getpid())) - before
        return [pid for pid in new if "resource_tracker" not in command_line(pid)]

    with contextlib.suppress(AssertionError):
        wait_for(lambda: not left(), LEFT_S, "children end")
    leaked = {pid: command_line(pid) for pid in left()}
    for pid in leaked:
        kill(pid)
    for pid in leaked:
        wait_gone([pid], LEFT_S)
    for pid in set(zombies(os.getpid())) - waiting:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    assert not leaked, f"processes left behind: {leaked}"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """An isolated place for one daemon and its trainers."""
    made = Site(tmp_path)
    yield made
    made.close()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder outside /tmp that users other than ours can reach."""
    path = Path(tempfile.mkdtemp(prefix="verl-shipper-test-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
