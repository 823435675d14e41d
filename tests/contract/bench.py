"""What the contract suite drives a backend with.

    watched(kit)        its class, noting every outcome and everything raised in a Diary
    forgetful(…)        the same, and no answer of the first two tries of any batch comes through
    Direct              a backend without a lane, made anew whenever a test wants a crash
    Bench               a node spool filled by hand and a real lane over it, turned by the real clock
    LaneProcess         the same lane in a process of its own (lane_child.py), which may be killed

Must not know: any tracker. On failure: AssertionError.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.kits import Kit
from support.batches import TIME_NS
from support.memory import FakeMemory
from support.processes import wait_for
from support.streams import make_header
from verl_shipper import letters, status
from verl_shipper.backends import load_backend
from verl_shipper.backends.base import Backend, Batch, Delivered, Item, Outcome, Reject, Retry, RunInfo
from verl_shipper.ingest import Ingest
from verl_shipper.lane import Lane
from verl_shipper.lane_process import store_path
from verl_shipper.lane_store import LaneStore
from verl_shipper_spool.frame import encode
from verl_shipper_spool.record import Record, RecordKind, encode_record

LOST_TRIES = 2
DELIVER_S = 150.0
TURN_S = 0.01
A = "5" * 32  # a stream
SKIP_S = 90.0  # longer than every pause of a lane


@dataclass
class Diary:
    """All that a backend said during one test."""

    outcomes: list[Outcome] = field(default_factory=list)
    raised: list[Exception] = field(default_factory=list)

    def note(self, ask: Callable[[], Outcome | None]) -> Outcome | None:
        try:
            outcome = ask()
        except Exception as error:
            self.raised.append(error)
            raise
        if outcome is not None:
            self.outcomes.append(outcome)
        return outcome

    def check(self, secret: str) -> None:
        """Outcomes only, each with a reason for a person in one line; values not shown are counted."""
        assert not self.raised
        for outcome in self.outcomes:
            if isinstance(outcome, Delivered):
                assert all(type(count) is int and count >= 0 for count in outcome.ignored.values()), outcome
                assert all(isinstance(reason, str) and reason for reason in outcome.ignored), outcome
                continue
            assert outcome.reason.strip(), outcome
            assert len(outcome.reason.splitlines()) == 1, outcome
            assert len(outcome.reason) <= 1000, outcome
            assert secret not in outcome.reason


def watched(kit: Kit, diary: Diary) -> type[Backend]:
    loaded: Any = load_backend(kit.backend)

    class Watched(loaded):  # type: ignore[misc]
        def open(self) -> Outcome | None:
            return diary.note(super().open)

        def upload(self, batch: Batch) -> Outcome:
            outcome = diary.note(lambda: super(Watched, self).upload(batch))
            assert outcome is not None, "an upload that says nothing"
            return outcome

    return Watched


def forgetful(kit: Kit, backend: Any) -> type[Backend]:
    tries: Counter[str] = Counter()

    class Forgetful(backend):  # type: ignore[misc]
        def upload(self, batch: Batch) -> Outcome:
            tries[batch.batch_id] += 1
            if tries[batch.batch_id] > LOST_TRIES:
                return super().upload(batch)  # type: ignore[no-any-return]
            kit.lose_answers()
            outcome: Outcome = super().upload(batch)
            kit.heal()
            return Retry("the answer was lost") if isinstance(outcome, Delivered) else outcome

    return Forgetful


def numbers(first: int, count: int, key: str = "n") -> list[Record]:
    """Metrics whose value is their step."""
    return [metric({key: float(n)}, n) for n in range(first, first + count)]


def metric(body: dict[Any, Any], step: int | None) -> Record:
    return Record(RecordKind.METRICS, 0, step, TIME_NS + (step or 0) % 10**6 * 10**6, body)


def started(**config: Any) -> Record:
    return Record(RecordKind.RUN_START, 0, None, TIME_NS, {"config": config})


def finished(exit_code: int = 0) -> Record:
    return Record(RecordKind.RUN_FINISH, 0, None, TIME_NS + 10**15, {"exit_code": exit_code, "reason": "finish"})


class Direct:
    """A backend without a lane: one run, one memory, a fresh object whenever a test wants one."""

    def __init__(self, kit: Kit, backend: type[Backend]) -> None:
        self.run: RunInfo = kit.run()
        self.memory = FakeMemory()
        self._kit = kit
        self._class = backend
        self._made: Backend | None = None
        self._numbers = itertools.count()

    def fresh(self) -> Backend:
        """As after a crash: only the memory stays."""
        self.close()
        self._made = self._class(self.run, self._kit.settings, self.memory)
        return self._made

    def batch(self, *records: Record, stream: str = A, first: int = 0, rank: int = 0) -> Batch:
        items = tuple(Item(stream, first + place, rank, self._kit.record(each)) for place, each in enumerate(records))
        return Batch(f"batch{next(self._numbers)}", self.run, items)

    def deliver(self, backend: Backend, batch: Batch) -> tuple[Counter[str], list[Item]]:
        """What a lane does, all commits included. Returns values not shown by reason, and refused items."""
        refused: list[Item] = []
        deadline_s = time.monotonic() + DELIVER_S
        while not isinstance(outcome := backend.upload(batch), Delivered):
            assert time.monotonic() < deadline_s, outcome
            if isinstance(outcome, Reject):
                assert outcome.items, outcome
                refused += [batch.items[index] for index in outcome.items]
                rest = [item for index, item in enumerate(batch.items) if index not in outcome.items]
                batch = Batch(f"{batch.batch_id}.r", batch.run, tuple(rest))
            else:
                time.sleep(0.3)
        self.memory.remember(outcome.remember)
        return Counter(outcome.ignored), refused

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


class Bench:
    """One node spool and the state of one lane in `root`; the lane turns here, or in a LaneProcess."""

    def __init__(self, root: Path, kit: Kit) -> None:
        self.root = root
        self.kit = kit
        self.ingest = Ingest(str(root), 10**9)
        self.ingest.open()
        self.lane: Lane | None = None
        self._next: Counter[str] = Counter()
        self._skipped_s = 0.0

    def open_lane(self, backend: type[Backend]) -> None:
        store = LaneStore(store_path(str(self.root), self.kit.backend))
        self.lane = Lane(backend, self.kit.settings, self.ingest.spool_dir, store)

    def stream(self, run: RunInfo, rank: int = 0) -> str:
        header = make_header(run_id=run.run_id, project=run.project, experiment=run.experiment, rank=rank)
        self.ingest.greet(header)
        return header.stream_id

    def log(self, stream_id: str, *records: Record) -> None:
        """Append records of a writer."""
        content = bytearray()
        for record in records:
            content += encode(encode_record(self.kit.record(record)), self._next[stream_id])
            self._next[stream_id] += 1
        assert self.ingest.take(stream_id, self.ingest.end(stream_id), bytes(content))
        self.ingest.settle()

    def turn(self, until: Callable[[], object], what: str, timeout_s: float = DELIVER_S) -> None:
        """Turn the lane until something is so."""
        lane = self.lane
        assert lane is not None, "no lane"

        def is_so() -> object:
            lane.tick(time.monotonic() + self._skipped_s)
            return until()

        try:
            wait_for(is_so, timeout_s, what, TURN_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.account()}") from None

    def deliver_all(self, timeout_s: float = DELIVER_S) -> None:
        self.turn(lambda: self.account().pending == 0, "everything is delivered", timeout_s)

    def skip_pauses(self) -> None:
        """The lane's clock jumps over all its backoffs."""
        self._skipped_s += SKIP_S

    def account(self, run: RunInfo | None = None) -> status.Account:
        """The account as `status` tells it; the law holds at every look."""
        found = status.report(str(self.root), [self.kit.backend])
        accounts = found.backends[self.kit.backend]
        # A lane elsewhere may commit between the counts that a report is made of.
        assert self.lane is None or all(account.balanced for account in accounts.values()), accounts
        return found.total(self.kit.backend) if run is None else accounts[run.run_id]

    def letters(self) -> list[letters.Letter]:
        return letters.letters(str(self.root))

    def close(self) -> None:
        if self.lane is not None:
            self.lane.close(30.0)
        self.ingest.close()


class LaneProcess:
    """The lane of a bench in a process of its own. `kill_accepted`: SIGKILL by itself, between accept and commit."""

    def __init__(self, bench: Bench, *, kill_accepted: bool = False) -> None:
        order = {
            "backend": bench.kit.backend,
            "settings": bench.kit.settings,
            "spool_dir": bench.ingest.spool_dir,
            "store": store_path(str(bench.root), bench.kit.backend),
            "kill_accepted": kill_accepted,
        }
        # A terminal is what the tests' process has as its own.
        out = sys.__stdout__.fileno() if bench.kit.backend == "console" and sys.__stdout__ else subprocess.DEVNULL
        environment = _environment(os.environ)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("lane_child.py"))],
            stdin=subprocess.PIPE,
            stdout=out,
            env=environment,
        )
        assert self._process.stdin is not None, "asked for a pipe"
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def wait(self, timeout_s: float = DELIVER_S) -> int:
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self, timeout_s: float) -> None:
        """As the daemon ends it; AssertionError when it is held up."""
        assert self._process.stdin is not None, "asked for a pipe"
        self._process.stdin.close()
        try:
            assert self._process.wait(timeout_s) == 0
        finally:
            self._process.kill()
            self._process.wait()


@contextmanager
def lane_process(bench: Bench, stop_s: float = 30.0, **how: bool) -> Iterator[LaneProcess]:
    process = LaneProcess(bench, **how)
    try:
        yield process
    finally:
        process.stop(stop_s)


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    return {**ours, "PYTHONWARNINGS": "ignore"}
