"""The two streams of one writer, scalars and bulk, with what waits for a device in front of each.

Bounded: beyond QUOTA_BYTES of what no daemon has taken yet, the oldest and least precious goes first.

The caller holds the client's lock. Must not know: values, sockets. On failure: the writers count what is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from verl_shipper_client.complaints import Complaints
from verl_shipper_client.held import Held, Unfinished
from verl_shipper_spool.header import BULK, StreamHeader, sibling
from verl_shipper_spool.record import RecordKind
from verl_shipper_spool.writer import StreamWriter

# Disk one training process may use for what no daemon has taken yet: days of metrics, an hour of heavy traces.
QUOTA_BYTES = 4 * 1024**3
METRICS_CLASS = "metrics"
_HEAVY_CLASS = {
    RecordKind.GENERATIONS: "generations",
    RecordKind.SPAN: "span",
    RecordKind.FILE: "file",
}
# What a quota drops first: oldest spans, then files and generations, metrics last.
_SHED_ORDER = ("span", "file", "generations", None)


class Streams:
    """Of one process and one run. Opens no file before the first record."""

    def __init__(self, folder: str, header: StreamHeader, complaints: Complaints) -> None:
        self.scalars = StreamWriter(folder, header, on_roll=self._keep_quota)
        self.bulk = StreamWriter(folder, sibling(header, BULK), on_roll=self._keep_quota)
        self.held = Held(functools.partial(self._append, self.scalars))
        self.bulk_held = Held(functools.partial(self._append, self.bulk))
        self._complaints = complaints

    @property
    def writers(self) -> tuple[StreamWriter, StreamWriter]:
        return self.scalars, self.bulk

    def put(self, kind: RecordKind, content: bytes | Unfinished) -> None:
        """Append a record to the stream it belongs to, or to what waits there."""
        record_class = _HEAVY_CLASS.get(kind)
        writer, held = (self.bulk, self.bulk_held) if record_class else (self.scalars, self.held)
        if held.queue or isinstance(content, Unfinished):
            held.add(content, record_class or METRICS_CLASS)
        else:
            self._append(writer, content, record_class or METRICS_CLASS)

    def each_held(self, act: Callable[[Held], bool]) -> bool:
        """Let both queues write what may go. True when nothing waits any more."""
        is_empty = act(self.held)
        return act(self.bulk_held) and is_empty

    def tell_loss(self, writer: StreamWriter) -> None:
        why = writer.last_error or writer.folder
        self._complaints.tell(f"records are being dropped and counted: {why}; free some space")

    def _append(self, writer: StreamWriter, payload: bytes, record_class: str) -> None:
        if not writer.append(payload, record_class):
            self.tell_loss(writer)

    def _keep_quota(self) -> None:
        """Called when a segment was begun: make room."""
        while sum(writer.sealed_bytes for writer in self.writers) > QUOTA_BYTES:
            if not any(
                writer.shed_oldest(record_class, "quota") for record_class in _SHED_ORDER for writer in self.writers
            ):
                return
