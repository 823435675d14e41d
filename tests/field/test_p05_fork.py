"""P05: fork copies sockets, threads and locks. A child logs into streams of its own; the parent's are left alone."""

from __future__ import annotations

import json

import pytest

from support import oracle
from support.daemon import Daemon
from support.site import Site
from support.trainer import run_script

pytestmark = pytest.mark.alone

# 20 repeats of: four fork workers that each log once and end normally, then the parent goes on.
WORKERS = """
import multiprocessing, warnings
from verl_shipper_client import Client

warnings.simplefilter("ignore")
client = Client("p05", "exp", run_id="r1")

def work(number):
    client.log({"child": float(number)}, step=number)

fork = multiprocessing.get_context("fork")
for repeat in range(20):
    client.log({"parent": float(repeat)}, step=repeat)
    workers = [fork.Process(target=work, args=(repeat * 4 + number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0, worker.exitcode
for step in range(20, 120):
    client.log({"parent": float(step)}, step=step)
client.finish(exit_code=0)
"""
# Forks at moments when another thread is inside log(); the child logs too, ends by every road, never hangs.
UNDER_LOAD = """
import os, signal, threading, time, warnings
from verl_shipper_client import Client

warnings.simplefilter("ignore")
client = Client("p05", "exp", run_id="r1")
stop = threading.Event()
logged = 0

def busy():
    global logged
    while not stop.is_set():
        client.log({"parent": float(logged)}, step=logged)
        logged += 1
        time.sleep(0.001)

threads = [threading.Thread(target=busy)]
threads[0].start()
for number in range(30):
    time.sleep(0.01)
    pid = os.fork()
    if pid == 0:
        signal.alarm(15)  # a hang ends by SIGALRM, which the parent sees
        client.log({"child": float(number)}, step=number)
        if number % 3 == 0:
            client.finish(exit_code=0)
        os._exit(0)
    _, code = os.waitpid(pid, 0)
    assert code == 0, (number, code)
stop.set()
for thread in threads:
    thread.join()
client.finish(exit_code=0)
print(logged)
"""


def test_p05_fork_workers_that_log_once_deliver_and_harm_nothing(site: Site) -> None:
    with Daemon(site, *site.file_backend()) as daemon:
        run_script(site, WORKERS, timeout_s=120)
        status = daemon.wait_settled(202)

    lines = oracle.read_lines(site.output("p05", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "parent"), [(n, float(n)) for n in range(120)], "parent")
    oracle.assert_exactly(oracle.values(lines, "child"), [(n, float(n)) for n in range(80)], "children")
    assert len(oracle.of_kind(lines, "run_start")) == 1, "a child is not a new start of the run"
    assert len(oracle.of_kind(lines, "run_finish")) == 1, "the end of a child is not the end of the run"
    oracle.assert_law(status, pending=0)


def test_p05_forks_while_another_thread_logs_never_hang(site: Site) -> None:
    with Daemon(site, *site.file_backend()) as daemon:
        result = run_script(site, UNDER_LOAD, timeout_s=120)
        logged = json.loads(result.stdout)
        status = daemon.wait_settled(logged + 32)

    lines = oracle.read_lines(site.output("p05", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "parent"), [(n, float(n)) for n in range(logged)], "parent")
    oracle.assert_exactly(oracle.values(lines, "child"), [(n, float(n)) for n in range(30)], "children")
    oracle.assert_law(status, pending=0)


def test_forked_children_without_a_daemon_leave_their_records_in_the_spool(site: Site) -> None:
    """Sibling: the same before any daemon lives; every child's stream is found and delivered afterwards."""
    run_script(site, WORKERS, timeout_s=120)

    with Daemon(site, *site.file_backend()) as daemon:
        daemon.wait_settled(202)

    lines = oracle.read_lines(site.output("p05", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "child"), [(n, float(n)) for n in range(80)], "children")
    oracle.assert_exactly(oracle.values(lines, "parent"), [(n, float(n)) for n in range(120)], "parent")
