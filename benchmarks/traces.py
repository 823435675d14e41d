"""What rollout traces cost: a burst of trajectories from eight agent-loop workers, on every road in trace_roads.py.

    python benchmarks/traces.py [--quick] [--json FILE] [--trajectories 8192] [--peer-trajectories 1024] [--workers 8]
                                [--tokens 2048] [--rounds 2] [--only TEXT] [--seed N] [--dir FOLDER]

    parent ── for each round, road ──▶ 8 workers: draw trajectories, open the road, the same burst untraced, "warm"
           ── "go" to all ───────────▶ each: the burst, traced; times as one JSON line; flush; "flushed"
           ◀── peak memory and CPU of each from /proc, "end"; then counts what the store has

Every round is made of processes of its own; roads take turns within a round. The time of a trajectory is the time that
the event loop spends in its own steps, while all of the worker's trajectories are in flight; what tracing adds to it is
the difference to the median of the same burst untraced, a moment before in the same process. p50 and p99 are of the
quietest round, spans lost and memory of the worst.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

from node import Node, cpu_s, machine, rss_bytes
from peers import QUIET
from rollouts import Burst, samples
from trace_roads import ROADS, Road, Stored

WARM_S_MAX = 300.0
BURST_S_MAX = 900.0
FLUSH_S_MAX = 180.0  # a queue that is not empty by then has lost what is in it
END_S_MAX = 5.0
PENDING_S_MAX = 300.0
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Size:
    """How much is traced. `trajectories`: of all workers together."""

    workers: int
    trajectories: int
    tokens: int
    seed: int

    @property
    def of_one(self) -> int:
        return self.trajectories // self.workers


@dataclass(frozen=True, slots=True)
class Told:
    """What one worker has to say. Times in ns; memory in bytes."""

    times_ns: list[int]
    bare_ns: int
    growth_bytes: int
    cpu_s: float
    flushed: bool


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one road. µs per span, and of the whole process in `cpu_us`."""

    p50_us: float
    p99_us: float
    cpu_us: float
    trajectory_us: float
    bytes_per_token: float
    lost: int
    growth_mib: float
    flushed: bool
    load: float


@dataclass(frozen=True, slots=True)
class Result:
    """A road's figures. `spans` are those that should be there after one round."""

    road: str
    trajectories: int
    spans: int
    rounds: list[Round]

    @property
    def quietest(self) -> Round:
        return min(self.rounds, key=lambda each: each.p50_us)


# --- a worker -----------------------------------------------------------------------------------------------


def be_worker(road: Road, folder: str, worker: int, size: Size) -> None:
    """Speaks over stdin and a copy of stdout, which the SDKs cannot spoil."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given = samples(f"{size.seed}/{worker}", size.of_one, size.tokens)
    opened = road.open(folder, worker)
    untraced = Burst()
    untraced.run(given[:8])
    bare_ns = int(statistics.median(untraced.run(given)))
    burst = Burst(opened.attr, opened.op)
    _give_memory_back()
    _tell(answers, "warm")
    sys.stdin.readline()
    rss = rss_bytes(os.getpid())
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the peak begins anew
    times_ns = burst.run(given)
    _tell(answers, {"times_ns": times_ns, "bare_ns": bare_ns, "rss": rss})
    opened.flush(FLUSH_S_MAX)
    _tell(answers, "flushed")
    sys.stdin.readline()
    os._exit(0)  # what is not in the store now is lost: an actor of Ray ends without a word, too


def _give_memory_back() -> None:
    """What the untraced burst has left would hide what the traced one takes."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _tell(answers: Any, what: Any) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


# --- the parent ---------------------------------------------------------------------------------------------


class Worker:
    """A worker process, seen from the parent."""

    def __init__(self, index: int, folder: str, number: int, size: Size, env: dict[str, str]) -> None:
        told = json.dumps([index, folder, number, dataclasses.astuple(size)])
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        command = [sys.executable, os.path.abspath(__file__), "--worker", told]
        self._process = subprocess.Popen(command, env=env, stdin=-1, stdout=-1, stderr=self._words, text=True)
        self._cpu_s = 0.0
        self.told: Told | None = None

    def read(self, timeout_s: float) -> Any:
        """The next line; None when it does not come in time. Raises RuntimeError when the worker is gone."""
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            self._words.seek(0)
            raise RuntimeError(self._words.read().decode(errors="replace").strip()[-600:] or "ended without a word")
        return json.loads(line)

    def go(self) -> None:
        self._cpu_s = cpu_s(self._process.pid)
        self.say("go")

    def take(self) -> None:
        """The burst's times, and then what the process has used until it was flushed, or until patience ended."""
        times = self.read(BURST_S_MAX)
        flushed = _in_time(self._process, FLUSH_S_MAX)
        pid = self._process.pid
        growth = rss_bytes(pid, peak=True) - times["rss"]
        spent_s = cpu_s(pid) - self._cpu_s - times["bare_ns"] / 1e9 * len(times["times_ns"])
        self.told = Told(times["times_ns"], times["bare_ns"], growth, spent_s, flushed)

    def say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        try:
            self.say("end")
            self._process.wait(END_S_MAX)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._words):
            assert stream is not None
            stream.close()


def _in_time(process: subprocess.Popen[str], timeout_s: float) -> bool:
    """Whether a line came in time. The process lives on, so that it can be looked at."""
    came = threading.Event()

    def wait() -> None:
        assert process.stdout is not None
        if process.stdout.readline():
            came.set()

    threading.Thread(target=wait, daemon=True).start()
    return came.wait(timeout_s)


def run_round(road: Road, size: Size, root: str) -> Round:
    """All workers at once, in a folder of their own."""
    folder = tempfile.mkdtemp(dir=root)
    node = Node(folder)
    try:
        road.prepare(folder)
        if road.daemon:
            node.start("--backend", "file", "--set", f"backends.file.dir={folder}/out")
        told = _burst(road, folder, size, node.env() | QUIET)
        if road.daemon:
            _until_delivered(node)
        node.stop()
        return _round(road, size, told, road.stored(folder))
    finally:
        node.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _burst(road: Road, folder: str, size: Size, env: dict[str, str]) -> list[Told]:
    workers = [Worker(ROADS.index(road), folder, number, size, env) for number in range(size.workers)]
    try:
        for worker in workers:
            assert worker.read(WARM_S_MAX) == "warm"
        for worker in workers:
            worker.go()
        threads = [threading.Thread(target=worker.take) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for worker in workers:
            worker.end()
    told = [worker.told for worker in workers if worker.told is not None]
    if len(told) < size.workers:
        raise RuntimeError(f"{size.workers - len(told)} workers ended in the middle of it")
    return told


def _until_delivered(node: Node) -> None:
    """Until the file backend has everything the daemon knows of."""
    deadline_s = time.monotonic() + PENDING_S_MAX
    while time.monotonic() < deadline_s:
        if not node.status()["backends"]["file"]["pending"]:
            return
        time.sleep(0.5)


def _round(road: Road, size: Size, told: list[Told], stored: Stored) -> Round:
    added_us = sorted((time_ns - each.bare_ns) / 1000 for each in told for time_ns in each.times_ns)
    expected = len(added_us) * road.spans
    kept_tokens = len(added_us) * size.tokens * (stored.spans / expected if road.is_traced else 1.0)
    middle_us = added_us[len(added_us) // 2]
    return Round(
        p50_us=middle_us / road.spans,
        p99_us=added_us[min(len(added_us) - 1, int(0.99 * len(added_us)))] / road.spans,
        cpu_us=sum(each.cpu_s for each in told) * 1e6 / expected,
        trajectory_us=middle_us,
        bytes_per_token=stored.size_bytes / max(kept_tokens, 1.0),
        lost=expected - stored.spans if road.is_traced else 0,
        growth_mib=max(each.growth_bytes for each in told) / MIB,
        flushed=all(each.flushed for each in told),
        load=os.getloadavg()[0],
    )


def measure(roads: list[Road], sizes: dict[str, Size], rounds: int, root: str) -> list[Result]:
    """Each road once a round; one that fails is named and left out."""
    gathered: dict[str, list[Round]] = {road.name: [] for road in roads}
    for turn in range(rounds):
        for road in roads:
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[Kround {turn + 1}/{rounds}  {road.name}")
            try:
                gathered[road.name].append(run_round(road, sizes[road.name], root))
            except (RuntimeError, OSError, AssertionError) as error:
                print(f"failed: {road.name}: {error}", file=sys.stderr)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return [
        Result(
            road.name, sizes[road.name].trajectories, sizes[road.name].trajectories * road.spans, gathered[road.name]
        )
        for road in roads
        if gathered[road.name]
    ]


def print_table(results: list[Result]) -> None:
    """One line a road; spans lost and memory of its worst round."""
    heads = f"{'p50 µs':>9}{'p99 µs':>10}{'CPU µs':>9}{'µs each':>10}{'B/token':>9}{'lost':>15}{'MiB':>7}"
    print(f"\n  {'':30}{'trajectories':>13}{heads}   p50 of each round")
    for result in results:
        best = result.quietest
        lost = f"{max(each.lost for each in result.rounds)} of {result.spans}"
        figures = f"{best.p50_us:9.1f}{best.p99_us:10.0f}{best.cpu_us:9.0f}{best.trajectory_us:10.0f}"
        figures += f"{best.bytes_per_token:9.2f}{lost:>15}{max(each.growth_mib for each in result.rounds):7.1f}"
        late = "" if all(each.flushed for each in result.rounds) else f"  not flushed in {FLUSH_S_MAX:.0f} s"
        spread = ", ".join(f"{each.p50_us:.0f}" for each in result.rounds)
        print(f"  {result.road:30}{result.trajectories:13}{figures}   {spread}{late}")


def main() -> int:
    options = _options()
    if options.worker:
        index, folder, number, size = json.loads(options.worker)
        be_worker(ROADS[index], folder, number, Size(*size))
        return 0
    roads = [road for road in ROADS if options.only in road.name and road.is_installed()]
    missing = [road.name for road in ROADS if not road.is_installed()]
    counts = (options.trajectories, options.peer_trajectories)
    sizes = {road.name: Size(options.workers, counts[road.is_peer], options.tokens, options.seed) for road in roads}
    print(f"seed {options.seed}, {options.workers} workers, {options.tokens} tokens a response; {machine()}")
    with tempfile.TemporaryDirectory(prefix="traces-", dir=options.dir) as root:
        results = measure(roads, sizes, options.rounds, root)
    print_table(results)
    for name in missing:
        print(f"not installed: {name}")
    if options.json:
        told = {"machine": machine(), "seed": options.seed, "workers": options.workers, "tokens": options.tokens}
        told |= {"results": [dataclasses.asdict(result) for result in results], "not_installed": missing}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(told, file, indent=1)
            file.write("\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of rollout traces, ours beside verl's own roads.")
    parser.add_argument("--quick", action="store_true", help="2 workers, 64 trajectories, one round: does it work?")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--trajectories", type=int, default=8192, help="of all workers together")
    parser.add_argument("--peer-trajectories", type=int, default=1024, help="the same for trackio and mlflow")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of one response")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", metavar="TEXT", help="roads whose name contains TEXT")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--dir", help="where spools and databases go; default: the temporary folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.workers, options.trajectories, options.peer_trajectories, options.rounds = 2, 64, 64, 1
    return options


if __name__ == "__main__":
    sys.exit(main())
