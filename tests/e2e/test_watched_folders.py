"""Watched folders with the real daemon: killed at any moment, restarted, reloaded, flushed; each line and row once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.collecting import dump, samples, steps
from support.daemon import Daemon, shipper
from support.oracle import complete_lines
from support.processes import children, command_line, kill, wait_for
from support.seeds import seeded
from support.site import Site

KILLS = 12


def watching(site: Site, **more: Any) -> list[str]:
    data = site.root / "data"
    data.mkdir(exist_ok=True)
    entry = {"path": str(data), "stable_s": 0.2, "poll_s": 0.1, **more}
    return [*site.file_backend(), "--set", f"watch={json.dumps([entry])}"]


def collectors(daemon: Daemon) -> list[int]:
    return [pid for pid in children(daemon.pid) if "collect.process" in command_line(pid)]


def records(site: Site, kind: str) -> list[dict[str, Any]]:
    lines = [line for path in site.out.rglob("*.jsonl") for line in complete_lines(path)]
    assert len({line.id for line in lines}) == len(lines)
    return [{"step": line.step, **line.data} for line in lines if line.kind == kind]


def losses(site: Site) -> Counter[float]:
    return Counter(record["loss"] for record in records(site, "metrics"))


def outputs(site: Site) -> Counter[str]:
    found: Counter[str] = Counter()
    for record in records(site, "generations"):
        found.update(row[record["columns"].index("output")] for row in record["rows"])
    return found


def taken(daemon: Daemon, records: int, timeout_s: float = 60.0) -> None:
    def is_taken(status: dict[str, Any]) -> bool:
        return bool(status["watch"]) and status["watch"][0]["figures"].get("records", 0) >= records

    daemon.wait_until(is_taken, timeout_s, f"{records} records of watched files")
    daemon.wait_settled()


@pytest.mark.parametrize("victim", ["collector", "daemon", "both"])
def test_kills_at_any_moment_cost_nothing_and_double_nothing(site: Site, victim: str) -> None:
    chance = seeded(f"watched folders {victim}")
    data = site.root / "data"
    written = 0
    with Daemon(site, *watching(site, stable_s=0.1)) as daemon, open(site.root / "data" / "exp.jsonl", "a") as log:
        for number in range(KILLS):
            for _ in range(20):
                log.write(dump(steps(written, written + 5)))
                log.flush()
                written += 5
                time.sleep(chance.random() * 0.01)  # the pace of a trainer
            (data / f"{number}.jsonl").write_text(dump(samples(number, 3000, f"s{number}-")))
            if not number:
                wait_for(lambda: collectors(daemon), 30, "a collector")
            time.sleep(chance.random() * 0.4)  # any moment
            for pid in collectors(daemon) if victim != "daemon" else ():
                kill(pid)
            if victim != "collector":
                daemon.kill()
                daemon.start()
        daemon.wait_until(
            lambda status: sum(outputs(site).values()) >= 3000 * KILLS and len(losses(site)) >= written,
            120,
            "everything arrives",
        )
        daemon.wait_settled()

    assert losses(site) == Counter({float(step): 1 for step in range(written)})
    assert outputs(site) == Counter(f"as{number}-{row}" for number in range(KILLS) for row in range(3000))


def test_a_command_is_not_over_before_its_last_files_are_delivered(site: Site) -> None:
    script = f"import pathlib; pathlib.Path({str(site.root / 'data')!r}, '7.jsonl').write_text({dump(samples(7, 2))!r})"
    result = shipper(site, "run", *watching(site, stable_s=1.0), "--", sys.executable, "-c", script, timeout_s=120)

    assert result.returncode == 0, result.stderr
    assert outputs(site) == Counter(["a0", "a1"])
    assert not list((site.state / "collected").iterdir()), "its streams are taken, sealed and gone"


def test_a_command_whose_files_take_longer_than_its_drain_says_that_some_wait_and_the_next_start_takes_them(
    site: Site,
) -> None:
    arguments = watching(site)
    for number in range(1500):
        (site.root / "data" / f"{number}.jsonl").write_text(dump(samples(number, 1, f"s{number}-")))
    command = [sys.executable, "-c", "import time; time.sleep(4)"]
    result = shipper(site, "run", *arguments, "--drain-timeout", "0.1", "--", *command, timeout_s=120)

    assert result.returncode == 0
    (line,) = [line for line in result.stderr.splitlines() if "are not taken yet" in line]
    assert str(site.root / "data") in line

    shipper(site, "flush", *arguments, "--state-dir", site.state, timeout_s=200)
    assert outputs(site) == Counter(f"as{number}-0" for number in range(1500))


def test_a_flush_takes_what_is_there_and_ends(site: Site) -> None:
    arguments = watching(site)
    (site.root / "data" / "1.jsonl").write_text(dump(samples(1, 2)))
    (site.root / "data" / "exp.jsonl").write_text(dump(steps(0, 4)) + '{"step": 4, "d')
    for _ in range(2):
        result = shipper(site, "flush", *arguments, "--state-dir", site.state, timeout_s=120)
        assert result.returncode == 0, result.stderr

    assert outputs(site) == Counter(["a0", "a1"])
    assert losses(site) == Counter({float(step): 1 for step in range(4)})
    shown = shipper(site, "status", "--state-dir", site.state).stdout
    assert "1 torn_line" in " ".join(shown.split())


def test_a_flush_of_somebodys_folder_takes_nothing_that_is_watched(site: Site) -> None:
    arguments = watching(site)
    (site.root / "data" / "1.jsonl").write_text(dump(samples(1, 2)))
    site.spool.mkdir()
    result = shipper(site, "flush", site.spool, *arguments, timeout_s=120)

    assert result.returncode == 0, result.stderr
    assert records(site, "generations") == []


def test_a_flush_beside_a_daemon_waits_for_what_is_watched(site: Site) -> None:
    with Daemon(site, *watching(site, stable_s=2.0)):
        (site.root / "data" / "1.jsonl").write_text(dump(samples(1, 2)))
        result = shipper(site, "flush", *site.file_backend(), "--state-dir", site.state, timeout_s=120)

        assert result.returncode == 0, result.stderr
        assert outputs(site) == Counter(["a0", "a1"])


def test_a_folder_may_come_later_go_and_come_again(site: Site) -> None:
    arguments = watching(site)
    data = site.root / "data"
    data.rmdir()
    with Daemon(site, *arguments) as daemon:
        for number in range(3):
            data.mkdir()
            (data / f"{number}.jsonl").write_text(dump(samples(number, 1, str(number))))
            taken(daemon, number + 1)
            data.rename(site.root / f"old{number}")

    assert outputs(site) == Counter(["a00", "a10", "a20"])


def test_folders_can_be_added_and_taken_away_while_it_runs(site: Site) -> None:
    (site.root / "one").mkdir()
    (site.root / "one" / "1.jsonl").write_text(dump(samples(1, 1)))
    config = site.root / "shipper.yaml"
    plain = f"backends: {{file: {{dir: {site.out}}}}}\n"
    config.write_text(plain)
    with Daemon(site, "--config", config) as daemon:
        assert collectors(daemon) == [], "nothing to do, so nobody is there to do it"
        config.write_text(f"{plain}watch: [{{path: {site.root}/one, stable_s: 0.1, poll_s: 0.1}}]\n")
        taken(daemon, 1)
        assert len(collectors(daemon)) == 1
        config.write_text(plain)
        wait_for(lambda: not collectors(daemon), 30, "it ends")

    assert outputs(site) == Counter(["a0"])


def test_the_collector_ends_with_its_daemon_and_a_stop_is_quick(site: Site) -> None:
    with Daemon(site, *watching(site)) as daemon:
        wait_for(lambda: collectors(daemon), 30, "a collector")
        (pid,) = collectors(daemon)
        daemon.kill()
        wait_for(lambda: "collect.process" not in command_line(pid), 10, "it ends with its daemon")
        daemon.start()
        wait_for(lambda: collectors(daemon), 30, "a collector")
        (pid,) = collectors(daemon)
        os.kill(pid, signal.SIGSTOP)

        assert daemon.stop() < 10
        assert "collect.process" not in command_line(pid)


def test_the_nodes_facts_come_with_every_run_that_lives_here(site: Site) -> None:
    """With a stand-in for the module that asks drivers."""
    fake = site.root / "fake"
    fake.mkdir()
    (fake / "sitecustomize.py").write_text(
        "import sys, types\n"
        "module = types.ModuleType('verl_shipper.node_facts')\n"
        "class NodeFacts:\n"
        "    def sample(self): return {'cpu/percent': 1.5}\n"
        "    def close(self): pass\n"
        "module.NodeFacts = NodeFacts\n"
        "sys.modules['verl_shipper.node_facts'] = module\n"
    )
    script = (
        "import time; from verl_shipper_client import Client; c = Client('p', 'e', run_id='r'); "
        "c.log({'a': 1}, 0); time.sleep(8); c.finish(0)"
    )
    arguments = ["--set", "system_metrics.interval_s=1", *site.file_backend()]
    env = {"PYTHONPATH": str(fake)}
    result = shipper(site, "run", *arguments, "--", sys.executable, "-c", script, timeout_s=120, env=env)

    assert result.returncode == 0, result.stderr
    found = [line for line in complete_lines(site.output("p", "e", "r")) if line.kind == "system"]
    assert 2 <= len(found) <= 12
    assert {line.data["values"]["cpu/percent"] for line in found} == {1.5}
    assert {line.step for line in found} == {None}


def test_a_damaged_ledger_is_told_and_its_files_come_again(site: Site) -> None:
    arguments = watching(site)
    (site.root / "data" / "1.jsonl").write_text(dump(samples(1, 1)))
    with Daemon(site, *arguments) as daemon:
        taken(daemon, 1)
        daemon.stop()
        for path in Path(site.state).glob("collect.sqlite3*"):
            path.write_bytes(b"\0" * 4096)
        daemon.start()
        daemon.wait_until(lambda status: outputs(site)["a0"] == 2, what="it comes again")
        assert "come again" in daemon.words()
