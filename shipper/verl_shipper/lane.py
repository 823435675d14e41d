"""A lane: one backend's road through the node spool. The only file that knows the order of the stages.

    cursor → decode → sampling → batch → OUTBOX (durable) → upload → outcome → commit
    (the first three: lane_intake.py)

Each run has its own batch in flight, backoff and park, so one broken run delays no other. Uploads run in threads, at
most `runs_at_once_max` together; everything else happens in the lane's one loop. When a lane's state was lost it asks
the backend for its watermark and counts what is already there as delivered, without sending it again.

Must not know: sockets, other lanes, SQLite. On failure of an upload: retried for ever with backoff; on a hung upload
the process ends itself (HungUploadError) and is started again by the supervisor.
"""

from __future__ import annotations

import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from verl_shipper.backends.base import Backend, Batch, Delivered, Outcome, Park, Reject, Retry, RunInfo
from verl_shipper.lane_intake import Intake, Order
from verl_shipper.lane_run import LOOK_S_MAX, LOOK_S_MIN, RunLane, StoreMemory, close_backend, outcome_of
from verl_shipper.lane_store import Cursor, LaneStore, Sealed, Taken
from verl_shipper.lane_stream import Stream
from verl_shipper.policy.backoff import PARK_S, delay_s, wish_s
from verl_shipper.policy.delivery import TRANSITIONS, Step, halves
from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.header import read_header
from verl_shipper_spool.location import UNNAMED
from verl_shipper_spool.reader import StreamReader

log = logging.getLogger(__name__)

DISCOVER_S = 0.5  # how often the node spool is listed for new streams
RUN_NOTE = "lane.run"  # what a run is called, kept for when its streams are gone
HANGS_NOTE = "lane.hangs"
HANG_PAUSE_S = 10.0  # × the number of hangs in a row: how long a run that hung waits after the lane's restart
READ_BYTES_MIN = 64 * 1024
REFUSALS_MAX = 20  # records found by halving in a row, none taken between: then slowly, one in PARK_S


class HungUploadError(Exception):
    """An upload did not come back within the backend's own limit."""


class Lane:
    """Drives all runs of one backend. `tick` is called in a loop by the lane's process."""

    def __init__(
        self,
        backend_class: type[Backend],
        settings: Mapping[str, Any],
        spool_dir: str,
        store: LaneStore,
        order: Order | None = None,
        unnamed: tuple[str, str] = (UNNAMED, UNNAMED),
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`order`: how to sample. `unnamed`: project and experiment of runs without. `jitter`: draws for backoff."""
        self.runs: dict[str, RunLane] = {}
        self._backend_class = backend_class
        self._limits = backend_class.limits
        self._settings = settings
        self._unnamed = unnamed
        self._order = order or Order(backend_class.name)
        self._spool_dir = spool_dir
        self._store = store
        self._jitter = jitter
        self._cursors = store.cursors()
        self._known: set[str] = set()
        self._now_s = self._discover_s = 0.0
        self._paused_until_s = 0.0  # the tracker asked everybody to wait
        self._pool = ThreadPoolExecutor(self._limits.runs_at_once_max, thread_name_prefix="upload")

    def tick(self, now_s: float) -> bool:
        """One round. True when something was under way, so that the next round should come soon."""
        self._now_s = now_s
        if now_s >= self._discover_s:
            self._discover_s = now_s + DISCOVER_S
            self._discover()
            for run_id in self._store.answer_operator():
                if run_id in self.runs:
                    self.runs[run_id].has_outbox = True
        moved = False
        for run in self.runs.values():
            if run.future is not None:
                moved = self._collect(run, now_s) or moved
        idle = [run for run in self.runs.values() if run.future is None]
        for run in sorted(idle, key=lambda each: each.started_s):  # who has had to wait longest for a place comes first
            if now_s >= max(run.due_s, self._paused_until_s):
                moved = self._advance(run, now_s) or moved
        return moved

    @property
    def uploading(self) -> int:
        return sum(run.future is not None for run in self.runs.values())

    def close(self, timeout_s: float) -> None:
        """Let uploads under way come back, for at most `timeout_s`; what does not stays in the outbox."""
        wait([run.future for run in self.runs.values() if run.future is not None], timeout_s)
        for run in self.runs.values():
            if run.future is not None and run.future.done():
                self._collect(run, time.monotonic())
            if run.future is None:
                close_backend(run)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _discover(self) -> None:
        try:
            names = os.listdir(self._spool_dir)
        except FileNotFoundError:
            return
        for name in names:
            if name not in self._known:
                self._add_stream(name)
        for name in self._known.difference(names):
            self._drop_stream(name)
        for run_id in self._store.sealed_runs() - self.runs.keys():
            self._revive(run_id)
        for run_id in [run_id for run_id, run in self.runs.items() if self._is_over(run)]:
            close_backend(self.runs.pop(run_id))

    def _is_over(self, run: RunLane) -> bool:
        return not run.intake.streams and run.future is None and not run.has_outbox

    def _revive(self, run_id: str) -> None:
        """A run whose streams are reclaimed has work again: a dead letter is to be sent once more."""
        note = self._store.get_note(run_id, RUN_NOTE)
        if note is not None:
            self.runs[run_id] = self._new_run(RunInfo(run_id, *note))

    def _new_run(self, info: RunInfo) -> RunLane:
        settings = dict(self._settings)
        backend = self._backend_class(info, settings, StoreMemory(self._store, info.run_id))
        run = RunLane(info, backend, settings, Intake(info.run_id, self._order, self._limits, self._store))
        run.hangs = self._store.get_note(info.run_id, HANGS_NOTE) or 0
        if run.hangs:
            run.due_s = self._now_s + HANG_PAUSE_S * min(run.hangs, 10)
        return run

    def _add_stream(self, name: str) -> None:
        folder = os.path.join(self._spool_dir, name)
        try:
            header = read_header(folder)
        except (OSError, CorruptionError):
            return  # in the making; the next look sees it
        self._known.add(name)
        if header.stream_id != name:
            log.warning("%s holds another stream, %s; it is not delivered from there", folder, header.stream_id)
            return
        run = self.runs.get(header.run_id)
        if run is None:
            project, experiment = header.project or self._unnamed[0], header.experiment or self._unnamed[1]
            # When a run began must not depend on which of its streams a lane finds first after a restart.
            note = self._store.get_note(header.run_id, RUN_NOTE)
            created_ns = header.created_ns if note is None else int(note[2])
            info = RunInfo(header.run_id, project, experiment, created_ns)
            if note is None:
                self._store.put_note(info.run_id, RUN_NOTE, [info.project, info.experiment, info.created_ns])
            run = self.runs[header.run_id] = self._new_run(info)
        cursor = self._cursors.get(name)
        if cursor is None:
            cursor = self._cursors[name] = Cursor(name, header.run_id)
            # New to this lane, or its state was lost: the backend says what is already there.
            run.must_ask = True
        run.intake.add(Stream(header, StreamReader(folder), cursor))
        run.look_s = 0.0

    def _drop_stream(self, name: str) -> None:
        self._known.discard(name)
        for run in self.runs.values():
            run.intake.drop(name)

    def _advance(self, run: RunLane, now_s: float) -> bool:
        """Start the next upload of a run, if there is anything to send and room for it."""
        if self.uploading >= self._limits.runs_at_once_max:
            return False
        sealed = self._store.first_sealed(run.run.run_id) if run.has_outbox else None
        run.has_outbox = sealed is not None
        if sealed is None and not self._has_news(run, now_s):
            if now_s - run.active_s > self._limits.idle_s_max:
                close_backend(run)
            return False
        is_ready = (run.opened and not run.must_ask) or (sealed is None and run.intake.is_refused())
        if sealed is None and is_ready:
            taken = run.intake.take(now_s)
            sealed = self._seal(run, taken, now_s)
            if sealed is None:
                return bool(taken.scanned)
        run.sealed = sealed if is_ready else None
        run.delivery = TRANSITIONS[run.delivery, Step.SEND]
        run.started_s = run.active_s = now_s
        if run.sealed is None:
            for key, value in run.intake.wished_settings().items():
                if key in self._backend_class.setting_names():
                    run.settings.setdefault(key, value)
            run.future = self._pool.submit(self._open, run)
        else:
            batch = Batch(run.sealed.batch_id, run.run, run.sealed.items)
            run.future = self._pool.submit(run.backend.upload, batch)
        return True

    def _has_news(self, run: RunLane, now_s: float) -> bool:
        """Whether enough, or old enough, bytes wait behind the cursors. Quiet runs are looked at less often."""
        if now_s < run.look_s:
            return False
        waiting = run.intake.waiting_bytes(now_s)
        if not waiting:
            run.news_at_s = None
            run.look_pause_s = min(run.look_pause_s * 1.5, LOOK_S_MAX)
            run.look_s = now_s + run.look_pause_s
            return False
        run.look_pause_s = LOOK_S_MIN
        if run.news_at_s is None:
            run.news_at_s = now_s
        return waiting >= self._limits.bytes_max or now_s - run.news_at_s >= self._limits.age_s_max

    def _open(self, run: RunLane) -> Outcome:
        """In a thread: make the backend ready, and learn what it already has of streams new to us."""
        outcome = run.backend.open()
        if outcome is not None and not isinstance(outcome, Delivered):
            return outcome
        run.opened = True
        run.must_ask = False  # before we look: a stream that comes meanwhile asks again
        fresh = [stream for stream in list(run.intake.streams.values()) if stream.cursor.offset == 0]
        try:
            watermark = run.backend.watermark() if fresh else {}
        except BaseException:
            run.must_ask = True
            raise
        for stream in fresh:
            stream.already = watermark.get(stream.cursor.stream_id, 0)
        return Delivered()

    def _seal(self, run: RunLane, taken: Taken, now_s: float) -> Sealed | None:
        """What was taken goes into the outbox, durably; returns the batch that is to be sent."""
        sealed = self._store.seal(run.run.run_id, uuid.uuid4().hex, taken)
        run.has_outbox = bool(taken.items)
        if run.intake.is_full(taken):
            run.news_at_s = now_s - self._limits.age_s_max
        elif taken.items:
            run.news_at_s = None
        elif not taken.cursors and not taken.scanned:
            run.look_s = now_s + LOOK_S_MAX  # only bytes of an unfinished frame: look again later
        return sealed

    def _collect(self, run: RunLane, now_s: float) -> bool:
        """Take the result of an upload, if it is there."""
        future = run.future
        assert future is not None, "nothing under way"
        if not future.done():
            if now_s > max(run.started_s + self._limits.upload_s_max, run.backend.busy_until_s):
                self._tell_hang(run)
            return False
        run.future = None
        run.active_s = now_s
        self._settle(run, outcome_of(run, future), now_s)
        return True

    def _tell_hang(self, run: RunLane) -> None:
        """End the lane, whose thread is lost, and remember whom to let wait after the restart: all places at the
        tracker taken by runs that hang would be none for the others."""
        why = f"an upload hangs for {self._limits.upload_s_max:g} s"
        self._store.trouble(run.run.run_id, why, parked=False)
        self._store.put_note(run.run.run_id, HANGS_NOTE, run.hangs + 1)
        raise HungUploadError(f"run {run.run.run_id}: {why}")

    def _settle(self, run: RunLane, outcome: Outcome, now_s: float) -> None:
        """Commit what an outcome means. Without a sealed batch it was the backend's opening that ended."""
        sealed = run.sealed
        match outcome:
            case Delivered(remember, ignored):
                run.delivery = TRANSITIONS[run.delivery, Step.DELIVERED]
                run.attempt = 0
                run.refusals = run.refusals if sealed is None else 0
                if sealed is not None:
                    notes = {**remember, HANGS_NOTE: 0} if run.hangs else remember
                    self._store.delivered(sealed, len(sealed.items), notes, ignored)
                    run.hangs = 0
            case Reject(reason) as refusal if sealed is not None:
                run.delivery = TRANSITIONS[run.delivery, Step.REJECTED]
                before = run.refusals
                self._reject(run, sealed, refusal)
                if run.refusals > max(before, REFUSALS_MAX):
                    run.due_s = now_s + PARK_S
                    why = f"{run.refusals} records refused in a row and none taken, is it the right tracker? {reason}"
                    self._store.trouble(run.run.run_id, why, parked=True)
            case Retry(reason, after_s, progressed):
                run.delivery = TRANSITIONS[run.delivery, Step.RETRY]
                run.attempt = 1 if progressed else run.attempt + 1
                run.due_s = now_s + delay_s(run.attempt, self._jitter(), after_s)
                self._paused_until_s = max(self._paused_until_s, now_s + wish_s(after_s))
                self._store.trouble(run.run.run_id, reason, parked=False)
            case Park(reason) | Reject(reason):
                run.delivery = TRANSITIONS[run.delivery, Step.PARK]
                run.due_s = now_s + PARK_S
                self._store.trouble(run.run.run_id, reason, parked=True)
                if not run.attempt:
                    log.warning("run %s is parked: %s", run.run.run_id, reason)
                run.attempt += 1

    def _reject(self, run: RunLane, sealed: Sealed, refusal: Reject) -> None:
        """Bury the items the tracker named, or halve the batch until only the poison is left."""
        run.attempt = 0
        named = [index for index in refusal.items or () if 0 <= index < len(sealed.items)]
        if named or len(sealed.items) == 1:
            self._store.bury(sealed, {index: refusal.reasons.get(index, refusal.reason) for index in named or [0]})
            # A tracker that says which ones has looked at them; one that only says no may refuse everything.
            run.refusals += 0 if named else 1
        else:
            self._store.split(sealed, [[sealed.items[index] for index in half] for half in halves(len(sealed.items))])
        self._store.trouble(run.run.run_id, refusal.reason, parked=False, retried=False)
