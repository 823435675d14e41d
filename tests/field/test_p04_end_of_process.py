"""P04: a process ends by every road there is. It never hangs, and what `log()` returned for is delivered."""

from __future__ import annotations

import subprocess
import time

import pytest

from support import oracle
from support.daemon import Daemon
from support.site import Site
from support.trainer import run_script

pytestmark = pytest.mark.alone

FALL_OFF = """
import sys, time
from verl_shipper_client import Client

client = Client("p04", "exp", run_id="r1")
for step in range(10):
    client.log({"n": float(step)}, step=step)
sys.stdout.write(f"{time.time()}")
sys.stdout.flush()
"""
END = """
import os, signal, sys, threading
from verl_shipper_client import Client

client = Client("p04", "exp", run_id="r1")
for step in range(100):
    client.log({"n": float(step)}, step=step)
client.log_generations([("question", "answer", 1.0)], step=99)
"""
ENDS = {
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "_exit": "os._exit(0)",
    "exception": "raise RuntimeError('training failed')",
    "sys.exit": "sys.exit(3)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "abort": "os.abort()",
}
CODES = {"kill": -9, "_exit": 0, "exception": 1, "sys.exit": 3, "SIGTERM": -15, "abort": -6}
TWICE = """
from verl_shipper_client import Client

client = Client("p04", "exp", run_id="r1")
client.log({"n": 0.0}, step=0)
client.finish(exit_code=0)
client.finish(exit_code=0)
client.log({"n": 1.0}, step=1)
client.log_generations([("question", "answer", 1.0)], step=1)
"""
LATE = """
import atexit, sys
from verl_shipper_client import Client

client = Client("p04", "exp", run_id="r1")

class Late:
    def __del__(self):
        client.log({"n": 1.0}, step=1)

keep = Late()
atexit.register(lambda: client.log({"n": 0.0}, step=0))
sys.modules["keep"] = keep
"""


def test_p04a_falling_off_the_end_of_the_script_takes_less_than_two_seconds(site: Site) -> None:
    result = run_script(site, FALL_OFF)
    took_s = time.time() - float(result.stdout)

    with Daemon(site, *site.file_backend()) as daemon:
        daemon.wait_settled(11)

    assert took_s < 2, f"the process took {took_s:.2f} s to end"
    lines = oracle.read_lines(site.output("p04", "exp", "r1"))
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(10)], "file")


@pytest.mark.parametrize("way", ENDS)
def test_p04bc_what_was_logged_before_a_sudden_end_is_delivered(site: Site, way: str) -> None:
    with Daemon(site, *site.file_backend()) as daemon:
        run_script(site, f"{END}\n{ENDS[way]}\n", code=CODES[way])
        status = daemon.wait_settled(102)

    lines = oracle.read_lines(site.output("p04", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(100)], "file")
    assert len(oracle.of_kind(lines, "generations")) == 1
    oracle.assert_law(status, pending=0)


def test_p04d_finish_twice_and_log_after_finish_lose_nothing(site: Site) -> None:
    run_script(site, TWICE)

    with Daemon(site, *site.file_backend()) as daemon:
        daemon.wait_settled(5)

    lines = oracle.read_lines(site.output("p04", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(0, 0.0), (1, 1.0)], "file")
    assert len(oracle.of_kind(lines, "generations")) == 1
    assert len(oracle.of_kind(lines, "run_finish")) == 1


def test_logging_during_interpreter_shutdown_neither_hangs_nor_speaks(site: Site) -> None:
    """Sibling: atexit handlers and destructors log while the interpreter is being taken apart."""
    result = run_script(site, LATE, timeout_s=20)

    with Daemon(site, *site.file_backend()) as daemon:
        daemon.wait_settled(2)

    assert "Traceback" not in result.stderr
    lines = oracle.read_lines(site.output("p04", "exp", "r1"))
    assert (0, 0.0) in oracle.values(lines, "n")


def test_a_closed_standard_error_harms_nobody(site: Site) -> None:
    """Sibling: a launcher that closed stderr must not turn our warnings into exceptions."""
    source = "import os\nos.close(2)\n" + FALL_OFF.replace("import sys, time", "import sys, time; sys.stderr = None")
    result = run_script(site, source)

    assert isinstance(result, subprocess.CompletedProcess)
    with Daemon(site, *site.file_backend()) as daemon:
        daemon.wait_settled(11)
