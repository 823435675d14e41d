"""When a file on disk may be taken, and whether it is still the one we know. Pure decisions over observations.

    written whole (generations, traces)   when it stands still, or its successor has appeared
    grows (metrics)                       at once, by complete lines; what we know of its beginning, and of the bytes
                                          before our place, tells whether it grew or was written anew

The clocks are two: `now_s` never jumps and measures how long a file stands still; `wall_ns` is compared with what a
file system says, which may be another machine's clock.

Must not know: files, folders, records.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

HEAD_BYTES = 4096  # of a file's beginning: the first step of a training, with its timings
MARK_BYTES = 256  # in front of our place
OLD_S = 60.0  # unchanged for so long by its own clock, and there when we came: nobody is writing it
FUTURE_NS = 2_000_000_000  # a clock may be so far ahead of ours without anybody noticing


@dataclass(frozen=True, slots=True)
class Seen:
    """What the file system says of a file."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @property
    def identity(self) -> str:
        return f"{self.device:x}:{self.inode:x}"

    def values(self) -> list[int]:
        """What `Seen(*values)` is made of, for a ledger."""
        return [self.device, self.inode, self.size, self.mtime_ns]


@dataclass(frozen=True, slots=True)
class Sighting:
    """A file that has looked like this since `since_s`. `is_first`: it did when we began."""

    seen: Seen
    since_s: float
    is_first: bool = False


def sight(before: Sighting | None, seen: Seen, now_s: float, *, is_first: bool = False) -> Sighting:
    """The sighting after another look."""
    if before is not None and before.seen == seen:
        return before
    return Sighting(seen, now_s, is_first=is_first and before is None)


def stands_still(sighting: Sighting, now_s: float, wall_ns: int, stable_s: float, *, by_age: bool = False) -> bool:
    """Whether nobody seems to write a file any more. `by_age`: its own clock is believed at once, as nobody waits."""
    if now_s - sighting.since_s >= stable_s:
        return True
    age_s = (wall_ns - sighting.seen.mtime_ns) / 1e9
    if by_age:
        return age_s >= stable_s
    return sighting.is_first and age_s >= max(stable_s, OLD_S)


def is_followed(step: int | None, seen: Seen, others: tuple[tuple[int, int], ...]) -> bool:
    """Whether a later step's file was begun after this one was written: `others` are (step, mtime_ns) of its folder.

    A later step that is older is of another attempt, whose files are being written anew.
    """
    return step is not None and any(other > step and mtime_ns > seen.mtime_ns for other, mtime_ns in others)


class Fate(Enum):
    """What became of a file that we have read a part of."""

    SAME = "same"
    GROWN = "grown"
    ANEW = "anew"


@dataclass(frozen=True, slots=True)
class Known:
    """How far a growing file was read, and by what it is recognised: digests of its head and of the bytes before."""

    identity: str
    offset: int
    head_bytes: int
    head: bytes
    mark: bytes

    def fate(self, seen: Seen, head: bytes, before: bytes) -> Fate:
        """`head`: the file's first `head_bytes` as they are now; `before`: up to MARK_BYTES in front of `offset`."""
        if seen.identity != self.identity or seen.size < self.offset:
            return Fate.ANEW
        if digest(head) != self.head or (self.mark and digest(before) != self.mark):
            return Fate.ANEW
        return Fate.GROWN if seen.size > self.offset else Fate.SAME


def digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:16]


def time_of(seen: Seen, wall_ns: int) -> int:
    """When a file's content was captured: its own time, unless its clock is ahead of ours or says nothing."""
    return seen.mtime_ns if 0 < seen.mtime_ns <= wall_ns + FUTURE_NS else wall_ns
