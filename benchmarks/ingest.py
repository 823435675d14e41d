"""How fast the daemon makes the records of four trainers durable, and what that costs.

    python benchmarks/ingest.py [--quick] [--json FILE] [--records N] [--processes 4] [--pacing max|N]
                                [--mode live,backlog] [--consumer paused|file] [--dir FOLDER]

    live       4 processes log as fast as they can, the daemon takes it meanwhile; from the first log() to the moment
               all of it is fsynced in the node spool
    backlog    the same, but the daemon is stopped while they log; from its continuation to the same moment: the road
               from client spool to node spool alone

"Durable" is the client's own knowledge: every byte was acknowledged, which the daemon does after its fsync only.
The daemon is a real one with the backend `file`; its lane is paused (SIGSTOP, as a hung tracker would be) so that
decoding for a tracker does not compete for the two cores; `--consumer file` lets it work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from node import Node, children, cpu_s, machine, rss_bytes

if TYPE_CHECKING:
    from verl_shipper_client import Client

RECORD_BYTES = 600  # frame, as it stands in the spool
DRAIN_S_MAX = 300.0
IDLE_S = 20.0
SETTLE_S = 3.0  # after the last acknowledgement, before idleness is measured


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement. CPU is the main daemon process alone; lanes are processes of their own."""

    mode: str
    consumer: str
    processes: int
    records: int
    record_bytes: float
    seconds: float
    records_per_s: float
    mb_per_s: float
    log_seconds: float
    daemon_cpu_s: float
    daemon_cpu_us_per_record: float
    client_cpu_us_per_record: float
    daemon_rss_mb: float
    daemon_rss_peak_mb: float
    daemon_idle_cpu_percent: float
    complete: bool


# --- the child ----------------------------------------------------------------------------------------------


def be_child(records: int, pace: float, index: int) -> None:
    """Log `records`, at `pace` a second (0: as fast as it goes), then wait for the daemon's word on all of them."""
    from verl_shipper_client import Client

    client = Client("benchmark", "ingest", rank=index)
    data = {f"actor/metric_{n:02}/mean": random.random() for n in range(18)}
    _say("ready")
    sys.stdin.readline()
    begun_ns = time.monotonic_ns()
    log, due_ns = client.log, begun_ns
    for step in range(records):
        log(data, step)
        if pace:
            due_ns += int(1e9 / pace)
            if due_ns > (now_ns := time.monotonic_ns()):
                time.sleep((due_ns - now_ns) / 1e9)
    logged_ns = time.monotonic_ns()
    _say("logged")
    sys.stdin.readline()
    complete = _wait_until_acked(client)
    acked_ns = time.monotonic_ns()
    client.finish(exit_code=0)
    cpu = time.process_time()
    _say(json.dumps({"begun": begun_ns, "logged": logged_ns, "acked": acked_ns, "complete": complete, "cpu_s": cpu}))


def _wait_until_acked(client: Client) -> bool:
    """Not `finish()`: it gives up early on a daemon that was stopped a moment ago, as it should."""
    deadline_s = time.monotonic() + DRAIN_S_MAX
    sender = client._sender
    assert sender is not None
    while not sender._all_acked():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# --- the parent ---------------------------------------------------------------------------------------------


def measure(mode: str, options: argparse.Namespace) -> Result:
    """One mode, on a node of its own."""
    with tempfile.TemporaryDirectory(prefix="ingest-", dir=options.dir) as root, Node(root) as node:
        out = tempfile.mkdtemp(prefix="out-", dir=root)
        pid = node.start("--backend", "file", "--set", f"backends.file.dir={out}")
        lanes = _lanes(pid)
        if options.consumer == "paused":
            _signal_all(lanes, signal.SIGSTOP)
        try:
            return _measure_on(node, pid, mode, options)
        finally:
            _signal_all(lanes, signal.SIGCONT)


def _measure_on(node: Node, pid: int, mode: str, options: argparse.Namespace) -> Result:
    pace = 0.0 if options.pacing == "max" else float(options.pacing)
    each = options.records // options.processes
    own = [sys.executable, os.path.abspath(__file__)]
    trainers = [
        subprocess.Popen([*own, "--child", f"{each},{pace},{index}"], env=node.env(), stdin=-1, stdout=-1, text=True)
        for index in range(options.processes)
    ]
    try:
        _expect(trainers, "ready")
        if mode == "backlog":
            node.send_signal(signal.SIGSTOP)
        cpu_before_s = cpu_s(pid)
        _tell(trainers)
        _expect(trainers, "logged")
        continued_ns = time.monotonic_ns()
        if mode == "backlog":
            node.send_signal(signal.SIGCONT)
        _tell(trainers)
        told = [json.loads(_line(trainer)) for trainer in trainers]
        daemon_cpu_s = cpu_s(pid) - cpu_before_s
        for trainer in trainers:
            trainer.wait(DRAIN_S_MAX)
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.wait()
    rss, peak = rss_bytes(pid), rss_bytes(pid, peak=True)
    begun_ns = continued_ns if mode == "backlog" else min(each["begun"] for each in told)
    seconds = (max(each["acked"] for each in told) - begun_ns) / 1e9
    logged_s = (max(each["logged"] for each in told) - min(each["begun"] for each in told)) / 1e9
    spooled = _node_spool_bytes(node)
    records = each * options.processes
    return Result(
        mode=mode,
        consumer=options.consumer,
        processes=options.processes,
        records=records,
        record_bytes=spooled / records,
        seconds=seconds,
        records_per_s=records / seconds,
        mb_per_s=spooled / seconds / 1e6,
        log_seconds=logged_s,
        daemon_cpu_s=daemon_cpu_s,
        daemon_cpu_us_per_record=daemon_cpu_s / records * 1e6,
        client_cpu_us_per_record=sum(each["cpu_s"] for each in told) / records * 1e6,
        daemon_rss_mb=rss / 1e6,
        daemon_rss_peak_mb=peak / 1e6,
        daemon_idle_cpu_percent=_idle_cpu_percent(pid, options.idle_s),
        complete=all(each["complete"] for each in told),
    )


def _idle_cpu_percent(pid: int, idle_s: float) -> float:
    """Share of one core that the daemon takes when nobody logs; its resolution is one clock tick of 10 ms."""
    time.sleep(SETTLE_S)
    before_s, begun_s = cpu_s(pid), time.monotonic()
    time.sleep(idle_s)
    return 100 * (cpu_s(pid) - before_s) / (time.monotonic() - begun_s)


def _lanes(pid: int) -> list[int]:
    """The daemon's child processes, once there are any."""
    deadline_s = time.monotonic() + 20.0
    while not (found := children(pid)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    time.sleep(1.0)  # a lane that is paused in the middle of its imports would be a different experiment
    return found


def _node_spool_bytes(node: Node) -> int:
    total = 0
    for folder, _, names in os.walk(os.path.join(node.state, "spool")):
        total += sum(os.stat(os.path.join(folder, name)).st_size for name in names if name.endswith(".seg"))
    return total


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _tell(trainers: list[subprocess.Popen[str]]) -> None:
    for trainer in trainers:
        assert trainer.stdin is not None
        trainer.stdin.write("go\n")
        trainer.stdin.flush()


def _expect(trainers: list[subprocess.Popen[str]], word: str) -> None:
    for trainer in trainers:
        if _line(trainer) != word:
            raise RuntimeError(f"a trainer ended before it was {word}")


def _line(trainer: subprocess.Popen[str]) -> str:
    assert trainer.stdout is not None
    return trainer.stdout.readline().rstrip("\n")


# --- the command line ---------------------------------------------------------------------------------------


def main() -> int:
    options = _options()
    if options.child:
        records, pace, index = options.child.split(",")
        be_child(int(records), float(pace), int(index))
        return 0
    results = [measure(mode, options) for mode in options.mode.split(",")]
    for result in results:
        print_result(result)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine(), "results": [asdict(result) for result in results]}, file, indent=1)
            file.write("\n")
    return 0 if all(result.complete for result in results) else 1


def print_result(result: Result) -> None:
    size = f"{result.records:,} records of {result.record_bytes:.0f} bytes from {result.processes} processes"
    print(f"\n{result.mode}: {size}, lane {result.consumer}{'' if result.complete else ', NOT COMPLETE'}")
    speed = f"{result.records_per_s:12,.0f} records/s  {result.mb_per_s:8.1f} MB/s"
    print(f"  durable        {speed} in {result.seconds:.2f} s")
    print(f"  logged         {result.records / result.log_seconds:12,.0f} records/s  (the trainers' own speed)")
    print(f"  daemon CPU     {result.daemon_cpu_s:12.2f} s          {result.daemon_cpu_us_per_record:8.2f} µs a record")
    print(f"  trainers' CPU  {result.client_cpu_us_per_record:37.2f} µs a record, sender and start included")
    print(f"  daemon RSS     {result.daemon_rss_mb:12.1f} MB         {result.daemon_rss_peak_mb:8.1f} MB at its peak")
    print(f"  daemon idle    {result.daemon_idle_cpu_percent:12.2f} % of a core")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Throughput of the daemon's durable ingest.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the records, a short look at idleness")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--records", type=int, default=1_000_000, help="of all processes together")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--pacing", default="max", help="max, or records a second for each process")
    parser.add_argument("--mode", default="live,backlog")
    parser.add_argument("--consumer", choices=("paused", "file"), default="paused", help="what the lane does meanwhile")
    parser.add_argument("--dir", help="where the spools go; default: the temporary folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.idle_s = IDLE_S
    if options.quick:
        options.records, options.idle_s = options.records // 10, 3.0
    return options


if __name__ == "__main__":
    sys.exit(main())
