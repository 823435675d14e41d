"""What one `log()` costs the trainer: verl-shipper in three states of its daemon, its peers, and the limit.

    python benchmarks/log_latency.py [--quick] [--json FILE] [--scalars 10,20,100,1000] [--pace paced,tight]
                                     [--numpy] [--rounds N] [--only TEXT] [--syscalls] [--dir FOLDER]

    parent ── for each round, size, pace, subject ──▶ child: open, warm up, "warm"
           ◀───────────────────────────────────────── (parent stops the daemon, if that is the state)
           ── "go" ─────────────────────────────────▶ child: N calls, a clock around each, result as one JSON line

Every measurement is a process of its own, so nobody inherits another's threads, caches or backlog. Subjects take
turns within a round, so a noisy minute hits all. The garbage collector stays on. Two paces: `paced` sleeps a
millisecond between calls, as a trainer that does something else meanwhile (caches are cold); `tight` does not.
p50 and p99 are those of the quietest round, since neighbours on the machine only ever add; max is of all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import IO

from node import Node, machine
from peers import QUIET, SUBJECTS, Log, Subject

PACE_S = {"paced": 0.001, "tight": 0.0}
WARM_UP_CALLS = 50
MEASURE_S_MAX = 4.0  # slow subjects make fewer calls
CLOSE_S_MAX = 10.0
CALLS = {10: 2000, 20: 2000, 100: 2000, 1000: 600}
CALLS_OTHERWISE = 1000
STRACE_CALLS = 400


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement, to be made once a round."""

    subject: Subject
    scalars: int
    pace: str
    calls: int
    values: str = "float"


@dataclass(frozen=True, slots=True)
class Result:
    """Times of one case in µs; `switches` are voluntary context switches of the calling thread inside the calls."""

    subject: str
    scalars: int
    pace: str
    calls: int
    p50_us: float
    p99_us: float
    max_us: float
    switches: int
    is_ours: bool
    rounds_us: list[list[float]]  # p50, p99 and max of every round


# --- the child ----------------------------------------------------------------------------------------------


def be_child(index: int, scalars: int, pace: str, calls: int, folder: str, number: Callable[[], float]) -> None:
    """Measure one subject; speaks over stdin and a copy of stdout, which the SDKs cannot spoil."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    log, close = SUBJECTS[index].open(folder)
    keys = [f"{group}/metric_{n}/mean" for n, group in zip(range(scalars), _groups())]  # noqa: B905 - groups are endless
    step = 0
    for step in range(WARM_UP_CALLS):
        log({key: number() for key in keys}, step)
        time.sleep(0.001)
    answers.write("warm\n")
    answers.flush()
    sys.stdin.readline()
    times_ns, switches = _measure(log, keys, number, step + 1, PACE_S[pace], calls)
    answers.write(json.dumps({"times_ns": times_ns, "switches": switches}) + "\n")
    answers.flush()
    close()


def _measure(
    log: Log, keys: list[str], number: Callable[[], float], step: int, pace_s: float, calls: int
) -> tuple[list[int], int]:
    clock = time.perf_counter_ns
    times_ns = []
    give_up_ns = clock() + int(MEASURE_S_MAX * 1e9)
    switches = -_voluntary_switches()
    sleeps = 0
    for step_now in range(step, step + calls):
        data = {key: number() for key in keys}
        begun_ns = clock()
        log(data, step_now)
        ended_ns = clock()
        times_ns.append(ended_ns - begun_ns)
        if pace_s:
            time.sleep(pace_s)
            sleeps += 1
        if ended_ns > give_up_ns:
            break
    return times_ns, max(0, switches + _voluntary_switches() - sleeps)


def _numpy_number() -> float:
    """What verl's metrics mostly are: the mean of something, a numpy.float64."""
    import numpy as np

    return np.float64(random.random())


def _voluntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _groups() -> Iterator[str]:
    """Prefixes as verl's metrics have them, in turn, without end."""
    while True:
        yield from ("actor", "critic", "timing_s", "response_length", "perf", "val-core/task")


# --- the parent ---------------------------------------------------------------------------------------------


def run_child(case: Case, root: str, node: Node | None, wrapper: tuple[str, ...] = ()) -> tuple[list[int], int]:
    """Measure a case in a process of its own."""
    folder = tempfile.mkdtemp(dir=root)
    index = SUBJECTS.index(case.subject)
    own = [sys.executable, os.path.abspath(__file__), "--child"]
    command = [*wrapper, *own, f"{index},{case.scalars},{case.pace},{case.calls},{case.values},{folder}"]
    env = (node.env() if node else dict(os.environ) | {"HOME": folder}) | QUIET
    if case.subject.is_ours and node is None:
        env |= {"VERL_SHIPPER_SPOOL_DIR": os.path.join(folder, "spool")}
    with tempfile.TemporaryFile() as words:
        child = subprocess.Popen(
            command, env=env, cwd=folder, stdin=-1, stdout=-1, stderr=words, text=True, start_new_session=True
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            if child.stdout.readline() != "warm\n":
                raise RuntimeError(f"{case.subject.name}: {_last_words(words)}")
            with _state(case.subject, node):
                child.stdin.write("go\n")
                child.stdin.flush()
                answer = child.stdout.readline()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(CLOSE_S_MAX)  # a queue of its own may take minutes to empty; the figures are there
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            child.stdin.close()
            child.stdout.close()
            shutil.rmtree(folder, ignore_errors=True)
        if not answer:
            raise RuntimeError(f"{case.subject.name}: {_last_words(words)}")
    told = json.loads(answer)
    return told["times_ns"], told["switches"]


@contextlib.contextmanager
def _state(subject: Subject, node: Node | None) -> Iterator[None]:
    """The daemon's state while the calls are made."""
    stopped = subject.daemon == "stopped"
    if stopped and node:
        node.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        if stopped and node:
            node.send_signal(signal.SIGCONT)


def _last_words(words: IO[bytes]) -> str:
    words.seek(0)
    return words.read().decode(errors="replace").strip()[-400:] or "ended without a word"


def measure_all(cases: list[Case], rounds: int, root: str, node: Node | None) -> list[Result]:
    """Each case once a round; a case that fails is named and left out."""
    gathered: dict[Case, list[tuple[list[int], int]]] = {case: [] for case in cases}
    for turn in range(rounds):
        for case in cases:
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[Kround {turn + 1}/{rounds}  {case.scalars} {case.pace} {case.subject.name}")
            try:
                with_daemon = node if case.subject.daemon in ("healthy", "stopped") else None
                gathered[case].append(run_child(case, root, with_daemon))
            except (RuntimeError, OSError) as error:
                print(f"failed: {case.subject.name}: {error}", file=sys.stderr)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return [_result(case, turns) for case, turns in gathered.items() if turns]


def _result(case: Case, turns: list[tuple[list[int], int]]) -> Result:
    rounds_us = [
        [_at(times_ns, 0.50), _at(times_ns, 0.99), _at(times_ns, 1.0)] for times_ns in map(sorted, _times(turns))
    ]
    quietest = min(rounds_us)
    return Result(
        subject=case.subject.name,
        scalars=case.scalars,
        pace=case.pace,
        calls=sum(len(times_ns) for times_ns in _times(turns)),
        p50_us=quietest[0],
        p99_us=quietest[1],
        max_us=max(each[2] for each in rounds_us),
        switches=sum(switches for _, switches in turns),
        is_ours=case.subject.is_ours,
        rounds_us=rounds_us,
    )


def _times(turns: list[tuple[list[int], int]]) -> list[list[int]]:
    return [times_ns for times_ns, _ in turns]


def _at(ordered_ns: list[int], share: float) -> float:
    return ordered_ns[min(len(ordered_ns) - 1, int(share * len(ordered_ns)))] / 1000


# --- the tables ---------------------------------------------------------------------------------------------


def print_tables(results: list[Result]) -> None:
    """One table for each pace and size; "x" is the median as a multiple of ours with a healthy (else any) daemon."""
    groups = sorted({(result.pace, result.scalars) for result in results})
    for pace, scalars in groups:
        rows = [result for result in results if (result.pace, result.scalars) == (pace, scalars)]
        ours = next((row for row in rows if row.is_ours), None)
        print(f"\n{scalars} scalars, {pace}")
        print(f"  {'':32}{'p50 µs':>10}{'p99 µs':>10}{'max µs':>10}{'x ours':>9}{'switches/call':>15}{'calls':>8}")
        for row in rows:
            ratio = f"{row.p50_us / ours.p50_us:.1f}" if ours else ""
            figures = f"{row.p50_us:10.1f}{row.p99_us:10.1f}{row.max_us:10.0f}{ratio:>9}"
            print(f"  {row.subject:32}{figures}{row.switches / row.calls:15.3f}{row.calls:8}")
        _print_ratio(rows)


def _print_ratio(rows: list[Result]) -> None:
    ours = [row for row in rows if row.is_ours]
    peers = [row for row in rows if not row.is_ours and not row.subject.startswith("limit")]
    if not ours or not peers:
        return
    slowest = max(ours, key=lambda row: row.p50_us)
    fastest = min(peers, key=lambda row: row.p50_us)
    print(f"  {fastest.p50_us / slowest.p50_us:.1f} x faster than {fastest.subject}, in our slowest state")


def print_syscalls(subjects: list[Subject], scalars: int, root: str, node: Node | None) -> dict[str, dict[str, float]]:
    """System calls of the calling thread per log(): strace with and without the measured calls, the difference.

    strace does not follow other threads here: they are their own, the caller's are the price of `log()`.
    """
    if shutil.which("strace") is None:
        print("\nsystem calls: strace is not installed")
        return {}
    print(f"\nsystem calls of the calling thread per log(), {scalars} scalars, tight")
    told: dict[str, dict[str, float]] = {}
    for subject in subjects:
        counts = []
        for calls in (0, STRACE_CALLS):
            path = os.path.join(root, "strace")
            wrapper = ("strace", "-c", "-U", "calls,name", "-o", path)
            with_daemon = node if subject.daemon in ("healthy", "stopped") else None
            run_child(Case(subject, scalars, "tight", calls), root, with_daemon, wrapper)
            counts.append(_strace_counts(path))
        without, with_calls = counts
        extra = {name: (count - without.get(name, 0)) / STRACE_CALLS for name, count in with_calls.items()}
        told[subject.name] = {name: each for name, each in extra.items() if each >= 0.005}
        line = ", ".join(f"{name} {each:.2f}" for name, each in sorted(told[subject.name].items(), key=lambda i: -i[1]))
        print(f"  {subject.name:32}{line}")
    return told


def _strace_counts(path: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    with open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            words = line.split()
            if len(words) == 2 and words[0].isdigit() and words[1] != "total":
                counts[words[1]] = int(words[0])
    return counts


# --- the command line ---------------------------------------------------------------------------------------


def main() -> int:
    options = _options()
    if options.child:
        index, scalars, pace, calls, values, folder = options.child.split(",", 5)
        number = _numpy_number if values == "numpy" else random.random
        be_child(int(index), int(scalars), pace, int(calls), folder, number)
        return 0
    subjects = [subject for subject in SUBJECTS if options.only in subject.name and subject.is_installed()]
    missing = [subject.name for subject in SUBJECTS if not subject.is_installed()]
    sizes = [int(size) for size in options.scalars.split(",")]
    cases = [
        Case(
            subject,
            scalars,
            pace,
            CALLS.get(scalars, CALLS_OTHERWISE) // (10 if options.quick else 1),
            "numpy" if options.numpy else "float",
        )
        for scalars in sizes
        for pace in options.pace.split(",")
        for subject in subjects
    ]
    with tempfile.TemporaryDirectory(prefix="log-latency-", dir=options.dir) as root, Node(root) as node:
        node_or_none = _start_if_needed(node, subjects)
        if node_or_none is None:
            cases = [case for case in cases if case.subject.daemon not in ("healthy", "stopped")]
            subjects = [subject for subject in subjects if subject.daemon not in ("healthy", "stopped")]
        results = measure_all(cases, 1 if options.quick else options.rounds, root, node_or_none)
        print_tables(results)
        syscalls = print_syscalls(subjects, sizes[-1], root, node_or_none) if options.syscalls else {}
    for name in missing:
        print(f"not installed: {name}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            told = {"machine": machine(), "results": [asdict(each) for each in results], "syscalls": syscalls}
            json.dump(told | {"not_installed": missing}, file, indent=1)
            file.write("\n")
    return 0


def _start_if_needed(node: Node, subjects: list[Subject]) -> Node | None:
    if not any(subject.daemon in ("healthy", "stopped") for subject in subjects):
        return None
    try:
        node.start("--backend", "file", "--set", f"backends.file.dir={node.root}/out")
    except (RuntimeError, OSError) as error:
        print(f"without a daemon: {error}", file=sys.stderr)
        return None
    return node


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Latency of one log() call, ours beside its peers.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls, one round: to see that all works")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--scalars", default="10,20,100,1000", help="numbers per call, with commas")
    parser.add_argument("--pace", default="paced,tight", help="paced: 1 ms between calls; tight: none")
    parser.add_argument("--numpy", action="store_true", help="values are numpy.float64, as most of verl's are")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="subjects whose name contains TEXT")
    parser.add_argument("--syscalls", action="store_true", help="count the caller's system calls too, with strace")
    parser.add_argument("--dir", help="where spools and databases go; default: the temporary folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
