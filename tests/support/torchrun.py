"""Jobs of torchrun: one agent, or two of them that play two nodes and meet at a free port.

Must not know: daemons. On failure: AssertionError with what the job has printed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.processes import descendants, kill, wait_gone
from support.site import Site


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def one_node(script: Path, *options: str, ranks: int = 2) -> list[str]:
    """Words that start a job on this node, on a port of its own."""
    return _words(script, ranks, "--master-addr", "127.0.0.1", "--master-port", str(free_port()), *options)


def two_nodes(script: Path, *options: str) -> list[list[str]]:
    """Words for the two agents of a job of one rank each."""
    meet = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    return [_words(script, 1, *meet, *options)] * 2


def run_jobs(site: Site, jobs: Sequence[Sequence[str]], timeout_s: float = 100.0) -> str:
    """Run all of them at once to their ends, which must be good; returns all they have said."""
    logs = [site.root / f"torchrun-{number}.log" for number in range(len(jobs))]
    started = []
    for words, log in zip(jobs, logs, strict=True):
        with open(log, "wb") as output:
            environment = site.env(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
            started.append(subprocess.Popen(words, env=environment, cwd=site.root, stdout=output, stderr=output))
    try:
        codes = [job.wait(timeout=timeout_s) for job in started]
    except subprocess.TimeoutExpired:
        codes = [-signal.SIGALRM]
    finally:
        for job in started:
            below = descendants(job.pid) if job.poll() is None else set()
            if job.poll() is None:
                job.kill()
                job.wait(timeout=10)
            for pid in below:
                kill(pid)
            wait_gone(below, 10)
    words = "\n".join(log.read_text(errors="replace") for log in logs)
    assert not any(codes), f"ended with {codes}:\n{words}"
    return words


def _words(script: Path, ranks: int, *options: str) -> list[str]:
    front = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*front, *options, os.fspath(script)]
