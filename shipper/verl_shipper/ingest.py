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
from verl_shipper.store import open_store, transaction
from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.frame import Walker
from verl_shipper_spool.header import StreamHeader, decode_header, encode_header, read_header
from verl_shipper_spool.record import Loss

log = logging.getLogger(__name__)

OFFSET_MAX = 2**62  # of any stream; SQLite's integers end at 2**63
SQLITE_INTEGER_MAX = 2**63 - 1
OPEN_BYTES_MIN = 1024 * 1024  # a delivered segment of this size is reclaimed though its stream goes on

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
    """Owner of the node spool. `quota_bytes` bounds it; beyond, writers keep their bytes.

    broken: streams whose copy here cannot be used, and why. trouble: why the table takes nothing, empty when it does.
    """

    state_dir: str
    quota_bytes: int
    streams: dict[str, NodeStream] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    trouble: str = ""
    size_bytes: int = 0
    taken_bytes: int = 0
    _store: sqlite3.Connection | None = None
    _heard_at_s: dict[str, float] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    _unsaved: set[str] = field(default_factory=set)  # streams whose row is out of date

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
            if not os.path.isdir(folder):
                continue
            if self._reclaimed(name) is not None:
                shutil.rmtree(folder, ignore_errors=True)  # we ended in the middle of that
            else:
                self._try_recover(name, folder)
        self._save(self.streams)

    def greet(self, header: StreamHeader) -> int:
        """Make a stream known; returns the offset below which everything is durable here."""
        stream_id = header.stream_id
        folder = os.path.join(self.spool_dir, stream_id)
        if stream_id in self.broken:
            self._try_recover(stream_id, folder)
            self._refuse_broken(stream_id)
        stream = self.streams.get(stream_id)
        if stream is None:
            delivered = self._reclaimed(stream_id)
            if delivered is not None:
                return delivered
            stream = NodeStream(header, folder)
            try:
                stream.create()
                stream.recover()  # bytes whose header was lost
            except OSError as error:
                raise IngestRefusedError(f"node spool: {error.strerror or error}") from error
            self.streams[stream_id] = stream
            self._save([stream_id])
        return stream.durable

    def known(self, stream_id: str) -> bool:
        return stream_id in self.streams or stream_id in self.broken or self._reclaimed(stream_id) is not None

    def take(self, stream_id: str, offset: int, content: bytes, *, gap: bool = False) -> bool:
        """Append bytes of a known stream. False when something is missing in front of them."""
        self._refuse_broken(stream_id)
        stream = self.streams.get(stream_id)
        new_bytes = min(offset + len(content) - self.end(stream_id), len(content))
        if new_bytes <= 0:
            return True
        if stream is None or stream.sealed:
            raise IngestRefusedError("the stream has ended here: its writer was silent and taken for dead")
        if offset > OFFSET_MAX:
            raise IngestRefusedError(f"offset {offset} is none of a stream")
        if self.size_bytes + new_bytes > self.quota_bytes:
            raise IngestRefusedError(f"node spool is full ({self.quota_bytes} bytes); a tracker is behind, see status")
        try:
            accepted = stream.append(offset, content, gap=gap)
        except OSError as error:
            if stream.doubtful:
                self._distrust(stream)
            raise IngestRefusedError(f"node spool: {error.strerror or error}") from error
        if accepted:
            self.size_bytes += new_bytes
            self.taken_bytes += new_bytes
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
        for stream_id in sorted(self._changed & self.streams.keys()):
            stream = self.streams[stream_id]
            try:
                stream.sync()
            except OSError as error:
                log.warning("%s: fsync failed (%s); its bytes are asked for again", stream.folder, error.strerror)
                self._distrust(stream)
                continue
            settled.append(stream)
        self._changed.clear()
        self._save([stream.header.stream_id for stream in settled])
        return settled

    def seal(self, stream_id: str, losses: list[Loss]) -> None:
        """The writer is gone for good and everything it left was taken."""
        stream = self.streams.get(stream_id)
        if stream is None or stream.sealed:
            return
        before = stream.end
        try:
            stream.seal(losses)
        except OSError as error:
            if stream.doubtful:
                self._distrust(stream)
            raise IngestRefusedError(f"node spool: {error.strerror or error}") from error
        self.size_bytes += stream.end - before
        self._save([stream_id])

    def reclaim(self, safe: dict[str, int]) -> int:
        """Free what every lane has behind it. `safe`: stream id → offset. Returns bytes freed."""
        freed = 0
        open_bytes_min = 1 if self.size_bytes * 2 > self.quota_bytes else OPEN_BYTES_MIN
        for stream_id, offset in safe.items():
            stream = self.streams.get(stream_id)
            if stream is None:
                continue
            try:
                if stream.sealed and offset >= stream.end:
                    freed += self._forget(stream)
                else:
                    freed += stream.reclaim(min(offset, stream.durable), open_bytes_min)
            except (OSError, sqlite3.Error) as error:
                log.warning("%s cannot be reclaimed now: %s", stream.folder, error)
        self.size_bytes = max(self.size_bytes - freed, 0)
        return freed

    def write_notes(self, notes: Mapping[str, str]) -> None:
        """Keep lines for `status`, by key."""
        self._save(())
        try:
            with transaction(self.store):
                self.store.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?)", notes.items())
        except sqlite3.Error as error:
            self._tell_trouble(error)

    def close(self) -> None:
        self.settle()
        for stream in self.streams.values():
            stream.close()
        self.store.close()

    def _try_recover(self, name: str, folder: str) -> None:
        """Recover one stream; a disk that does not give it back costs this stream only."""
        try:
            self._recover(name, folder)
            self.broken.pop(name, None)
        except OSError as error:
            self.broken[name] = f"node spool: {folder}: {error.strerror or error}"
            log.warning("%s; kept, not delivered", self.broken[name])

    def _recover(self, name: str, folder: str) -> None:
        row = self.store.execute("SELECT header, ordinal_next FROM streams WHERE stream_id = ?", (name,)).fetchone()
        try:
            header = read_header(folder)
        except (FileNotFoundError, CorruptionError) as error:
            if row is None:
                log.warning("%s: no usable header (%s); kept, not delivered", folder, error)
                return
            header = decode_header(row[0])
            NodeStream(header, folder).create()
        if header.stream_id != name:
            log.warning("%s holds another stream, %s; kept, not delivered", folder, header.stream_id)
            return
        stream = NodeStream(header, folder)
        stream.recover()
        if row is not None and stream.walker.at_boundary:
            stream.walker = Walker(max(stream.walker.ordinal_next, row[1] if stream.sealed else 0))
        self.streams[name] = stream
        self.size_bytes += stream.size_bytes()

    def _refuse_broken(self, stream_id: str) -> None:
        if stream_id in self.broken:
            raise IngestRefusedError(self.broken[stream_id])

    def _reclaimed(self, stream_id: str) -> int | None:
        """End of a stream that was delivered and reclaimed; None for any other."""
        row = self.store.execute(
            "SELECT durable FROM streams WHERE stream_id = ? AND state = 'reclaimed'", (stream_id,)
        ).fetchone()
        return int(row[0]) if row else None

    def _distrust(self, stream: NodeStream) -> None:
        before = stream.end
        try:
            stream.distrust()
        except OSError as error:
            stream_id = stream.header.stream_id
            del self.streams[stream_id]
            self.broken[stream_id] = f"node spool: {stream.folder}: {error.strerror or error}"
            log.warning("%s; kept, not delivered", self.broken[stream_id])
        self.size_bytes = max(self.size_bytes - max(before - stream.end, 0), 0)

    def _forget(self, stream: NodeStream) -> int:
        """Remove a stream that all lanes have delivered. The table knows it first: else it could come again."""
        freed = stream.size_bytes()
        self._write([stream], "reclaimed")
        del self.streams[stream.header.stream_id]
        stream.close()
        shutil.rmtree(stream.folder, ignore_errors=True)
        return freed

    def _save(self, stream_ids: Iterable[str]) -> None:
        """Bring the table up to date. What it does not take now is tried again with the next; the spool has it all."""
        self._unsaved.update(stream_ids)
        streams = [self.streams[stream_id] for stream_id in self._unsaved if stream_id in self.streams]
        if not streams:
            return
        try:
            self._write(streams)
        except sqlite3.Error as error:
            self._tell_trouble(error)
        else:
            self._unsaved.clear()
            self.trouble = ""

    def _write(self, streams: Iterable[NodeStream], state: str | None = None) -> None:
        rows = [
            (
                stream.header.stream_id,
                stream.header.run_id,
                encode_header(stream.header),
                stream.durable,
                min(stream.walker.ordinal_next, SQLITE_INTEGER_MAX),
                state or ("sealed" if stream.sealed else "open"),
            )
            for stream in streams
        ]
        with transaction(self.store):
            self.store.executemany("INSERT OR REPLACE INTO streams VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _tell_trouble(self, error: sqlite3.Error) -> None:
        text = f"state in {self.state_dir} cannot be written: {error}"
        if text != self.trouble:
            log.warning("%s; records are kept", text)
        self.trouble = text
