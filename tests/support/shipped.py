"""What a job without a daemon has left in a spool, flushed, and read back from the backend `file`.

Must not know: who logged it. On failure: AssertionError with what `flush` said.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from support.site import Site

FLUSH_S = 120.0


def spooling(site: Site, **extra: str) -> dict[str, str]:
    """What a job's environment needs to leave its records at a site."""
    return {"VERL_SHIPPER_SPOOL_DIR": str(site.spool), "HOME": str(site.home), **extra}


@dataclass(frozen=True)
class Records:
    """All records of a spool, as the backend `file` has them."""

    lines: tuple[dict[str, Any], ...]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    def runs(self) -> set[str]:
        return {line["run_id"] for line in self.lines}

    def metrics(self) -> list[tuple[int, dict[str, Any]]]:
        """(step, numbers) of each `log` in the order of capture."""
        return [(line["step"], line["data"]) for line in sorted(self.of("metrics"), key=lambda each: each["seq"])]

    def traces(self) -> list[list[dict[str, Any]]]:
        """Spans by trace, each with its root last."""
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in sorted(self.of("span"), key=lambda each: each["seq"]):
            found[line["data"]["trace_id"]].append(line["data"])
        return list(found.values())


def flush(site: Site, extra: Iterable[str] = ()) -> Records:
    """Deliver what a spool holds to the backend `file`, and read it."""
    command = [sys.executable, "-m", "verl_shipper", "flush", str(site.spool), *site.file_backend(), *extra]
    done = subprocess.run(command, env=site.env(), capture_output=True, text=True, timeout=FLUSH_S, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for path in site.out.rglob("*.jsonl") for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines), "a record is there twice"
    return Records(tuple(lines))
