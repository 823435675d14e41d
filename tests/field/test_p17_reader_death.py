"""P17: queue limits and the death of the reader lose records without a word. Here every record is in a spool first."""

from __future__ import annotations

import json

import pytest

from support import oracle
from support.daemon import Daemon
from support.processes import wait_for
from support.site import Site
from support.trainer import Trainer, write_script

pytestmark = pytest.mark.alone

CLIENTS = 4
RECORDS = 12_500  # of each client: 50,000 in all
RSS_GROWTH_BYTES_MAX = 48 * 1024 * 1024

TRAINER = """
import json, os, sys, time
from verl_shipper_client import Client

rank, count, go, report_path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]

def rss_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

client = Client("p17", "exp", run_id="r1", rank=rank)
client.log({"warm": 1.0}, step=0)
open(report_path + ".up", "w").close()
while not os.path.exists(go):
    time.sleep(0.01)
before = rss_bytes()
worst_s = 0.0
for step in range(count):
    began_s = time.perf_counter()
    client.log({f"n{rank}": float(step)}, step=step)
    worst_s = max(worst_s, time.perf_counter() - began_s)
    if step % 25 == 0:
        time.sleep(0.01)
report = {"growth": rss_bytes() - before, "worst_s": worst_s}
with open(report_path, "w") as file:
    json.dump(report, file)
client.finish(exit_code=0)
"""


def test_p17_nothing_is_lost_when_the_daemon_is_stopped_and_then_killed(site: Site) -> None:
    go = site.root / "go"
    script = write_script(site, TRAINER)
    daemon = Daemon(site, *site.file_backend(), "--set", "sampling.rank=all").start()
    reports = [site.root / f"report-{rank}.json" for rank in range(CLIENTS)]

    with daemon:
        trainers = [Trainer(site, script, rank, RECORDS, go, reports[rank]) for rank in range(CLIENTS)]
        try:
            wait_for(lambda: all(report.with_suffix(".json.up").exists() for report in reports), 30, "clients up")
            daemon.pause()
            go.touch()
            for trainer in trainers:
                trainer.wait(timeout_s=60)
        finally:
            for trainer in trainers:
                trainer.close()
        daemon.kill()
        daemon.start()
        status = daemon.wait_settled(CLIENTS * (RECORDS + 3), timeout_s=90)

    lines = oracle.read_lines(site.output("p17", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    for rank in range(CLIENTS):
        expected = [(n, float(n)) for n in range(RECORDS)]
        key = f"n{rank}/rank{rank}" if rank else "n0"
        oracle.assert_exactly(oracle.values(lines, key), expected, f"rank {rank}")
    oracle.assert_law(status, pending=0)
    for report in (json.loads(path.read_text()) for path in reports):
        assert report["growth"] < RSS_GROWTH_BYTES_MAX, report
        assert report["worst_s"] < 0.5, f"log() blocked: {report}"
