"""The listener: ZeroMQ ROUTER in front of ingest.

    HELLO → greet → WELCOME(durable)      DATA → take → (after the group's fsync) ACK(durable)

Promises: an ACK is sent only for what is fsynced. The socket file is private to the user, bound once per machine (a
lock file beside it is held while we live), and bound again when somebody removes it. A message that is not ours costs
a count.

Must not know: disks, lanes. On failure: HeldError when another daemon listens there, ConfigError when nobody can.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from dataclasses import dataclass, field

import zmq

from verl_shipper.errors import ConfigError, ShipperError
from verl_shipper.ingest import Ingest, IngestRefusedError
from verl_shipper.lock import Lock
from verl_shipper.node_stream import NodeStream
from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.header import decode_header
from verl_shipper_spool.location import is_private
from verl_shipper_spool.wire import Ack, Data, FromDaemon, Greet, Hello, Refuse, Welcome, pack, unpack_from_client

log = logging.getLogger(__name__)

# Messages in flight per peer inside ZeroMQ; × 256 KiB each. The rest waits in the peers' spools, not in our memory.
RECEIVE_QUEUE_MESSAGES = 4
ROUND_MESSAGES_MAX = 64  # handled before anything else gets its turn
MESSAGE_BYTES_MAX = 1024 * 1024


@dataclass(slots=True)
class Listener:
    """Owns the sockets. One per daemon, bound to one or more addresses."""

    ingest: Ingest
    addresses: list[str]
    must_listen: bool = False  # whether the first address is one that somebody asked for
    rejected_messages: int = 0
    _context: zmq.Context[zmq.Socket[bytes]] | None = None
    _sockets: dict[str, zmq.Socket[bytes]] = field(default_factory=dict)
    _locks: dict[str, Lock] = field(default_factory=dict)
    _inodes: dict[str, int] = field(default_factory=dict)
    _absent: set[str] = field(default_factory=set)  # could not be bound the last time, and that was told
    _peers: dict[str, tuple[str, bytes]] = field(default_factory=dict)  # stream id → (address, routing id)

    @property
    def bound(self) -> list[str]:
        """Addresses that really listen at the moment."""
        return [address for address in self.addresses if address in self._sockets]

    def open(self) -> None:
        self._context = zmq.Context()
        for index, address in enumerate(list(self.addresses)):
            try:
                self._hold(address)
                self._bind(address)
            except ConfigError as error:
                if self.must_listen and index == 0:
                    raise
                log.warning("%s; writers there are read from disk", error.what)
                self._absent.add(address)

    def _hold(self, address: str) -> None:
        path = ipc_path(address)
        if path:
            try:
                os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
                if not is_private(path):
                    raise PermissionError(errno.EPERM, "its folder belongs to somebody else")
                if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
                    raise FileExistsError(errno.EEXIST, "something that is no socket has its name")
                self._locks[address] = Lock.take(path + ".lock", f"socket {path}")
            except OSError as error:
                raise ConfigError(
                    f"cannot use socket {path}: {error.strerror or error}",
                    where="--socket",
                    hint="choose another path",
                ) from error

    def poll(self, timeout_s: float) -> bool:
        """Wait for messages and handle some. True when there may be more."""
        assert self._context is not None, "open() comes first"
        poller = zmq.Poller()
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(int(timeout_s * 1000)))
        more = False
        for address, socket in self._sockets.items():
            if socket in ready:
                more = self._drain(address, socket) or more
        return more

    def acknowledge(self, settled: list[NodeStream]) -> None:
        """Tell the writers what is durable now."""
        for stream in settled:
            self._tell(stream.header.stream_id, Ack(stream.header.stream_id, stream.durable))

    def mend(self) -> None:
        """Bind again what somebody removed; a client reconnects by itself."""
        for address in self.addresses:
            path = ipc_path(address)
            if not path:
                continue
            try:
                present = os.stat(path).st_ino == self._inodes.get(address)
            except OSError:
                present = False
            if present:
                continue
            if address not in self._absent:
                log.warning("socket %s was removed; binding it again", path)
            try:
                self._bind_again(address, path)
                self._absent.discard(address)
            except (OSError, ShipperError) as error:
                if address not in self._absent:
                    log.warning("socket %s: %s; writers are read from disk meanwhile", path, error)
                self._absent.add(address)

    def _bind_again(self, address: str, path: str) -> None:
        if address in self._locks:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            self._locks[address].renew()  # before the old socket goes: its end removes whatever has its name
        else:
            self._hold(address)
        if address in self._sockets:
            self._sockets.pop(address).close(linger=0)
        self._bind(address)

    def close(self) -> None:
        for address, socket in self._sockets.items():
            socket.close(linger=200)
            path = ipc_path(address)
            if path and os.path.exists(path):
                os.unlink(path)
        if self._context is not None:
            self._context.term()
        for lock in self._locks.values():
            lock.release()

    def _bind(self, address: str) -> None:
        assert self._context is not None, "open() comes first"
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 200
        socket.rcvhwm = RECEIVE_QUEUE_MESSAGES
        socket.sndhwm = 1000
        socket.maxmsgsize = MESSAGE_BYTES_MAX
        path = ipc_path(address)
        mask = os.umask(0o177)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(
                f"cannot listen on {address}: {error}", where="--socket", hint="choose another"
            ) from error
        finally:
            os.umask(mask)
        self._sockets[address] = socket
        if path:
            self._inodes[address] = os.stat(path).st_ino

    def _drain(self, address: str, socket: zmq.Socket[bytes]) -> bool:
        for _ in range(ROUND_MESSAGES_MAX):
            try:
                routing_id, *parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            message = unpack_from_client(parts)
            if message is None:
                self.rejected_messages += 1
                continue
            self._peers[message.stream_id] = (address, routing_id)
            try:
                self._accept(message)
            except IngestRefusedError as refusal:
                self._tell(message.stream_id, Refuse(message.stream_id, str(refusal)))
            except Exception:
                log.exception("a message about stream %s could not be handled", message.stream_id)
                self._tell(message.stream_id, Refuse(message.stream_id, "the daemon's mistake, see its log"))
        return True

    def _accept(self, message: Hello | Data) -> None:
        stream_id = message.stream_id
        self.ingest.hear(stream_id, time.monotonic())
        if isinstance(message, Hello):
            try:
                header = decode_header(message.header)
            except CorruptionError as error:
                raise IngestRefusedError(str(error)) from error
            if header.stream_id != stream_id:
                raise IngestRefusedError("header and stream id disagree")
            self._tell(stream_id, Welcome(stream_id, self.ingest.greet(header)))
        elif not self.ingest.known(stream_id):
            self._tell(stream_id, Greet(stream_id))
        elif not self.ingest.take(stream_id, message.offset, message.content, gap=message.gap):
            self._tell(stream_id, Welcome(stream_id, self.ingest.durable(stream_id)))
        elif message.offset + len(message.content) <= self.ingest.durable(stream_id):
            self._tell(stream_id, Ack(stream_id, self.ingest.durable(stream_id)))

    def _tell(self, stream_id: str, message: FromDaemon) -> None:
        address, routing_id = self._peers.get(stream_id, ("", b""))
        socket = self._sockets.get(address)
        if socket is None:
            return
        try:
            socket.send_multipart([routing_id, *pack(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._peers.pop(stream_id, None)  # the peer is gone or does not read: it will greet again


def ipc_path(address: str) -> str:
    """File of an ipc address, empty for others."""
    return address[len("ipc://") :] if address.startswith("ipc://") else ""
