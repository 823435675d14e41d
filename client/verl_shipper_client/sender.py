"""The sender: a thread that replicates this process's streams to the daemon and trims what is safe there.

It reads bytes from the spool, never from the caller, and nobody wakes it: it looks every TICK_S. When nobody
listens it only keeps time (hello with backoff, one fsync a second for power loss), and the spool grows.

    tick: receive answers → write what waited for a device
          → per stream, scalars first: hello | send while the window has room → trim → fsync

Must not know: records, values. On failure: the thread notes the error and goes on; without the thread everything still
stands in the spool. A fork child has no sender until it logs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from verl_shipper_client.link import Link, State
from verl_shipper_spool.files import RealFiles
from verl_shipper_spool.header import HEADER_NAME, encode_header
from verl_shipper_spool.location import is_private
from verl_shipper_spool.segment import RawReader
from verl_shipper_spool.wire import DATA_BYTES_MAX, Data, Hello, pack, unpack_from_daemon
from verl_shipper_spool.writer import StreamWriter

TICK_S = 0.1  # how often an idle sender looks; bounds the delay of a record on its way, costs ~0.1 % of a core
BUSY_TICK_S = 0.005  # while more than one message is waiting
SYNC_S = 1.0  # host power loss costs at most this much of what no daemon has
HEARTBEAT_S = 10.0  # the header's mtime tells other hosts that we live
NO_DAEMON_S = 0.6  # a drain waits so long for a first sign of life
ROUND_BYTES_MAX = 2 * 1024 * 1024  # sent in one tick, so that the trainer gets the interpreter back


@dataclass(slots=True)
class Track:
    """One stream on its way."""

    writer: StreamWriter
    reader: RawReader
    link: Link = field(default_factory=Link)
    synced: int = 0


class Sender:
    """Owns the socket and the thread. `lock` guards the writers' lists of segments. `release` writes records that
    waited for a device; false while some still do."""

    def __init__(self, address: str, lock: threading.RLock, release: Callable[[], bool] = lambda: True) -> None:
        self.address = address
        self.last_error = ""
        self._lock = lock
        self._release = release
        self._tracks: list[Track] = []
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verl-shipper-sender", daemon=True)
        self._sync_at_s = 0.0
        self._heartbeat_at_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def add(self, writer: StreamWriter) -> None:
        """Take care of a stream too; scalars before bulk."""
        track = Track(writer, RawReader(RealFiles(), writer.folder))
        tracks = [*self._tracks, track]
        tracks.sort(key=lambda each: each.writer.header.stream_class, reverse=True)  # "scalars" > "bulk"
        self._tracks = tracks

    def drain(self, timeout_s: float) -> bool:
        """Wait until the daemon has everything, or it shows no life, or time is over."""
        deadline_s = time.monotonic() + timeout_s
        patience_s = time.monotonic() + min(timeout_s, NO_DAEMON_S)
        while not self._all_acked():
            now_s = time.monotonic()
            met = any(track.link.state is State.STREAMING for track in self._tracks)
            in_time = now_s < deadline_s and (met or now_s < patience_s)  # false for a timeout that is no number
            if not in_time or not self._thread.is_alive():
                return False
            self._answered.wait(0.02)
            self._answered.clear()
        return True

    def stop(self) -> None:
        """End the thread; waits for it at most a second."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _all_acked(self) -> bool:
        return all(track.link.acked >= track.writer.end_offset for track in self._tracks)

    def _run(self) -> None:
        context = zmq.Context()
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = self._connect(context)
            while not self._stop.is_set():
                try:
                    busy = self._tick(socket, time.monotonic())
                    if socket.poll(int((BUSY_TICK_S if busy else TICK_S) * 1000)):
                        self._receive(socket)
                        # Answers come in clusters; the trainer's time is worth more than ours.
                        self._stop.wait(BUSY_TICK_S)
                except zmq.ZMQError as error:
                    self.last_error = f"{self.address}: {error}"
                    self._stop.wait(TICK_S)
                except OSError as error:
                    self.last_error = f"{error.filename or self.address}: {error.strerror or error}"
                    self._stop.wait(TICK_S)
        except Exception as error:  # noqa: BLE001 - the last line of defence: say it, keep the spool, leave the trainer alone
            self.last_error = f"sender ended: {type(error).__name__}: {error}"
        finally:
            if socket is not None:
                socket.close(linger=0)
            context.term()

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.immediate = True  # without a peer a send fails at once, nothing piles up in memory
        socket.sndhwm = 1000
        socket.reconnect_ivl = 200
        socket.reconnect_ivl_max = 2000
        if is_private(self.address.removeprefix("ipc://")):
            socket.connect(self.address)
        else:
            self.last_error = f"{self.address}: its folder belongs to somebody else; the daemon reads the spool instead"
        return socket

    def _tick(self, socket: zmq.Socket[bytes], now_s: float) -> bool:
        """One round over all streams. True when more is waiting to be sent."""
        self._receive(socket)
        busy = not self._release()
        budget = ROUND_BYTES_MAX
        for track in self._tracks:
            track.link.tick(now_s)
            if track.link.hello_due(now_s) and track.writer.end_offset > track.link.acked:
                self._hello(socket, track, now_s)
            budget, more = self._send(socket, track, now_s, budget)
            busy = busy or more
            self._trim(track)
        if now_s >= self._sync_at_s:
            self._sync_at_s = now_s + SYNC_S
            self._sync(now_s)
        return busy

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = unpack_from_daemon(parts)
            if message is None:
                self.last_error = f"{self.address}: an answer that is none of ours"
                continue
            for track in self._tracks:
                if track.writer.header.stream_id == message.stream_id:
                    track.link.receive(message, time.monotonic())
                    if track.link.refused_reason:
                        self.last_error = f"{self.address}: refused: {track.link.refused_reason}"
            self._answered.set()

    def _hello(self, socket: zmq.Socket[bytes], track: Track, now_s: float) -> None:
        hello = Hello(track.writer.header.stream_id, encode_header(track.writer.header))
        if self._offer(socket, pack(hello)):
            track.link.hello_sent(now_s)
        else:
            track.link.hello_failed(now_s)

    def _send(self, socket: zmq.Socket[bytes], track: Track, now_s: float, budget: int) -> tuple[int, bool]:
        """Send what the window allows. Returns the budget left and whether more is waiting."""
        link = track.link
        end = track.writer.end_offset
        while link.sent < end and budget > 0:
            room = min(link.room_bytes(), DATA_BYTES_MAX, budget)
            if room <= 0:
                return budget, False
            start, content = track.reader.read(link.sent, room, end)
            if not content:
                return budget, False
            if start > link.sent > link.acked:
                # Bytes are gone. Told only when all before them is safe: a daemon that was replaced meanwhile and lost
                # what is in flight would take the gap for larger than it is.
                return budget, False
            data = Data(track.writer.header.stream_id, start, start > link.sent, content)
            if not self._offer(socket, pack(data)):
                return budget, False
            link.data_sent(start + len(content), now_s)
            budget -= len(content)
        return budget, link.sent < end and link.room_bytes() > 0

    def _offer(self, socket: zmq.Socket[bytes], parts: list[bytes]) -> bool:
        try:
            socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _trim(self, track: Track) -> None:
        acked = track.link.acked
        with self._lock:
            safe = [s for s in track.writer.segments if s.end_offset is not None and s.end_offset <= acked]
            for segment in safe:
                track.writer.segments.remove(segment)
        for segment in safe:
            RealFiles().remove(segment.path)

    def _sync(self, now_s: float) -> None:
        for track in self._tracks:
            end = track.writer.end_offset
            if track.link.acked < end and track.synced < end:
                track.writer.sync()
                track.synced = end
        if now_s >= self._heartbeat_at_s:
            self._heartbeat_at_s = now_s + HEARTBEAT_S
            for track in self._tracks:
                if track.writer.end_offset:
                    os.utime(os.path.join(track.writer.folder, HEADER_NAME))
