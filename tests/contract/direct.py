"""A backend without a lane, for contract tests. Must not know: trackers. On failure: AssertionError."""

from __future__ import annotations

import itertools
import time
from collections import Counter

from contract.bench import DELIVER_S
from contract.kit import Kit
from support.memory import FakeMemory
from verl_shipper.backends.base import Backend, Batch, Delivered, Item, Reject, RunInfo
from verl_shipper_spool.record import Record

A = "5" * 32  # a stream


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
