"""The taking side of a lane, for one run: cursors → frames → records → sampling → what goes into the outbox.

    read ahead ──▶ StreamSampler ──▶ (Reducer, when ranks become one value) ──▶ Taken, cursor

A stream is read ahead of its cursor as far as records wait for a verdict; the cursor stands before the first of them,
so that a restart reads those again and comes to the same verdicts. Cursors, samplers' states and items are committed
together (LaneStore.seal).

Must not know: uploads, outcomes. On failure: OSError of a stream's folder.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verl_shipper.backends.base import Item, Limits
from verl_shipper.lane_store import LaneStore, Taken
from verl_shipper.lane_stream import Found, Stream, record_of, remember
from verl_shipper.node_stream import RECLAIMED_NAME, SEALED_NAME
from verl_shipper.policy.answers import Decode
from verl_shipper.policy.reduce import ENDED, Reducer
from verl_shipper.policy.sampling import REDUCTIONS, Sampling
from verl_shipper.policy.stream_sampler import BY_RANK, Decision, StreamSampler, Writer
from verl_shipper.policy.tables import picked
from verl_shipper.policy.wishes import LOGGER, PROXY, effective, is_wanted, wishes_of
from verl_shipper.tokens import TokenizerError, load_decoder
from verl_shipper_spool.header import SCALARS
from verl_shipper_spool.reader import MISSING, Finding, Frame, Ledger
from verl_shipper_spool.record import Record, RecordKind, encode_record
from verl_shipper_spool.redact import REDACTED

log = logging.getLogger(__name__)

READ_BYTES_MIN = 64 * 1024
SCAN_MAX = 20_000  # records looked at in one go, whatever becomes of them: the lane has to beat
SCAN_BYTES_MAX = 32 * 1024 * 1024  # the same in bytes
LEARN_S = 30.0  # how long what needs a run's configuration waits for its first record
WISHES_NOTE = "lane.wishes"  # what runs ask for, by writer
RANKS_NOTE = "lane.ranks"
WRITERS_MAX = 64


@dataclass(frozen=True, slots=True)
class Order:
    """How a lane samples. `given`: an operator's values; `may_choose`: what runs may add; `backends`: all lanes here.
    `release_idle_s`: a stream silent for so long is taken as ended (None: never)."""

    backend: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    may_choose: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    release_idle_s: float | None = None


class Intake:
    """All streams of one run at one lane."""

    def __init__(self, run_id: str, order: Order, limits: Limits, store: LaneStore) -> None:
        self.streams: dict[str, Stream] = {}
        self._run_id = run_id
        self._order = order
        self._limits = limits
        self._store = store
        self._wishes: dict[str, Any] = store.get_note(run_id, WISHES_NOTE) or {}
        self._reducer: Reducer[Found] | None = None
        sampling = Sampling.of(order.given)
        if sampling.rank in REDUCTIONS:
            self._reducer = Reducer(sampling.rank, sampling.rank_timeout_s)
            self._reducer.restore(store.get_note(run_id, RANKS_NOTE) or [])
        self._now_s = 0.0
        self._scanned_bytes = 0
        self._turn = 0
        self._ranks: set[int] = set()
        self._told_ranks = False

    def add(self, stream: Stream) -> None:
        header = stream.header
        self.streams[header.stream_id] = stream
        self._ranks.add(header.rank)
        if header.rank == 0 and self._told_ranks:
            self._told_ranks = False
            self._store.trouble(self._run_id, "", parked=False, retried=False)
        if self._reducer is not None and header.stream_class == SCALARS:
            self._reducer.add(header.stream_id, header.rank, header.created_ns, header.world)

    def drop(self, name: str) -> None:
        if self.streams.pop(name, None) is not None and self._reducer is not None:
            self._reducer.forget(name)

    def is_refused(self) -> bool:
        """Whether the run does not want this backend: nothing of it is delivered, so it need not exist there."""
        self._learn()
        return bool(self._wishes) and not any(map(self._is_wanted, self._wishes.values()))

    def wished_settings(self) -> dict[str, str]:
        """Settings of the backend that the run asks for and may have. A proxy whose password was taken out on the way
        is of no use."""
        self._learn()
        said = [wishes[PROXY] for wishes in self._wishes.values() if PROXY in wishes]
        proxy = said[-1] if said and PROXY in self._order.may_choose else ""
        return {PROXY: proxy} if proxy and REDACTED not in proxy else {}

    def waiting_bytes(self, now_s: float) -> int:
        """Bytes that nobody has looked at, and one for whatever else wants a look."""
        self._now_s = now_s
        waiting = 0
        for stream in self.streams.values():
            if not stream.exhausted:
                with contextlib.suppress(OSError):
                    fresh = max(stream.reader.end_offset() - stream.ahead, 0)
                    stream.grown_s = now_s if fresh or not stream.grown_s else stream.grown_s
                    waiting += fresh
            if stream.sampler is not None and stream.sampler.waits and self._is_over(stream, now_s):
                waiting += 1
        return waiting + int(self._reducer is not None and self._reducer.waits)

    def take(self, now_s: float) -> Taken:
        """The next records of all streams, up to the limits."""
        taken = Taken()
        self._scanned_bytes = 0
        self._learn()
        # Scalars first; among equals the one that was not read for longest: a fast writer must not starve the others.
        for stream in sorted(self.streams.values(), key=lambda each: (each.header.stream_class != SCALARS, each.turn)):
            if self.is_full(taken):
                break
            self._turn += 1
            stream.turn = self._turn
            self._read(stream, taken, now_s)
        if self._reducer is not None:
            self._reduce(self._reducer, taken, now_s)
        for stream in self.streams.values():
            if stream.moved:
                stream.moved = False
                taken.cursors.append(stream.cursor)
                if stream.sampler is not None:
                    taken.samplers[stream.cursor.stream_id] = self._state_at_cursor(stream, stream.sampler)
        return taken

    def _state_at_cursor(self, stream: Stream, sampler: StreamSampler[Found]) -> Mapping[str, Any]:
        """A sampler is ahead of the cursor where its decisions wait for other ranks."""
        first = self._reducer.first(stream.header.stream_id) if self._reducer is not None else None
        return sampler.state() if first is None or first.before is None else first.before

    def is_full(self, taken: Taken) -> bool:
        limits = self._limits
        is_large = len(taken.items) >= limits.items_max or taken.size_bytes >= limits.bytes_max
        return is_large or taken.scanned >= SCAN_MAX or self._scanned_bytes >= SCAN_BYTES_MAX

    def _read(self, stream: Stream, taken: Taken, now_s: float) -> None:
        """Look at the next records of one stream, and take those that are decided."""
        final = os.path.exists(os.path.join(stream.reader.folder, SEALED_NAME))
        while stream.is_learned and not (self.is_full(taken) or stream.exhausted or self._is_ahead(stream)):
            room = max(self._limits.bytes_max - taken.size_bytes, READ_BYTES_MIN)
            found, _ = stream.reader.read(stream.ahead, bytes_max=room, final=final)
            stream.exhausted = final and not found
            if not found:
                break
            for finding in found:
                self._look(stream, finding, taken)
                if self.is_full(taken) or self._is_ahead(stream):
                    break
        sampler = stream.sampler
        if sampler is not None and sampler.waits and self._is_over(stream, now_s):
            sampler.end()
            self._drain(stream, sampler, taken)

    def _is_over(self, stream: Stream, now_s: float) -> bool:
        """Whether nothing more comes of a stream, as far as anybody can tell."""
        if stream.exhausted:
            return True
        idle_s = self._order.release_idle_s
        is_idle = idle_s is not None and now_s - stream.grown_s >= idle_s
        with contextlib.suppress(OSError):
            is_done = is_idle or os.path.exists(os.path.join(stream.reader.folder, SEALED_NAME))
            return is_done and stream.ahead >= stream.reader.end_offset()
        return False

    def _is_ahead(self, stream: Stream) -> bool:
        reducer = self._reducer
        return reducer is not None and reducer.is_ahead(stream.header.stream_id)

    def _look(self, stream: Stream, finding: Finding, taken: Taken) -> None:
        """Take one finding into account; what is a record goes on to sampling, if there is any."""
        if not stream.is_judged:
            self._judge(stream)
        start, ledger = stream.ahead, stream.ledger
        stream.ahead = finding.end
        taken.scanned += 1
        self._scanned_bytes += finding.end - start if isinstance(finding, Frame) else 0
        reclaimed = _begins_late(stream, finding)
        is_new = ledger.account(finding)
        record = record_of(finding) if is_new else None
        if record is not None and record.kind is RecordKind.RUN_FINISH:
            stream.ended = True
        sampler = stream.sampler
        if sampler is None:
            stream.moved = True
            stream.cursor.offset = finding.end
            if reclaimed:
                taken.already += _name_reclaimed(ledger, stream, finding)
            if is_new:
                self._take(stream, finding, record, taken)
            return
        if reclaimed:
            _name_reclaimed(ledger, stream, finding)
        found = Found(finding, start, reclaimed, record)
        sampler.offer(found, record, finding.end - start if record is not None else 0)
        self._drain(stream, sampler, taken)
        if record is not None and record.kind is RecordKind.GENERATIONS and sampler.waits:
            found.put_aside()

    def _drain(self, stream: Stream, sampler: StreamSampler[Found], taken: Taken) -> None:
        reducer = self._reducer if stream.header.stream_class == SCALARS else None
        for decision in sampler.decided():
            if reducer is None:
                self._commit(stream, decision, taken)
            else:
                reducer.offer(stream.header.stream_id, decision)

    def _reduce(self, reducer: Reducer[Found], taken: Taken, now_s: float) -> None:
        progress: dict[str, float | None] = {}
        for name, stream in self.streams.items():
            newest = stream.sampler.newest if stream.sampler is not None else None
            progress[name] = ENDED if stream.ended or self._is_over(stream, now_s) else newest
        settled = reducer.settled
        for name, decision in reducer.decided(progress, now_s, time.time_ns()):
            self._commit(self.streams[name], decision, taken)
        if reducer.settled != settled:
            taken.notes[RANKS_NOTE] = reducer.state()

    def _commit(self, stream: Stream, decision: Decision[Found], taken: Taken) -> None:
        """A finding is decided: the cursor moves behind it, and its record goes where the verdict says."""
        found, cursor = decision.tag, stream.cursor
        finding = found.finding
        stream.moved = True
        cursor.offset = finding.end
        is_new = cursor.ledger.account(finding)
        if found.reclaimed:
            taken.already += _name_reclaimed(cursor.ledger, stream, finding)
        if not is_new:
            return
        if decision.why:
            taken.sampled[decision.why] = taken.sampled.get(decision.why, 0) + 1
            self._tell_missing_rank(decision)
            return
        record = _picked(stream, decision) if decision.rows else decision.record
        is_same = record is found.record
        self._take(stream, finding, record, taken, is_same=is_same, thinned=decision.thinned)

    def _take(
        self,
        stream: Stream,
        finding: Finding,
        record: Record | None,
        taken: Taken,
        *,
        is_same: bool = True,
        thinned: int = 0,
    ) -> None:
        """A record is to be delivered, as it stands in the stream or not. None: it cannot be read."""
        assert isinstance(finding, Frame), "records come in frames"
        if record is None:
            log.warning("%s: record %d cannot be read", stream.reader.folder, finding.ordinal)
            taken.unreadable += 1
        elif finding.ordinal < stream.already:
            taken.already += 1
        else:
            payload = finding.payload if is_same and finding.payload else encode_record(record)
            taken.items.append(Item(stream.cursor.stream_id, finding.ordinal, stream.header.rank, record, payload))
            taken.size_bytes += len(payload)
            taken.thinned += thinned

    def _learn(self) -> None:
        """What a run asks for stands in its first record; it counts for all its streams, whatever is read first."""
        unknown: set[str] = set()
        for stream in self.streams.values():
            if stream.is_learned or stream.header.stream_class != SCALARS:
                continue
            stream.known_s = stream.known_s or self._now_s
            stream.is_learned = stream.cursor.offset > 0
            if not stream.is_learned:
                self._learn_from(stream)
            if not stream.is_learned and self._now_s - stream.known_s < LEARN_S:
                unknown.add(stream.header.writer_id)
        for stream in self.streams.values():
            if stream.header.stream_class != SCALARS:
                stream.is_learned = stream.is_judged or stream.header.writer_id not in unknown

    def _learn_from(self, stream: Stream) -> None:
        final = os.path.exists(os.path.join(stream.reader.folder, SEALED_NAME))
        found, _ = stream.reader.read(0, bytes_max=READ_BYTES_MIN, final=final)
        stream.is_learned = bool(found) or final
        record = next((record for record in map(record_of, found) if record is not None), None)
        wishes = wishes_of(record.body.get("config")) if record and record.kind is RecordKind.RUN_START else {}
        if wishes:
            self._wishes = {**self._wishes, stream.header.writer_id: wishes}
            while len(self._wishes) > WRITERS_MAX:
                del self._wishes[next(iter(self._wishes))]
            self._store.put_note(self._run_id, WISHES_NOTE, self._wishes)

    def _judge(self, stream: Stream) -> None:
        """Set up the sampling of a stream whose first record is there."""
        stream.is_judged = True
        order = self._order
        newest: dict[str, Any] = next(reversed(self._wishes.values()), {})
        wishes = self._wishes.get(stream.header.writer_id, newest)
        writer = Writer(stream.header.rank, stream.header.world)
        sampling = Sampling.of(effective(order.given, wishes, order.may_choose, order.backend, order.backends))
        is_scalars = stream.header.stream_class == SCALARS
        if not self._is_wanted(wishes):
            stream.sampler = StreamSampler(sampling, writer, refuse=LOGGER)
        elif not StreamSampler.is_trivial(sampling, writer, is_scalars=is_scalars):
            stream.sampler = StreamSampler(sampling, writer, decode=None if is_scalars else self._decoder(sampling))
        if stream.sampler is not None:
            # What is read ahead and what is decided are two places from now on.
            stream.ledger = copy.deepcopy(stream.ledger)
            stream.sampler.restore(self._store.sampler_state(stream.cursor.stream_id))
            if stream.sampler.looks_back and stream.cursor.offset:
                remember(stream, stream.sampler)

    def _decoder(self, sampling: Sampling) -> Decode | None:
        """What turns token ids into text, if that is wanted and can be done; else ids stay ids, and it is told why."""
        traces = sampling.traces
        if not (traces.enabled and traces.token2text):
            return None
        try:
            return load_decoder(traces.tokenizer)
        except TokenizerError as error:
            self._store.trouble(self._run_id, f"token2text: {error}; ids stay ids", parked=False, retried=False)
            return None

    def _is_wanted(self, wishes: Mapping[str, Any]) -> bool:
        return is_wanted(wishes, self._order.may_choose, self._order.backend)

    def _tell_missing_rank(self, decision: Decision[Found]) -> None:
        if decision.why != BY_RANK or self._reducer is not None or self._told_ranks:
            return
        if 0 not in self._ranks:
            self._told_ranks = True
            ranks = ", ".join(map(str, sorted(self._ranks)))
            why = f"metrics of ranks {ranks} only, and of rank 0 none: nothing is shown; set sampling.rank to all"
            self._store.trouble(self._run_id, why, parked=False, retried=False)


def _begins_late(stream: Stream, finding: Finding) -> bool:
    """Whether this is the first frame of a stream whose beginning was reclaimed before this lane's state began."""
    return (
        isinstance(finding, Frame)
        and stream.ledger.ordinal == 0 < finding.ordinal
        and os.path.exists(os.path.join(stream.reader.folder, RECLAIMED_NAME))
    )


def _name_reclaimed(ledger: Ledger, stream: Stream, first: Finding) -> int:
    """Records that were reclaimed: delivered if the tracker says so, else told as such. Returns how many it has."""
    there = isinstance(first, Frame) and first.ordinal <= stream.already
    missing = ledger.move(MISSING, None if there else "reclaimed", ledger.dropped.get(MISSING, 0))
    return missing if there else 0


def _picked(stream: Stream, decision: Decision[Found]) -> Record | None:
    """The chosen rows of a part of a table, which was put aside meanwhile. None when it cannot be read any more."""
    record, finding = decision.tag.record, decision.tag.finding
    if record is None:
        start = decision.tag.start
        found, _ = stream.reader.read(start, bytes_max=finding.end - start)
        record = record_of(found[0]) if found and found[0].end == finding.end else None
    if record is None:
        return None
    return replace(record, body=picked(record.body, decision.rows, decision.part, decision.parts))
