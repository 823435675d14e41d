"""One run at SwanLab as this process writes it: the lock, the child with the SDK, what the server has.

    CLOSED ─ open: lock, summary, settle ─▶ READY ─ start: child, init ─▶ WRITING
       ▲                                                                     │
       └── child gone, hung, given up; key refused; lock wanted; run over ◀──┘

The package of a run that was there leaves out every point that is not above what the summary shows of its key, and so
do we. A summary may lag behind, and requests of a dead child may still be on their way; therefore after anything but
a clean end two equal summaries `settle_s` apart are wanted before a new child may begin.

Must not know: batches, what a row means. On failure: RefusedError with an outcome; the child is thrown away then,
unless it is only the server that is down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.backends.base import Park, Retry
from verl_shipper.backends.sdk.child import Child, ChildError
from verl_shipper.backends.sdk.http import RefusedError
from verl_shipper.backends.sdk.parts import content_chars
from verl_shipper.backends.sdk.run_lock import Note, RunLock
from verl_shipper.backends.sdk.settle import settled
from verl_shipper.backends.swanlab_api import RunAddress, RunState, SwanlabApi
from verl_shipper.backends.swanlab_ledger import PARKS
from verl_shipper.backends.swanlab_points import Row

log = logging.getLogger(__name__)

LOCK_WAIT_S = 20.0
PAUSE_S = 0.05  # between two looks at the child while points are on their way
PAUSE_S_MAX = 1.0
CONFIRM_S = 60.0  # then the lane gets control back; the child keeps trying
DOWN_S = 3.0  # the same, when the server is known to be down
STALL_S = 90.0  # nothing was answered for so long, and nothing is wrong: the package has lost it
STALLS_MAX = 2  # children that lost the same points; a third would lose them, too
INIT_S = 60.0
CALL_S = 60.0
ROWS_PER_CALL = 200
POINTS_PER_CHILD = 2_000_000  # then it is replaced: what its memory holds goes with it
MEDIA_PER_CHILD_BYTES = 256 * 1024 * 1024
Point = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Wish:
    """How the run is to be written. `where` are arguments of swanlab.init."""

    address: RunAddress
    where: dict[str, Any]
    environment: dict[str, str]
    url: str
    folder: str
    lock_path: str
    settle_s: float
    ca_file: str = ""
    api_key: str = field(default="", repr=False)


@dataclass(slots=True)
class Sent:
    """Points under way: what the server must answer for and show before they are delivered."""

    points: dict[Point, int] = field(default_factory=dict)  # with the item they are of
    refused: dict[int, str] = field(default_factory=dict)  # reason by item
    seen_waiting: int = -1
    seen_s: float = 0.0  # when something was answered the last time


class SwanlabRun:
    """One run. Used by one thread at a time; `mutex` keeps the giving way of the lock out meanwhile."""

    def __init__(self, wish: Wish, api: SwanlabApi) -> None:
        self.mutex = threading.RLock()
        self.tops: dict[str, int] = {}  # the last step of every key at the server
        self.state_found = ""  # what the server called the run when we opened it
        self._wish = wish
        self._api = api
        self._lock: RunLock | None = None
        self._child: Child | None = None
        self._config: dict[str, Any] | None = None  # the child was started with it
        self._given: set[Point] = set()  # of the batch under way, to the child of now
        self._must_settle = False
        self._is_ready = False
        self._stalls = 0
        self._points_of_child = 0
        self._media_of_child_bytes = 0

    @property
    def is_writing(self) -> bool:
        return self._child is not None and self._child.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether it was opened and nothing has happened since."""
        return self._lock is not None and self._is_ready

    def open(self, *, tops_known: Mapping[str, int], is_clean: bool) -> None:
        """Become the only writer and learn the last steps. `tops_known`: those that the server once confirmed."""
        self._end_child()
        self._is_ready = False
        if self._lock is None:
            self._lock = RunLock.take(self._wish.lock_path, LOCK_WAIT_S)
            if self._lock is None:
                raise RefusedError(Retry("another daemon of this machine writes the run and does not give way"))
            self._lock.watch(self._give_way)
        found = self._api.run(self._wish.address)
        unclean = self._must_settle or not is_clean or not self._lock.read().is_clean
        if found is not None and (unclean or _behind(found.tops, tops_known)):
            found = self._settled(found)
        self.state_found = found.state if found else ""
        self.tops = dict(found.tops) if found else {}
        missing = _behind(self.tops, tops_known)
        if missing:
            shown, had = self.tops.get(missing[0]), tops_known[missing[0]]
            raise RefusedError(
                Park(f"SwanLab had {missing[0]} of {self._name} to step {had}, now to {shown}; was it deleted?")
            )
        self._must_settle = False
        self._is_ready = True

    def start(self, config: dict[str, Any], points: Iterable[Point] = ()) -> None:
        """Have a child with this configuration that can still be given these points."""
        worn = self._points_of_child > POINTS_PER_CHILD or self._media_of_child_bytes > MEDIA_PER_CHILD_BYTES
        # The package takes a point once only, even when the server did not.
        is_spoilt = not self._given.isdisjoint(points)
        if self.is_writing and self._config == config and not worn and not is_spoilt:
            return
        self._end_child()
        self._is_ready = False
        assert self._lock is not None, "not open"
        try:
            self._child = Child(
                "verl_shipper.backends.swanlab_child",
                folder=self._wish.folder,
                environment=self._wish.environment,
                keep_fds=[self._lock.fd],
            )
        except OSError as error:
            raise RefusedError(Retry(f"cannot start SwanLab's process: {error}")) from error
        self._write_note(is_clean=False)
        started = self._call(
            "init",
            INIT_S,
            where=self._wish.where,
            config=config,
            folder="",
            url=self._wish.url,
            ca_file=self._wish.ca_file,
            api_key=self._wish.api_key,
            settle_s=self._wish.settle_s,
        )
        self._config = config
        self._points_of_child = self._media_of_child_bytes = 0
        for key, step in started["tops"].items():
            self.tops[key] = max(step, self.tops.get(key, -1))

    def send(self, rows: Sequence[Row]) -> Sent:
        """Give rows to the child. They count as under way from here on."""
        self._must_settle = True
        self._given.update(point for row in rows for point in row.points())
        sent = Sent({point: row.item for row in rows for point in row.points()})
        for start in range(0, len(rows), ROWS_PER_CALL):
            part = rows[start : start + ROWS_PER_CALL]
            told = [[row.step, row.time_ns, row.scalars, media_of(row)] for row in part]
            answer = self._call("log", CALL_S + 2 * sum(len(row.media) for row in part), rows=told)
            if answer["refused"]:
                bad = part[answer["done"]]
                sent.refused[bad.item] = answer["refused"]
                unsent = {point for row in rows[start + answer["done"] :] for point in row.points()}
                sent.points = {point: item for point, item in sent.points.items() if point not in unsent}
                self._given -= unsent
                break
        self._points_of_child += len(sent.points)
        self._media_of_child_bytes += sum(content_chars(media.content) for row in rows for media in row.media)
        return sent

    def confirm(self, sent: Sent) -> bool:
        """Return when the server has answered for and shows what was sent; whether it refused the configuration.
        Raises RefusedError after CONFIRM_S; may be called again."""
        deadline_s = time.monotonic() + CONFIRM_S
        pause_s = PAUSE_S
        sent.seen_s = time.monotonic()
        while True:
            told = self._look_at_child(sent)
            if not told["waiting"] and told["config"] != "waiting":
                break
            if time.monotonic() > (deadline_s - CONFIRM_S + DOWN_S if told["trouble"] else deadline_s):
                on_way = Retry(f"{told['waiting']} points of {self._name} are on their way")
                raise RefusedError(_meaning(told["trouble"]) if told["trouble"] else on_way)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.3, PAUSE_S_MAX)
        wanted = _tops_of(sent)
        while _behind(self._api.tops(self._wish.address), wanted):
            if time.monotonic() > deadline_s:
                raise RefusedError(Retry(f"SwanLab does not show the last points of {self._name} yet"))
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.3, PAUSE_S_MAX)
        self.tops.update(wanted)
        self._stalls = 0
        self._must_settle = False
        self._given -= sent.points.keys()
        self._write_note(is_clean=True)
        return bool(told["config"] == "refused")

    def finish(self, exit_code: int) -> None:
        """End the run at SwanLab, and let go of it once the server has taken that."""
        try:
            self._call("finish", CALL_S, state="success" if exit_code == 0 else "crashed", error=f"exit {exit_code}")
            told = self._call("health", CALL_S, with_waiting=False)
        except RefusedError:
            self._must_settle = False  # everything else was confirmed before
            raise
        if not told["ended"]:
            self._end_child()
            silent = Retry(f"SwanLab did not take the end of {self._name}")
            raise RefusedError(_meaning(told["trouble"]) if told["trouble"] else silent)
        self.close(is_over=True)

    def close(self, *, is_over: bool = False) -> None:
        """Let go of the run; when it is over, of its lock file, too."""
        with self.mutex:
            self._end_child()
            if self._lock is not None:
                self._lock.release(forget=is_over)
                self._lock = None

    @property
    def _name(self) -> str:
        return f"run {self._wish.address.cuid}"

    def _write_note(self, *, is_clean: bool) -> None:
        assert self._lock is not None, "not open"
        self._lock.write(Note(len(self.tops), is_clean=is_clean))

    def _settled(self, found: RunState) -> RunState:
        """A summary that has stood still for `settle_s`. Raises RefusedError when it does not."""
        rested = settled(
            found, lambda: self._api.run(self._wish.address), lambda state: state.tops, self._wish.settle_s
        )
        if rested is not None:
            return rested
        raise RefusedError(Retry(f"the summary of {self._name} does not come to rest"))

    def _call(self, op: str, timeout_s: float, **arguments: Any) -> Any:
        if self._child is None:
            raise RefusedError(Retry("SwanLab's process is gone"))
        try:
            return self._child.call(op, timeout_s, **arguments)
        except ChildError as error:
            outcome = self._outcome(op, error)
            self._end_child()
            raise RefusedError(outcome) from error

    def _outcome(self, op: str, error: ChildError) -> Park | Retry:
        """What a failure means: the gateway knows more of it than the package says."""
        reason, trouble = f"SwanLab, {op}: {error.kind}: {error}", None
        if op != "health" and self._child is not None and self._child.is_alive:
            try:
                trouble = self._child.call("health", CALL_S, with_waiting=False)["trouble"]
            except ChildError as second:
                log.debug("no word of SwanLab's process: %s", second)
        return _meaning(trouble) if trouble else Retry(reason)

    def _look_at_child(self, sent: Sent) -> dict[str, Any]:
        """What the child tells. Raises when it will never bring what is missing, or must not go on now."""
        told: dict[str, Any] = self._call("health", CALL_S, with_waiting=False)
        for kind, key, step, reason in told["refused"]:
            item = sent.points.pop((kind, key, step), None)
            if item is not None:
                sent.refused.setdefault(item, reason)
        now_s = time.monotonic()
        trouble = told["trouble"]
        if told["waiting"] != sent.seen_waiting or trouble:
            sent.seen_waiting, sent.seen_s = told["waiting"], now_s
        outcome = _meaning(trouble) if trouble else None
        if isinstance(outcome, Park):
            self._end_child()
            raise RefusedError(outcome)
        if outcome is not None and outcome.after_s:
            raise RefusedError(outcome)  # nothing is sent before; the child waits, too
        return self._stalled(sent) if now_s - sent.seen_s > STALL_S else told

    def _stalled(self, sent: Sent) -> dict[str, Any]:
        """The package holds points back without a word: replace it. Points that it loses again are refused."""
        self._stalls += 1
        told: dict[str, Any] = self._call("health", CALL_S, with_waiting=True)
        self._end_child()
        if self._stalls < STALLS_MAX:
            raise RefusedError(Retry(f"SwanLab's package brings nothing of {self._name} any more; it is replaced"))
        for kind, key, step in told["points"]:
            item = sent.points.pop((kind, key, step), None)
            if item is not None:
                sent.refused.setdefault(item, "SwanLab's package does not send it")
        return {**told, "waiting": 0, "config": "taken"}

    def _give_way(self, lock: RunLock) -> None:
        """Another daemon wants the run: let it, while nothing of ours is under way."""
        with self.mutex:
            if self._lock is lock and not self._must_settle:
                self.close()

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None
            self._config = None
            self._given = set()


def _meaning(trouble: Mapping[str, Any]) -> Park | Retry:
    """What a trouble of the gateway's ledger means to the lane."""
    if trouble["kind"] in PARKS:
        return Park(str(trouble["reason"]))
    return Retry(str(trouble["reason"]), trouble["after_s"] or None)


def media_of(row: Row) -> list[list[Any]]:
    return [[media.key, media.kind, media.content] for media in row.media]


def _tops_of(sent: Sent) -> dict[str, int]:
    tops: dict[str, int] = {}
    for _, key, step in sent.points:
        tops[key] = max(step, tops.get(key, -1))
    return tops


def _behind(shown: Mapping[str, int], wanted: Mapping[str, int]) -> list[str]:
    """Keys of which less is shown than is wanted."""
    return [key for key, step in wanted.items() if shown.get(key, -1) < step]
