"""Ingest: the one way into the node spool, for the socket and for adopted folders alike.

    greet(header) → durable offset        make the stream known
    take(stream, offset, bytes, gap)      append what is new
    settle() → streams now durable        one fsync per stream for all that came since the last time (grouped)

The state table `streams` remembers every stream ever taken, also after its bytes were reclaimed, so that a folder
that is brought again brings nothing new. Rebuilt from the node spool when lost.

Must not know: ZeroMQ, lanes. On failure: IngestRefused with a reason a client can be told; other streams go on.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from verl_shipper.node_stream import NodeStream
from verl_shipper.store import open_store
from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.frame import Walker
from verl_shipper_spool.header import HEADER_NAME, StreamHeader, decode_header, encode_header
from verl_shipper_spool.record import Loss

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS streams (
    stream_id    TEXT PRIMARY KEY,
    run_id       TEXT NOT NULL,
    header       BLOB NOT NULL,
    durable      INTEGER NOT NULL,     -- bytes below are fsynced
    ordinal_next INTEGER NOT NULL,     -- records logged so far, the lost ones too
    state        TEXT NOT NULL         -- open | sealed | reclaimed
);
CREATE INDEX IF NOT EXISTS streams_by_run ON streams (run_id);
CREATE TABLE IF NOT EXISTS notes (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class IngestRefusedError(Exception):
    """The bytes cannot be taken now; the client keeps them and asks again."""


@dataclass(slots=True)
class Ingest:
    """Owner of the node spool. `quota_bytes` bounds it; beyond, writers keep their bytes."""

    state_dir: str
    quota_bytes: int
    streams: dict[str, NodeStream] = field(default_factory=dict)
    size_bytes: int = 0
    taken_bytes: int = 0
    _store: sqlite3.Connection | None = None
    _heard_at_s: dict[str, float] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)

    @property
    def spool_dir(self) -> str:
        return os.path.join(self.state_dir, "spool")

    @property
    def store(self) -> sqlite3.Connection:
        assert self._store is not None, "open() comes first"
        return self._store

    def open(self) -> None:
        """Recover the node spool and its table."""
        os.makedirs(self.spool_dir, 0o700, exist_ok=True)
        self._store = open_store(os.path.join(self.state_dir, "daemon.sqlite3"), SCHEMA)
        for name in sorted(os.listdir(self.spool_dir)):
            folder = os.path.join(self.spool_dir, name)
            if self._reclaimed(name) is None and os.path.isdir(folder):
                self._recover(name, folder)
        self._save(self.streams.values())

    def greet(self, header: StreamHeader) -> int:
        """Make a stream known; returns the offset below which everything is durable here."""
        stream = self.streams.get(header.stream_id)
        if stream is None:
            delivered = self._reclaimed(header.stream_id)
            if delivered is not None:
                return delivered
            stream = NodeStream(header, os.path.join(self.spool_dir, header.stream_id))
            try:
                stream.create()
            except OSError as error:
                raise IngestRefusedError(f"node spool: {error.strerror or error}") from error
            self.streams[header.stream_id] = stream
            self._save([stream])
        return stream.durable

    def known(self, stream_id: str) -> bool:
        return stream_id in self.streams or self._reclaimed(stream_id) is not None

    def take(self, stream_id: str, offset: int, content: bytes, *, gap: bool = False) -> bool:
        """Append bytes of a known stream. False when something is missing in front of them."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return True  # reclaimed: delivered long ago
        if self.size_bytes + len(content) > self.quota_bytes:
            raise IngestRefusedError(f"node spool is full ({self.quota_bytes} bytes); a tracker is behind, see status")
        before = stream.end
        try:
            accepted = stream.append(offset, content, gap=gap)
        except OSError as error:
            raise IngestRefusedError(f"node spool: {error.strerror or error}") from error
        if stream.end > before:
            grown = min(stream.end - before, len(content))
            self.size_bytes += grown
            self.taken_bytes += grown
            self._changed.add(stream_id)
        return accepted

    def hear(self, stream_id: str, now_s: float) -> None:
        """The stream's own sender spoke."""
        self._heard_at_s[stream_id] = now_s

    def heard_at_s(self, stream_id: str) -> float:
        """When the stream's own sender spoke last; far in the past when never."""
        return self._heard_at_s.get(stream_id, float("-inf"))

    def durable(self, stream_id: str) -> int:
        """Offset below which everything is safe here; 0 for a stream nobody knows."""
        stream = self.streams.get(stream_id)
        return stream.durable if stream else self._reclaimed(stream_id) or 0

    def end(self, stream_id: str) -> int:
        """Offset behind the last byte taken, durable or not."""
        stream = self.streams.get(stream_id)
        return stream.end if stream else self._reclaimed(stream_id) or 0

    def pending(self, stream_id: str) -> int:
        """Bytes at the end of our copy that belong to a frame not yet complete."""
        stream = self.streams.get(stream_id)
        return stream.walker.pending if stream else 0

    @property
    def unsettled(self) -> bool:
        return bool(self._changed)

    def settle(self) -> list[NodeStream]:
        """fsync everything that changed; the streams returned may be acknowledged up to `durable`."""
        settled = []
        for stream_id in sorted(self._changed):
            stream = self.streams[stream_id]
            try:
                stream.sync()
            except OSError as error:
                # After a failed fsync the page cache can not be trusted: begin a new file from what is known durable.
                log.warning("%s: fsync failed (%s); its bytes are asked for again", stream.folder, error.strerror)
                self._distrust(stream)
                continue
            settled.append(stream)
        self._changed.clear()
        self._save(settled)
        return settled

    def seal(self, stream_id: str, losses: list[Loss]) -> None:
        """The writer is gone for good and everything it left was taken."""
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.sealed:
            before = stream.end
            stream.seal(losses)
            self.size_bytes += stream.end - before
            self._save([stream])

    def reclaim(self, safe: dict[str, int]) -> int:
        """Free what every lane has behind it. `safe`: stream id → offset. Returns bytes freed."""
        freed = 0
        for stream_id, offset in safe.items():
            stream = self.streams.get(stream_id)
            if stream is None:
                continue
            freed += stream.reclaim(min(offset, stream.durable))
            if stream.sealed and offset >= stream.end:
                self._forget(stream)
        self.size_bytes = max(self.size_bytes - freed, 0)
        return freed

    def write_notes(self, notes: Mapping[str, str]) -> None:
        """Keep lines for `status`, by key."""
        self.store.execute("BEGIN IMMEDIATE")
        self.store.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?)", notes.items())
        self.store.execute("COMMIT")

    def close(self) -> None:
        self.settle()
        for stream in self.streams.values():
            stream.close()
        self.store.close()

    def _recover(self, name: str, folder: str) -> None:
        row = self.store.execute("SELECT header, ordinal_next FROM streams WHERE stream_id = ?", (name,)).fetchone()
        try:
            with open(os.path.join(folder, HEADER_NAME), "rb") as file:
                header = decode_header(file.read())
        except (OSError, CorruptionError) as error:
            if row is None:
                log.warning("%s: no usable header (%s); kept, not delivered", folder, error)
                return
            header = decode_header(row[0])
            NodeStream(header, folder).create()
        stream = NodeStream(header, folder)
        stream.recover()
        if row is not None and stream.walker.at_boundary:
            stream.walker = Walker(max(stream.walker.ordinal_next, row[1] if stream.sealed else 0))
        self.streams[header.stream_id] = stream
        self.size_bytes += sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())

    def _reclaimed(self, stream_id: str) -> int | None:
        """End of a stream that was delivered and reclaimed; None for any other."""
        row = self.store.execute(
            "SELECT durable FROM streams WHERE stream_id = ? AND state = 'reclaimed'", (stream_id,)
        ).fetchone()
        return int(row[0]) if row else None

    def _distrust(self, stream: NodeStream) -> None:
        stream.close()
        fresh = NodeStream(stream.header, stream.folder)
        fresh.recover()
        self.streams[stream.header.stream_id] = fresh

    def _forget(self, stream: NodeStream) -> None:
        stream_id = stream.header.stream_id
        self.store.execute("UPDATE streams SET state = 'reclaimed' WHERE stream_id = ?", (stream_id,))
        del self.streams[stream_id]
        stream.close()
        shutil.rmtree(stream.folder, ignore_errors=True)

    def _save(self, streams: Iterable[NodeStream]) -> None:
        rows = [
            (
                stream.header.stream_id,
                stream.header.run_id,
                encode_header(stream.header),
                stream.durable,
                stream.walker.ordinal_next,
                "sealed" if stream.sealed else "open",
            )
            for stream in streams
        ]
        if rows:
            self.store.execute("BEGIN IMMEDIATE")
            self.store.executemany("INSERT OR REPLACE INTO streams VALUES (?, ?, ?, ?, ?, ?)", rows)
            self.store.execute("COMMIT")
