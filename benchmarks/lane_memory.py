"""Whether a lane grows: 24 hours of training (100,000 steps of 100 scalars) through the wandb lane, memory all the way.

    python benchmarks/lane_memory.py [--steps 100000] [--scalars 100] [--json FILE]

The real SDK against the small wandb server of the tests. Every line is one look: rows at the server, and the resident
memory of the lane, of the SDK's process and of its helper. What is said at the end is the median of the last quarter
against that of the second quarter (the first fills caches). The server keeps its rows in memory; that is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from servers.process import ServerProcess
from support.processes import command_line, descendants, rss_bytes

LOOK_S = 2.0
QUIET_S_MAX = 300.0
SDK = "wandb_child"
HELPER = "wandb-core"


def main() -> None:
    """Log, watch, tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--scalars", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ServerProcess("wandb_server", Path(name) / "server") as server:
        looks = list(run(Path(name), server, options.steps, options.scalars))
    summary = told(looks)
    print(json.dumps(summary, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"looks": looks, "summary": summary}))


def run(folder: Path, server: ServerProcess, steps: int, scalars: int) -> Iterator[dict[str, Any]]:
    """Looks at the memory until the server has all rows."""
    key = folder / "key"
    key.touch(0o600)
    key.write_text("k" * 40)
    os.environ["VERL_SHIPPER_SPOOL_DIR"] = str(folder / "spool")
    from verl_shipper_client import Client

    with Client("benchmark", "memory", run_id="memory") as client:
        for step in range(steps):
            client.log({f"actor/metric_{n:03}/mean": step + n / 7 for n in range(scalars)}, step)
    settings = {"base_url": server.url, "api_key_file": str(key), "settle_s": 1}
    daemon = subprocess.Popen(
        [sys.executable, "-m", "verl_shipper", "run", "--backend", "wandb", "--set", "system_metrics.enabled=no"]
        + [word for key, value in settings.items() for word in ("--set", f"backends.wandb.{key}={value}")],
        env=os.environ | {"VERL_SHIPPER_STATE_DIR": str(folder / "state")},
    )
    try:
        yield from watch(daemon.pid, server, steps)
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(30)


def watch(pid: int, server: ServerProcess, steps: int) -> Iterator[dict[str, Any]]:
    begun_s = moved_s = time.monotonic()
    rows = 0
    while rows < steps and time.monotonic() - moved_s < QUIET_S_MAX:
        time.sleep(LOOK_S)
        before, rows = rows, row_count(server)
        moved_s = time.monotonic() if rows != before else moved_s
        if not rows:
            continue
        memory = {"lane": 0.0, "sdk": 0.0, "helper": 0.0}
        for child in descendants(pid):
            line = command_line(child)
            part = "sdk" if SDK in line else "helper" if HELPER in line else "lane" if "lane_process" in line else ""
            if part:
                memory[part] += rss_bytes(child) / 1e6
        look = {"at_s": round(time.monotonic() - begun_s, 1), "rows": rows, **memory}
        print(" ".join(f"{key}={value:.0f}" for key, value in look.items()), flush=True)
        yield look


def row_count(server: ServerProcess) -> int:
    """Rows of the only run, without making the server tell all of them."""
    import urllib.request

    query = "query Q($project:String!,$run:String!){project(name:$project){run(name:$run){id historyLineCount state}}}"
    body = json.dumps({"query": query, "variables": {"project": "benchmark", "run": "memory"}}).encode()
    request = urllib.request.Request(f"{server.url}/graphql", body, {"Content-Type": "application/json"})
    request.add_header("Authorization", "Basic YXBpOms=")
    with urllib.request.urlopen(request, timeout=60) as answer:
        project = json.loads(answer.read())["data"]["project"]
    run = (project or {}).get("run") or {}
    return int(run.get("historyLineCount") or 0)


def told(looks: list[dict[str, Any]]) -> dict[str, Any]:
    """Growth from the second quarter to the last, in MB, and peaks."""
    if len(looks) < 8:
        return {"looks": len(looks)}
    quarter = len(looks) // 4
    summary: dict[str, Any] = {"rows": looks[-1]["rows"], "rows_per_s": round(looks[-1]["rows"] / looks[-1]["at_s"])}
    for part in ("lane", "sdk", "helper"):
        second = statistics.median(look[part] for look in looks[quarter : 2 * quarter])
        last = statistics.median(look[part] for look in looks[-quarter:])
        summary[part] = {"second_mb": round(second), "last_mb": round(last), "growth_mb": round(last - second)}
        summary[part]["peak_mb"] = round(max(look[part] for look in looks))
    return summary


if __name__ == "__main__":
    main()
