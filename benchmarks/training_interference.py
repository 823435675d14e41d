"""What logging does to a training loop: step times bare, with verl-shipper, wandb offline and mlflow, each with
trackers that are well, that hang and that are gone.

    python benchmarks/training_interference.py [--quick] [--rounds 30] [--steps 60] [--patience 10] [--json FILE]
                                               [--cores shared,apart] [--only TEXT]

    round:  bare ▪ subject 1 ▪ bare ▪ subject 2 ▪ … ▪ bare      each a block of steps in its own process
                   └─ ratio to the mean of the two blocks of bare around it ─┘

All processes live through the whole session. The trackers fail when all are warm and what was logged until then is
delivered, as in the middle of a training run.
`file`: a daemon whose tracker is a file, so that the cost of our own servers for tests is not in it.

Out of its turn a subject with everything that belongs to it (its daemon, its SDK's helpers) is stopped by SIGSTOP, so
that nobody runs at another's expense; what was due meanwhile runs in its own next block. A block that takes longer than
`--patience` seconds ends its subject: it is reported as blocked.

    shared   everything may run on all cores
    apart    the training process has the first core, everything else the others, as `taskset` would do it

Needs torch, wandb, mlflow and what the tests need (`pip install -e '.[all,test]' torch`); subjects whose package is
missing are named and left out. torch counts one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node import Node, children, machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from servers.faults import Fault, Rule
from servers.process import ServerProcess
from support.mlflow_server import MlflowServer

KEY = "k" * 40
START_S_MAX = 120.0
SETTLE_S = 3.0  # between the failure of the trackers and the first block
QUIET = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    "OMP_NUM_THREADS": "1",
}
HEALTHY, HANGING, GONE = "well", "hang", "gone"
FILE, NO_DAEMON = "file", "no daemon"
PACKAGES = {"bare": "torch", "verl-shipper": "verl_shipper_client", "wandb offline": "wandb", "mlflow sync": "mlflow"}


class Trackers:
    """An MLflow and a wandb server, and what becomes of them."""

    def __init__(self, folder: Path, state: str) -> None:
        self.state = state
        self.mlflow = MlflowServer(folder / "mlflow")
        self.wandb = ServerProcess("wandb_server", folder / "wandb")

    def start(self) -> None:
        self.mlflow.start()
        self.wandb.start()

    def fail(self) -> None:
        """From now on as the state says: accepting and never answering, or not there."""
        if self.state == HANGING:
            self.mlflow.pause()
            self.wandb.rules(Rule(Fault.HANG))
        elif self.state == GONE:
            self.mlflow.kill()
            self.wandb.kill()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.mlflow.resume()
        with contextlib.suppress(Exception):
            self.mlflow.kill()
        self.wandb.kill()


@dataclass
class Subject:
    """One training process with what belongs to it. `blocked_s`: how long it was waited for in vain."""

    logger: str
    state: str
    process: subprocess.Popen[bytes] | None = None
    node: Node | None = None
    daemon_pid: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # of a step, in each block
    ratios_cpu: list[float] = field(default_factory=list)
    ratios_median: list[float] = field(default_factory=list)
    ratios_mean: list[float] = field(default_factory=list)
    blocked_s: float = 0.0
    account: str = ""
    buffer: bytes = b""

    @property
    def name(self) -> str:
        return self.logger if self.logger == "bare" else f"{self.logger}, {self.state}"

    def start(self, folder: Path, trackers: Trackers | None) -> None:
        """Start it and wait until it is warm."""
        folder.mkdir()
        environment = os.environ | QUIET
        if trackers is not None:
            environment |= {"MLFLOW_TRACKING_URI": trackers.mlflow.uri, "WANDB_BASE_URL": trackers.wandb.url}
        if self.logger == "verl-shipper":
            self.node = Node(str(folder))
            environment |= self.node.env() | {"VERL_SHIPPER_SPOOL_DIR": self.node.spool}
            if self.state != NO_DAEMON:
                self.daemon_pid = self.node.start(*_backends(folder, trackers))
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("training_loop.py")), self.logger, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "words").open("wb"),
            env=environment,
        )
        if self._line(START_S_MAX) != b"ready":
            raise RuntimeError(f"{self.name} did not start: {(folder / 'words').read_text()[-500:]}")
        if self.node is not None and self.daemon_pid:
            _wait_until_delivered(self.node)

    def members(self) -> list[int]:
        """Every process of it, but the training process; parents first."""
        own = tree(self.process.pid)[1:] if self.process else []
        return [*(tree(self.daemon_pid) if self.daemon_pid else []), *own]

    def send(self, number: int) -> None:
        """A signal to all of it; the training process is the first to stop and the last to go on."""
        assert self.process is not None
        pids = [self.process.pid, *self.members()]
        for pid in pids if number == signal.SIGSTOP else reversed(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def block(self, steps: int, patience_s: float) -> list[int] | None:
        """Times of so many steps; None when it does not come to an end."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.send(signal.SIGCONT)
        begun_s = time.monotonic()
        self.process.stdin.write(f"steps {steps}\n".encode())
        self.process.stdin.flush()
        answer = self._line(patience_s)
        if not answer:
            self.blocked_s = time.monotonic() - begun_s
            self.end()
            return None
        self.send(signal.SIGSTOP)
        times_ns: list[int]
        times_ns, cpu_ns = json.loads(answer)
        self.blocks.append(times_ns)
        self.cpu_ms.append(cpu_ns / 1e6 / steps)
        return times_ns

    def end(self) -> None:
        """All of it, by its own processes' ids."""
        if self.process is None:
            return
        self.send(signal.SIGCONT)
        own = tree(self.process.pid)
        for pid in own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self.node is not None:
            self.account = _account(self.node) if self.daemon_pid else ""
            self.node.stop()
        self.process, self.daemon_pid = None, 0

    def _line(self, timeout_s: float) -> bytes:
        assert self.process is not None
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            if not select.select([fd], [], [], max(deadline_s - time.monotonic(), 0))[0]:
                return b""
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                return b""
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line


def tree(pid: int) -> list[int]:
    """A process and all below it, parents first."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            found += children(parent)
    return found


def _backends(folder: Path, trackers: Trackers | None) -> list[str]:
    if trackers is None:
        return ["--backend", "file", "--set", f"backends.file.dir={folder / 'out'}"]
    key = folder / "key"
    key.touch(0o600)
    key.write_text(KEY)
    settings = {
        "mlflow.tracking_uri": trackers.mlflow.uri,
        "wandb.base_url": trackers.wandb.url,
        "wandb.api_key_file": key,
        "wandb.settle_s": 1,
    }
    told = [word for name, value in settings.items() for word in ("--set", f"backends.{name}={value}")]
    return ["--backend", "mlflow", "--backend", "wandb", *told]


def _account(node: Node) -> str:
    """What its daemon has done, so that nobody measures one that sleeps."""
    try:
        backends = node.status()["backends"]
    except Exception as error:
        return f"no status: {error}"
    return ", ".join(f"{name} {each['delivered']} of {each['logged']} records" for name, each in backends.items())


def _wait_until_delivered(node: Node) -> None:
    """The lanes are at work, with all that their trackers' packages load."""
    deadline_s = time.monotonic() + START_S_MAX
    while not all(each["logged"] and not each["pending"] for each in node.status()["backends"].values()):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"trackers that are well do not get what was logged: {_account(node)}")
        time.sleep(1.0)


def pin(pid: int, cores: set[int]) -> None:
    """All threads of a process to these cores."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread), cores)


def session(options: argparse.Namespace, cores: str, folder: Path) -> list[Subject]:
    """All subjects, measured in rounds."""
    subjects = [Subject("bare", "")]
    for logger in ("verl-shipper", "wandb offline", "mlflow sync"):
        states = (HEALTHY, HANGING, GONE, *((FILE, NO_DAEMON) if logger == "verl-shipper" else ()))
        subjects += [Subject(logger, state) for state in states if _is_wanted(logger, state, options.only)]
    trackers = {state: Trackers(folder / state, state) for state in (HEALTHY, HANGING, GONE)}
    with contextlib.ExitStack() as opened:
        for each in trackers.values():
            opened.callback(each.close)
            each.start()
        for place, subject in enumerate(subjects):
            opened.callback(subject.end)
            subject.start(folder / f"subject{place}", trackers.get(subject.state))
            if cores == "apart":
                _set_apart(subject)
        for each in trackers.values():
            each.fail()
        time.sleep(SETTLE_S)
        # Not before: a daemon replaces lanes that were silent for a minute, and a round is shorter.
        for subject in subjects:
            subject.send(signal.SIGSTOP)
        for number in range(options.rounds):
            measure_round(subjects, options.steps, options.patience)
            load = os.getloadavg()[0]
            print(f"{cores}, round {number + 1} of {options.rounds}, load {load:.1f}", file=sys.stderr, flush=True)
    return subjects


def _set_apart(subject: Subject) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    assert subject.process is not None
    pin(subject.process.pid, {first})
    for pid in subject.members():
        pin(pid, set(others))


def measure_round(subjects: list[Subject], steps: int, patience_s: float) -> None:
    bare, *others = subjects
    before = bare.block(steps, patience_s)
    for subject in others:
        if subject.process is None:
            continue
        times = subject.block(steps, patience_s)
        after = bare.block(steps, patience_s)
        assert before is not None, "a bare loop that hangs"
        assert after is not None, "a bare loop that hangs"
        if times is not None:
            around = [statistics.median(before), statistics.median(after)]
            subject.ratios_median.append(statistics.median(times) / statistics.fmean(around))
            subject.ratios_mean.append(statistics.fmean(times) / statistics.fmean([*before, *after]))
            subject.ratios_cpu.append(subject.cpu_ms[-1] / statistics.fmean(bare.cpu_ms[-2:]))
        before = after


def told(subject: Subject) -> dict[str, Any]:
    times_ms = sorted(ns / 1e6 for block in subject.blocks for ns in block)
    figures: dict[str, Any] = {"subject": subject.name, "steps": len(times_ms), "account": subject.account}
    if times_ms:
        figures |= {
            "p50_ms": statistics.median(times_ms),
            "p99_ms": times_ms[min(int(len(times_ms) * 0.99), len(times_ms) - 1)],
            "mean_ms": statistics.fmean(times_ms),
            "max_ms": times_ms[-1],
            "cpu_ms": statistics.median(subject.cpu_ms),
        }
    if subject.ratios_median:
        figures |= {
            "ratio_median": statistics.median(subject.ratios_median),
            "ratio_mean": statistics.median(subject.ratios_mean),
            "ratio_cpu": statistics.median(subject.ratios_cpu),
            "spread": _spread(subject.ratios_median),
        }
    if subject.blocked_s:
        figures["blocked_s"] = subject.blocked_s
    return figures


def _spread(ratios: list[float]) -> float:
    """Standard error of the median ratio, from the quartiles: differences below it are noise."""
    if len(ratios) < 4:
        return float("nan")
    low, _, high = statistics.quantiles(ratios, n=4)
    return float(1.2533 * (high - low) / 1.349 / math.sqrt(len(ratios)))


def table(cores: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"\n{cores}\n"
    yield "| subject | p50 ms | p99 ms | mean ms | max ms | p50 / bare | ± | mean / bare | CPU / bare |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        blocked = f"**blocked: no block of steps within {row['blocked_s']:.0f} s**" if "blocked_s" in row else ""
        if "p50_ms" not in row or blocked:
            yield f"| {row['subject']} | {blocked} | | | | | | | |"
            continue
        times = " | ".join(f"{row[name]:.2f}" for name in ("p50_ms", "p99_ms", "mean_ms", "max_ms"))
        names = ("ratio_median", "spread", "ratio_mean", "ratio_cpu")
        ratios = " | ".join(f"{row[name]:.3f}" for name in names) if "ratio_median" in row else "1 | | 1 | 1"
        yield f"| {row['subject']} | {times} | {ratios} |"


def _is_wanted(logger: str, state: str, only: str) -> bool:
    if importlib.util.find_spec(PACKAGES[logger]) is None:
        print(f"{logger}: {PACKAGES[logger]} is not installed", file=sys.stderr)
        return False
    return only in f"{logger}, {state}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="see that all works: two short rounds")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=60, help="of a block")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds that a block may take")
    parser.add_argument("--cores", default="shared,apart")
    parser.add_argument("--only", default="", help="subjects whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave nothing behind
    if options.quick:
        options.rounds, options.steps, options.patience = 2, 10, 5.0
    missing = [name for name in ("torch", "mlflow", "wandb", "aiohttp") if importlib.util.find_spec(name) is None]
    if missing:
        parser.exit(0, f"nothing measured: {', '.join(missing)} not installed\n")
    results: dict[str, Any] = {"machine": machine()}
    for cores in options.cores.split(","):
        if cores == "apart" and len(os.sched_getaffinity(0)) < 2:
            print("apart: there is only one core", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="interference-", ignore_cleanup_errors=True) as name:
            rows = [told(subject) for subject in session(options, cores, Path(name))]
        results[cores] = rows
        print("\n".join(table(cores, rows)), flush=True)
        for row in rows:
            if row["account"]:
                print(f"{row['subject']}: {row['account']}", flush=True)
    print(json.dumps(results["machine"] | {"load_average_1min": os.getloadavg()[0]}))
    if options.json:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
