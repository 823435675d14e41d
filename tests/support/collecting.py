"""A collector in our own process beside a real ingest, killed at any point by an exception, as a test wants it.

Promises: `records` are those that reached the node spool, each once. Must not know: what lies in the folders.
On failure: AssertionError.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_shipper.adopt import Adopt
from verl_shipper.collect.collector import Collector
from verl_shipper.collect.order import CollectOrder, collected_dir
from verl_shipper.config_watch import WatchEntry
from verl_shipper.ingest import Ingest
from verl_shipper_spool.header import ENDED_NAME, SCALARS, StreamHeader, decode_header, new_id, this_process
from verl_shipper_spool.reader import Frame, StreamReader
from verl_shipper_spool.record import Record, decode_record

PATIENCE_S = 30.0


class Killed(BaseException):
    """Our stand-in for SIGKILL."""


class Collected:
    """A state folder with its collector and its daemon's ingest. Files are taken as soon as they are seen."""

    def __init__(self, root: Path, *entries: WatchEntry, ends: bool = False, interval_s: float = 0.0) -> None:
        self.state = root / "state"
        self.folder = root / "data"
        self.folder.mkdir(exist_ok=True)
        self.entries = list(entries) or [self.entry()]
        self.ends = ends
        self.interval_s = interval_s
        self.ingest = Ingest(str(self.state), 10**10)
        self.ingest.open()
        self.adopt = Adopt(self.ingest, [collected_dir(str(self.state))], patient=False, ended=True)
        self.collector: Collector | None = None

    def entry(self, path: Path | str | None = None, **values: Any) -> WatchEntry:
        given = {"stable_s": 0.0, "poll_s": 0.0, **values}
        return WatchEntry(str(path or self.folder), **given)

    def start(self) -> Collector:
        self.collector = Collector(
            CollectOrder(str(self.state), -1, "WARNING", self.entries, self.interval_s, ends=self.ends)
        )
        return self.collector

    def turn(self, times: int = 1) -> None:
        collector = self.collector or self.start()
        for _ in range(times):
            collector.turn()

    def settle(self) -> None:
        """Turn until everything that is there now is taken."""
        collector = self.collector or self.start()
        began_ns = time.monotonic_ns()
        self.until(lambda: collector.settled_ns >= began_ns, "everything is taken")

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {PATIENCE_S} s: {what}: {self.figures()}"
            self.turn()

    def look(self) -> None:
        """Turn until everything was looked at twice, and what was ready is taken."""
        places = (self.collector or self.start())._places
        ends = [place.passes + 2 for place in places]
        self.until(lambda: all(map(lambda place, end: place.passes >= end, places, ends)), "two looks")
        self.until(lambda: self.collector and not self.collector._jobs, "the last job ends")

    def kill(self) -> None:
        """What a kill leaves behind: open streams, whatever is durable, and a process that lives no more."""
        collector, self.collector = self.collector, None
        if collector is None:
            return
        collector._watch.stop()
        collector._ledger._db.rollback()
        collector._ledger.close()
        for pair in collector._streams._pairs.values():
            for writer in pair.writers:
                writer.close()
        root = collected_dir(str(self.state))
        for name in os.listdir(root) if os.path.isdir(root) else ():
            Path(root, name, ENDED_NAME).touch()  # as the death of its writer

    def close(self) -> None:
        collector, self.collector = self.collector, None
        if collector is not None:
            collector.close()
        self.ingest.close()

    def take(self) -> bool:
        """The daemon takes what was collected; True when that was not all."""
        more = self.adopt.look(time.monotonic())
        self.ingest.settle()
        return more

    def records(self) -> list[tuple[str, Record]]:
        """(run id, record) of everything that was collected, in the order of the streams."""
        for _ in range(4):
            while self.take():
                pass
        found = []
        for name in sorted(os.listdir(self.state / "spool")):
            folder = self.state / "spool" / name
            header = decode_header((folder / "stream").read_bytes())
            if header.process == this_process() and header.forked:
                frames = StreamReader(str(folder)).frames(final=True)
                found += [
                    (header.run_id, decode_record(frame.payload))
                    for frame in frames
                    if isinstance(frame, Frame) and frame.kind.name == "RECORD"
                ]
        return found

    def of(self, kind: str) -> list[Record]:
        return [record for _, record in self.records() if record.kind.name.lower() == kind]

    def runs_of(self, kind: str) -> set[str]:
        return {run for run, record in self.records() if record.kind.name.lower() == kind}

    def figures(self, place: int = 0) -> dict[str, int]:
        collector = self.collector or self.start()
        note: dict[str, Any] = collector._place_note(collector._places[place])
        return {**note["figures"], **note["refused"]}

    def begin_run(
        self, run_id: str, *, is_live: bool = True, created_ns: int | None = None, **names: str
    ) -> StreamHeader:
        """A run that the daemon knows of, with a writer that lives (another process than ours) or does not."""
        process = this_process()
        parent = replace(process, pid=os.getppid(), start_ticks=0 if is_live else 1)
        header = StreamHeader(
            stream_id=new_id(),
            writer_id=new_id(),
            stream_class=SCALARS,
            run_id=run_id,
            project=names.get("project", ""),
            experiment=names.get("experiment", ""),
            rank=0,
            world=1,
            created_ns=time.time_ns() if created_ns is None else created_ns,
            forked=False,
            process=parent,
        )
        self.ingest.greet(header)
        return header


def dump(rows: Iterable[Any]) -> str:
    """Lines of JSON."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def samples(step: int, count: int, mark: str = "") -> list[dict[str, Any]]:
    """Rows as verl dumps them."""
    return [
        {"input": f"q{index}", "output": f"a{mark}{index}", "gts": str(index), "score": 0.5, "step": step, "acc": 1.0}
        for index in range(count)
    ]


def steps(first: int, end: int, mark: float = 0.0) -> list[dict[str, Any]]:
    """Lines as verl's `file` logger writes them."""
    return [{"step": step, "data": {"loss": step + mark}} for step in range(first, end)]
