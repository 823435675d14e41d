"""P30: no file events, as on a network file system; no inotify instances or watches left. Polling finds everything.

The limits are real ones: a user namespace has its own, and the kernel answers EMFILE and ENOSPC.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from support.collecting import dump, samples, steps
from support.daemon import SHIPPER, Daemon
from support.oracle import complete_lines
from support.processes import descendants, wait_for
from support.site import Site
from support.spools import build_stream, clone_stream, read_header
from verl_shipper.config import ADOPT_POLL_S
from verl_shipper.config_watch import POLL_S
from verl_shipper.status import report
from verl_shipper_spool.header import encode_header, this_process

SLACK_S = 2.5  # from there to the tracker, on a machine with other things to do
FOLDERS = 500
CPU_SHARE_MAX = 0.02
CPU_S = 15.0
TICKS = os.sysconf("SC_CLK_TCK")

# A server of a network file system changes files, and this kernel hears nothing of it.
SILENT = """
import watchdog.observers

class Silent(watchdog.observers.Observer):
    def schedule(self, *given, **named):
        return object()

watchdog.observers.Observer = Silent
"""

LIMITS = {"EMFILE": "max_inotify_instances", "ENOSPC": "max_inotify_watches"}


def watching(site: Site) -> list[str]:
    """Arguments of a daemon that watches a folder."""
    data = site.root / "data"
    data.mkdir(exist_ok=True)
    return [*site.file_backend(), "--set", f"watch=[{{path: {data}}}]"]


def limited(limit: str) -> list[str]:
    script = f'echo 0 > /proc/sys/user/{LIMITS[limit]} && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh", *SHIPPER]


@pytest.fixture
def namespaces() -> None:
    """Limits of inotify that are a test's own."""
    done = subprocess.run(["unshare", "--user", "--map-root-user", "true"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no user namespaces here")


def lines_of(site: Site) -> int:
    return sum(len(complete_lines(path)) for path in site.out.rglob("*.jsonl"))


def everything_is_found(site: Site, daemon: Daemon) -> None:
    """New segments in the spool, and new lines and files in a watched folder."""
    (site.root / "elsewhere").mkdir()
    stream = build_stream(site.root / "elsewhere", "run", segment_count=3, records_per_segment=10)
    daemon.wait_until(lambda status: status["daemon"].get("collected_ns"), what="the collector has looked")

    began_s = time.monotonic()
    stream.rename(site.spool / stream.name)
    wait_for(lambda: "run" in report(str(site.state)).runs, 2 * ADOPT_POLL_S + SLACK_S, "the segments are found")
    daemon.wait_settled(logged=30, timeout_s=max(2 * ADOPT_POLL_S + 2 * SLACK_S - (time.monotonic() - began_s), 1.0))

    before = lines_of(site)
    log = site.root / "data" / "exp.jsonl"
    log.write_text(dump(steps(0, 3)))
    wait_for(lambda: lines_of(site) >= before + 3, 2 * POLL_S + SLACK_S, "lines are found")
    with open(log, "a") as file:
        file.write(dump(steps(3, 5)))
    wait_for(lambda: lines_of(site) >= before + 5, 2 * POLL_S + SLACK_S, "more lines are found")
    (site.root / "data" / "1.jsonl").write_text(dump(samples(1, 2)))
    (site.root / "data" / "2.jsonl").write_text(dump(samples(2, 2)))
    status = daemon.wait_until(lambda status: status["watch"][0]["figures"].get("files") == 3, what="dumps are found")
    assert status["watch"][0]["figures"]["records"] == 7
    daemon.wait_settled()


def test_without_events_everything_is_found_within_two_looks(site: Site) -> None:
    (site.root / "silent").mkdir()
    (site.root / "silent" / "sitecustomize.py").write_text(SILENT)

    with Daemon(site, *watching(site), env={"PYTHONPATH": str(site.root / "silent")}) as daemon:
        everything_is_found(site, daemon)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("limit", LIMITS)
def test_without_inotify_the_daemon_polls_and_speaks_of_inotify_not_of_disks(site: Site, limit: str) -> None:
    with Daemon(site, *watching(site), launcher=limited(limit)) as daemon:
        everything_is_found(site, daemon)

        told = [line for line in daemon.words().splitlines() if "no file events" in line]
        assert len(told) == 2, "once for the daemon, once for its collector"
        for line in told:
            assert "inotify" in line
            assert f"sysctl fs.inotify.{LIMITS[limit].replace('inotify_', 'user_')}" in line
            assert "space" not in line
        assert daemon.stop() < 10


@pytest.mark.usefixtures("namespaces")
def test_watches_that_run_out_while_it_runs_are_polled_and_told(site: Site) -> None:
    """A folder that is made anew needs a watch of its own; by then there may be none."""
    data = site.root / "data"
    script = 'exec "$@"'
    launcher = ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh", *SHIPPER]
    with Daemon(site, *watching(site), launcher=launcher) as daemon:
        daemon.wait_until(lambda status: status["daemon"].get("collected_ns"), what="the collector has looked")
        enter = ["nsenter", "--user", "--preserve-credentials", f"--target={daemon.pid}", "sh", "-c"]
        done = subprocess.run([*enter, "echo 0 > /proc/sys/user/max_inotify_watches"], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot change the limits of a namespace: {done.stderr.decode()}")
        data.rename(site.root / "old")
        data.mkdir()
        (data / "1.jsonl").write_text(dump(samples(1, 2)))

        daemon.wait_until(lambda status: status["watch"][0]["figures"].get("files") == 1, what="it is found")
        daemon.wait_settled()
        assert "Traceback" not in daemon.words()


@pytest.mark.alone
def test_an_idle_daemon_with_500_old_folders_costs_less_than_a_fiftieth_of_a_core(site: Site) -> None:
    site.spool.mkdir()
    made = build_stream(site.root / "made", "run", records_per_segment=3)
    process = replace(this_process(), node="elsewhere", boot_id="b" * 36, pid=7)
    for number in range(FOLDERS):
        stream = clone_stream(made, site.spool, f"run{number % 7}")
        (stream / "stream").write_bytes(encode_header(replace(read_header(stream), process=process)))
    data = site.root / "data"
    for number in range(FOLDERS):
        (data / f"old{number}").mkdir(parents=True)
        (data / f"old{number}" / f"{number}.jsonl").write_text(dump(samples(number, 1)))
    watch = json.dumps([{"path": str(data), "recursive": True, "stable_s": 0.1}])
    with Daemon(site, *site.file_backend(), "--set", f"watch={watch}") as daemon:
        daemon.wait_until(lambda status: status["watch"] and status["watch"][0]["figures"].get("files") == FOLDERS)
        daemon.wait_settled(logged=4 * FOLDERS)
        pids = [daemon.pid, *(pid for pid in descendants(daemon.pid) if pid not in daemon.lanes())]
        assert len(pids) == 2
        before, began_s = [cpu_s(pid) for pid in pids], time.monotonic()
        time.sleep(CPU_S)  # what is measured is that nothing happens

        past_s = time.monotonic() - began_s
        shares = [(cpu_s(pid) - used_s) / past_s for pid, used_s in zip(pids, before, strict=True)]
        print("idle shares of a core, daemon and collector:", *(f"{share:.4f}" for share in shares))
        assert max(shares) < CPU_SHARE_MAX


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
