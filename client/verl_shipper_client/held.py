"""Records that wait for a device, and those of the same stream that came behind them.

    add(…)       at the end of the queue
    release()    from its front: write what is complete, in order; give up what waits too long
    look()       the same for another thread than those that log: asks no device
    give_up()    write all, whatever has come of it

A stream's records keep the order in which they were logged, so one whose values are still on a device holds back the
later ones of its stream. All of these are in memory only: a killed process loses them, and nothing else. Bounded: by
time, by number and by size; beyond, the oldest one is written with markers in place of what never came.

The caller holds the client's lock. Reentrant: who interrupts a `release` and logs, only adds. Must not know: devices.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from verl_shipper_client.device import Awaited, Reading
from verl_shipper_client.values import to_plain, whole_step
from verl_shipper_spool.record import RECORD_VERSION, RecordKind

HELD_S_MAX = 300.0  # a device that has not come so far in five minutes hangs; its neighbours' records are wanted
HELD_RECORDS_MAX = 1000  # steps that a device may be behind; its own queue is full long before
ASK_AFTER_S = 1.0  # a value that is not in memory by then: the device is asked
HELD_BYTES_MAX = 64 * 1024 * 1024  # of records behind the one that waits


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A record whose body, or step, has `Awaited` numbers in it."""

    kind: RecordKind
    seq: int
    step: Any
    time_ns: int
    body: dict[Any, Any]
    reading: Reading

    def payload(self) -> bytes:
        """The record with what has arrived."""
        values = self.reading.values()

        def fill(value: Any) -> Any:
            number = values[value.index] if type(value) is Awaited else value
            return number if isinstance(number, (bool, int, float)) else to_plain(number)

        step = values[self.step.index] if isinstance(self.step, Awaited) else self.step
        fields = (RECORD_VERSION, int(self.kind), self.seq, whole_step(step), self.time_ns, self.body)
        packed: bytes = msgpack.packb(fields, use_bin_type=True, default=fill)
        return packed


@dataclass(frozen=True, slots=True)
class _Entry:
    content: bytes | Unfinished
    record_class: str
    since_s: float


class Held:
    """The queue of one stream. `append` writes a payload of a class."""

    def __init__(self, append: Callable[[bytes, str], object]) -> None:
        self.queue: deque[_Entry] = deque()
        self._append = append
        self._size_bytes = 0
        self._writing = False

    def add(self, content: bytes | Unfinished, record_class: str) -> None:
        """Put a record behind those that wait, and write whatever need not wait any more."""
        self._size_bytes += len(content) if isinstance(content, bytes) else 0
        self.queue.append(_Entry(content, record_class, time.monotonic()))
        self.release()

    def release(self) -> bool:
        """Write what is complete; a device that is late is asked. True when nothing waits any more."""
        return self._write_out(
            lambda reading, age_s: reading.has_arrived() or (age_s > ASK_AFTER_S and reading.is_done())
        )

    def give_up(self) -> bool:
        """Write all that waits, with markers in place of what a device that is asked has not brought."""
        return self._write_out(lambda reading, _age_s: reading.has_arrived() or reading.is_done() or True)

    def look(self) -> bool:
        """Write what is complete, without a question to a device."""
        return self._write_out(lambda reading, _age_s: reading.has_arrived())

    def _write_out(self, may_go: Callable[[Reading, float], bool]) -> bool:
        if self._writing:
            return False  # a signal handler inside us: we go on with what it has added
        self._writing = True
        try:
            while self.queue:
                entry = self.queue[0]
                content = entry.content
                if isinstance(content, Unfinished):
                    age_s = time.monotonic() - entry.since_s
                    if not (may_go(content.reading, age_s) or self._is_over_limit(age_s)):
                        return False
                    content = content.payload()
                self._append(content, entry.record_class)
                self.queue.popleft()  # not before: a raising handler may cause a record twice, but never none
                self._size_bytes -= len(content) if content is entry.content else 0
        finally:
            self._writing = False
        return True

    def _is_over_limit(self, age_s: float) -> bool:
        return age_s > HELD_S_MAX or len(self.queue) > HELD_RECORDS_MAX or self._size_bytes > HELD_BYTES_MAX
