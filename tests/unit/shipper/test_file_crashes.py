"""A process that dies before or behind any of its system calls, while a file comes in, loses and doubles nothing.

Death is a BaseException from the call, which nothing may catch; then everything is made anew but the disk and the
lane's commits. What was not fsynced is thrown away as well, in every second game.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.batches import item, run_info
from support.memory import FakeMemory
from support.seeds import seeded
from verl_shipper.backends.base import Batch, Delivered, Item
from verl_shipper.backends.file import FileBackend
from verl_shipper_spool.file_parts import PART_BYTES, parts_of
from verl_shipper_spool.record import RecordKind

CALLS = ("open", "pwrite", "write", "fsync", "link", "unlink", "rename", "replace", "mkdir", "chmod", "ftruncate")
CONTENT = random.Random(1).randbytes(2 * PART_BYTES + 1)


class DeathError(BaseException):
    """kill -9."""


class Machine:
    """Counts system calls of `os`; dies at number `at`, before or behind it. Notes what was written and not synced."""

    def __init__(self, at: int, *, behind: bool) -> None:
        self.at = at
        self.behind = behind
        self.count = 0
        self.unsynced: dict[int, tuple[str, int]] = {}  # by descriptor: path, size that is durable

    @contextmanager
    def running(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._counted(name, getattr(os, name)))
            yield

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.at and not self.behind:
                raise DeathError
            if name == "pwrite":
                path = os.readlink(f"/proc/self/fd/{arguments[0]}")
                self.unsynced.setdefault(arguments[0], (path, os.fstat(arguments[0]).st_size))
            is_last = self.count == self.at
            try:
                result = call(*arguments, **options)
                if name == "fsync":
                    self.unsynced.pop(arguments[0], None)
            finally:
                if is_last:
                    raise DeathError
            return result

        return counted

    def lose_power(self, draw: random.Random) -> None:
        """What was not synced is gone: to a random length, or to zeros."""
        for path, durable in self.unsynced.values():
            if os.path.exists(path):
                size = os.path.getsize(path)
                os.truncate(path, draw.randint(durable, max(size, durable)))
                if draw.random() < 0.5:
                    os.truncate(path, size)


def batches() -> list[tuple[Item, ...]]:
    other = [item(RecordKind.METRICS, {"n": float(n)}, ordinal=n, step=n) for n in range(3)]
    parts = [
        item(RecordKind.FILE, body, ordinal=3 + place, step=1)
        for place, body in enumerate(parts_of(io.BytesIO(CONTENT), "a.bin"))
    ]
    return [(*other[:2], parts[0]), (parts[1], other[2]), (parts[2],)]


def deliver(folder: Path, memory: FakeMemory, sent: list[tuple[Item, ...]], done: list[int]) -> None:
    """What a lane does with its outbox from `done` on: open, upload, commit."""
    backend = FileBackend(run_info(), {"dir": str(folder)}, memory)
    backend.open()
    for number in range(done[0], len(sent)):
        outcome = backend.upload(Batch(f"b{number}", run_info(), sent[number]))
        assert isinstance(outcome, Delivered), outcome
        memory.remember(outcome.remember)
        done[0] = number + 1


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_death_at_any_system_call_loses_and_doubles_nothing(tmp_path: Path, *, behind: bool) -> None:
    draw = seeded("death")
    sent = batches()
    at, deaths = 0, 0
    while True:
        at += 1
        folder, memory, done = tmp_path / f"{at}", FakeMemory(), [0]
        machine = Machine(at, behind=behind)
        try:
            with machine.running():
                deliver(folder, memory, sent, done)
        except DeathError:
            deaths += 1
            if at % 2:
                machine.lose_power(draw)
        else:
            break
        second = Machine(draw.randint(1, 30), behind=behind)  # and once more while it recovers
        try:
            with second.running():
                deliver(folder, memory, sent, done)
        except DeathError:
            second.lose_power(draw)
        deliver(folder, memory, sent, done)
        lines = [json.loads(line) for line in (folder / "project" / "experiment-run1.jsonl").read_bytes().splitlines()]
        ids = [line["id"] for line in lines]
        assert len(ids) == len(set(ids)) == 6, at
        (path,) = [line["data"]["path"] for line in lines if "path" in line["data"]]
        shelf = [each for each in (folder / "project").rglob("*") if each.is_file() and each.suffix == ".bin"]
        assert [each.read_bytes() for each in shelf] == [CONTENT], at
        assert shelf[0] == folder / "project" / path, at
    assert deaths > 40
