"""The fault matrix: one cell is one fault at one tracker, with real trainer, real daemon and the tracker's real SDK.

A cell passes when the server holds every record once: 0 missing, 0 doubled. `python -m support.matrix DIR` puts the
cells that the tests have left in DIR (VERL_SHIPPER_MATRIX_DIR) into docs/delivery-guarantees.md.

VERL_SHIPPER_TEST_LONG=1 uses the lengths and counts of `LONG`, else those of `SHORT`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from servers.faults import Fault, Rule
from support.daemon import Daemon
from support.four_trackers import FourTrackers
from support.processes import command_line, descendants, is_alive, kill, wait_for
from support.trainer import Ledger, counting_trainer

TRACKERS = ("wandb", "swanlab")
WRITES = {"wandb": "file_stream", "swanlab": "house/metrics"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "delivery-guarantees.md"
BEGIN, END = "<!-- fault matrix: begin -->", "<!-- fault matrix: end -->"
RUN = "matrix"
SETTLED_S = 240.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long and how often."""

    outage_s: float
    refused_s: float
    kills: int
    records: int


LONG = Sizes(outage_s=20.0, refused_s=90.0, kills=20, records=2000)
SHORT = Sizes(outage_s=5.0, refused_s=5.0, kills=3, records=300)


def sizes() -> Sizes:
    return LONG if os.environ.get("VERL_SHIPPER_TEST_LONG") else SHORT


@final
class Scene:
    """What a fault may touch."""

    def __init__(self, trackers: FourTrackers, name: str, daemon: Daemon, draw: random.Random) -> None:
        self.trackers = trackers
        self.name = name
        self.server = trackers.servers[name]
        self.daemon = daemon
        self.draw = draw
        self.sizes = sizes()

    def fail(self, fault: Fault, **how: float) -> None:
        self.server.rules(Rule(fault, WRITES[self.name], **how))  # type: ignore[arg-type]

    def nap(self) -> None:
        time.sleep(self.draw.uniform(0.2, 3.0))

    def child(self) -> int | None:
        """The process of the SDK, if there is one now."""
        found = [pid for pid in descendants(self.daemon.pid) if f"{self.name}_child" in command_line(pid)]
        return found[0] if found else None


def outage(scene: Scene) -> None:
    scene.server.kill()
    time.sleep(scene.sizes.outage_s)
    scene.server.start()


def hang(scene: Scene) -> None:
    scene.server.rules(Rule(Fault.HANG))
    time.sleep(scene.sizes.outage_s)
    scene.server.rules()


def rate_limit(scene: Scene) -> None:
    scene.fail(Fault.RATE_LIMIT, times=3, retry_after_s=2.0)


def error(scene: Scene) -> None:
    scene.fail(Fault.ERROR, times=3)


def lost(scene: Scene) -> None:
    scene.fail(Fault.LOST, each=2)


def cut(scene: Scene) -> None:
    scene.fail(Fault.SWALLOW, each=2)


def key_replaced(scene: Scene) -> None:
    key = "n" * len(scene.trackers.key_file(scene.name).read_text().strip())
    scene.server.options(api_key=key)
    time.sleep(scene.sizes.refused_s)
    scene.trackers.put_key(scene.name, key)


def child_killed(scene: Scene) -> None:
    for _ in range(scene.sizes.kills):
        wait_for(lambda: scene.child() is not None, 120, "the SDK's process is there")
        scene.nap()
        pid = scene.child()
        if pid is not None and is_alive(pid):
            kill(pid)


def daemon_killed(scene: Scene) -> None:
    for _ in range(scene.sizes.kills):
        scene.nap()
        scene.daemon.kill()
        scene.daemon.start()


def server_restarted(scene: Scene) -> None:
    for _ in range(3):
        scene.nap()
        scene.server.kill()
        scene.server.start()


FAULTS: dict[str, tuple[str, Callable[[Scene], None]]] = {
    "outage": ("server gone for 20 s", outage),
    "hang": ("server hangs for 20 s", hang),
    "rate_limit": ("429 three times, with Retry-After", rate_limit),
    "error": ("500 three times", error),
    "key_replaced": ("401 for 90 s, then a new key", key_replaced),
    "lost": ("503 after applying, first two tries of every batch", lost),
    "cut": ("connection cut after applying, the same", cut),
    "child_killed": ("SDK's process killed at 20 random points", child_killed),
    "daemon_killed": ("daemon killed at 20 random points", daemon_killed),
    "server_restarted": ("server killed and started again, three times", server_restarted),
}


def play(trackers: FourTrackers, name: str, fault: str, draw: random.Random) -> tuple[int, int]:
    """One cell: how many records are missing at the server, and how many are there more than once."""
    count = sizes().records
    trackers.put_key(name)
    ledger = Ledger(trackers.site.root / "ledger")
    with (
        trackers.daemon("--set", f"backends.{name}.settle_s=1") as daemon,
        counting_trainer(
            trackers.site, ledger, project=trackers.project, run_id=RUN, count=count, pace_s=0.02
        ) as trainer,
    ):
        ledger.wait_for(count // 10)
        scene = Scene(trackers, name, daemon, draw)
        failing = threading.Thread(target=FAULTS[fault][1], args=(scene,))
        failing.start()
        trainer.wait(timeout_s=300)
        failing.join()
        daemon.wait_settled(count + 2, timeout_s=SETTLED_S)
    held = Counter(step for step, _ in trackers.values(name, RUN, "n"))
    assert set(held) <= set(range(count)), "steps that nobody logged"
    return count - len(held), sum(times > 1 for times in held.values())


def note(name: str, fault: str, missing: int, doubled: int) -> None:
    """Leave the result of a cell for the table."""
    folder = os.environ.get("VERL_SHIPPER_MATRIX_DIR")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        cell = {"missing": missing, "doubled": doubled, "long": sizes() is LONG}
        (Path(folder) / f"{name}-{fault}.json").write_text(json.dumps(cell))


def table(folder: Path) -> str:
    """The table of all cells; a cell that was not played says so."""
    lines = ["| fault | " + " | ".join(f"`{name}`" for name in TRACKERS) + " |", "|---|" + "---|" * len(TRACKERS)]
    for fault, (what, _) in FAULTS.items():
        lines.append(f"| {what} | " + " | ".join(_cell(folder / f"{name}-{fault}.json") for name in TRACKERS) + " |")
    return "\n".join(lines)


def _cell(path: Path) -> str:
    if not path.exists():
        return "not played"
    cell = json.loads(path.read_text())
    told = f"{cell['missing']} missing, {cell['doubled']} doubled"
    return told if cell["long"] else f"{told} (short)"


def main() -> None:
    """Put the table into the document."""
    text = DOCUMENT.read_text("utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    DOCUMENT.write_text(f"{head}{BEGIN}\n{table(Path(sys.argv[1]))}\n{END}{tail}", "utf-8")


if __name__ == "__main__":
    main()
