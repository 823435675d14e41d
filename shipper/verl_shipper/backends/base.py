"""The contract of a backend: what a lane asks, what a tracker's answer may mean.

A lane makes one Backend object per run and calls it from one thread at a time:

    open() ─ upload(batch) ─ upload(batch) ─ … ─ close()

`open` and `watermark` are called again, without a `close`, when the run gets streams that are new to the lane.

`upload` answers with one of four outcomes and raises nothing on purpose; an exception is a bug of the backend, counted
and retried like an outage.

    Delivered(remember)   the tracker itself said that it has every item of the batch
    Retry(reason, after_s) nothing is known or nothing was taken; send the very same batch again, not before after_s
    Reject(reason, items) the tracker will never take these items (None: one of the batch, it does not say which)
    Park(reason)          nobody's data is at fault: key refused, run deleted, quota. Keep all, retry slowly, be loud

The same batch may be uploaded again after any crash, byte for byte the same, so a backend must make a repeat harmless:
by the tracker's own keys, or by what it remembered. `remember` of Delivered and the lane's cursor are committed in one
transaction.

Must not know: spool, cursors, sampling, other backends.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

from verl_shipper.checks import Finding
from verl_shipper.schema import Key
from verl_shipper_spool.record import Record


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What identifies a run everywhere. `created_ns` is the wall time of its first stream."""

    run_id: str
    project: str
    experiment: str
    created_ns: int


@dataclass(frozen=True, slots=True)
class Item:
    """One record on its way. (`stream_id`, `ordinal`) is unique for ever; `rank` is the writer's; `payload` are the
    record's bytes as the spool has them."""

    stream_id: str
    ordinal: int
    rank: int
    record: Record
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Batch:
    """Items of one run, in order. `batch_id` stays the same over all attempts of the same bytes."""

    batch_id: str
    run: RunInfo
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Delivered:
    """The tracker has every item. `remember` is kept for the next batch of this run; `ignored` counts values (not
    records) that the tracker cannot show, by reason. What was remembered is found again by `memory.get(key)`."""

    remember: Mapping[str, Any] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Retry:
    """Try the same batch again, `after_s` seconds from now at the earliest (None: the lane's backoff decides).
    `progressed`: some of it was taken since the last attempt, and need not be sent again; the backoff begins anew."""

    reason: str
    after_s: float | None = None
    progressed: bool = False


@dataclass(frozen=True, slots=True)
class Reject:
    """The tracker refuses these items for good. `items` are indices into the batch, None when it does not say. The
    others may have been delivered already: they come again in a smaller batch, and a repeat must be harmless anyway.
    `reasons`: by index, where they differ."""

    reason: str
    items: Sequence[int] | None = None
    reasons: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Park:
    """The operator must act; `reason` says on what. The lane keeps the data and looks again slowly."""

    reason: str


Outcome: TypeAlias = Delivered | Retry | Reject | Park


@dataclass(frozen=True, slots=True)
class Decided:
    """Settings with all that is decided once, when the configuration is loaded; `notes` are lines for the operator."""

    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()


class Memory(Protocol):
    """Durable notes of one run at one backend, for facts that must survive before a batch is through (a run id at
    the tracker). `put` returns when the note is committed."""

    def get(self, key: str) -> Any: ...

    def put(self, key: str, value: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a tracker wants at once. A batch is closed by whichever comes first."""

    items_max: int = 1000
    bytes_max: int = 1024 * 1024
    age_s_max: float = 0.25  # how long a lonely record waits for company
    runs_at_once_max: int = 4  # uploads of different runs that may be under way together
    idle_s_max: float = 600.0  # a run without news gives its connections back
    # An upload that takes longer is hung, if nothing moves (Backend.busy_until_s): the lane's process is replaced.
    upload_s_max: float = 120.0


class Backend(abc.ABC):
    """One run at one tracker. Subclass, set `name`, implement four methods, add one line to the registry."""

    name: ClassVar[str]
    limits: ClassVar[Limits] = Limits()
    # Monotonic time. An upload under way is not hung before it, see `keep_busy`.
    busy_until_s: float = 0.0
    settings_known: ClassVar[tuple[str | Key, ...] | None] = None  # names, or all about them; None: not checked

    def __init__(self, run: RunInfo, settings: Mapping[str, Any], memory: Memory) -> None:
        """`settings` is the section `backends.<name>` of the configuration, already checked by `check`."""
        self.run = run
        self.settings = settings
        self.memory = memory

    def keep_busy(self, more_s: float) -> None:
        """The upload under way moves, and may go on for that much longer."""
        self.busy_until_s = time.monotonic() + more_s

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Names of the settings it declares."""
        return tuple(known if isinstance(known, str) else known.path for known in cls.settings_known or ())

    @classmethod  # noqa: B027 - most backends have nothing to check
    def check(cls, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError for settings that cannot work; called once when the daemon starts, touches no network."""

    @classmethod
    def decide(cls, settings: Mapping[str, Any]) -> Decided:
        """What the place and the environment that we were started in make of checked settings: for lanes and `doctor`
        alike, and the same over the life of a lane. Touches no network."""
        return Decided(settings)

    @classmethod
    def diagnose(cls, settings: Mapping[str, Any]) -> Iterator[Finding]:  # noqa: ARG003 - for those who have findings
        """What `verl-shipper doctor` says about this tracker as seen from here: way, certificate, key. Asked only when
        `check` had nothing to say; asks the tracker itself, a few seconds a step, and changes nothing there."""
        return iter(())

    @abc.abstractmethod
    def open(self) -> Outcome | None:
        """Make ready, find or create the run at the tracker. None when ready; Retry or Park when not yet."""

    @abc.abstractmethod
    def upload(self, batch: Batch) -> Outcome:
        """Send all items; return when the tracker has answered or the backend's own time limit is over."""

    @abc.abstractmethod
    def watermark(self) -> Mapping[str, int]:
        """What the tracker is known to hold: the next ordinal by stream id. Asked for streams that are new to the lane
        or whose state was lost, so that nothing is sent twice. Empty when repeats are harmless or it cannot tell."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what is held. Called once; promises nothing about delivery."""
