"""The listener and its sockets: acknowledged is fsynced, a stranger costs a count, a removed socket comes back."""

from __future__ import annotations

import os
import shutil
import socket as unix_sockets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from support.processes import wait_for
from support.streams import frame, make_header
from verl_shipper import listener as listener_module
from verl_shipper.errors import ConfigError, HeldError
from verl_shipper.ingest import Ingest
from verl_shipper.listener import Listener
from verl_shipper_spool.header import StreamHeader, encode_header
from verl_shipper_spool.wire import (
    Ack,
    Data,
    FromClient,
    FromDaemon,
    Greet,
    Hello,
    Refuse,
    Welcome,
    pack,
    unpack_from_daemon,
)


class Peer:
    """A client that says what a test wants."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(bench.address)

    def say(self, *parts: bytes) -> None:
        self._socket.send_multipart(parts)

    def ask(self, message: FromClient, *, settle: bool = True) -> FromDaemon | None:
        """Say something, turn the daemon, return its answer."""
        self.say(*pack(message))
        return self.hear(settle=settle)

    def hear(self, *, settle: bool = True) -> FromDaemon | None:
        heard: list[FromDaemon | None] = []

        def answered() -> bool:
            self._bench.turn(settle=settle)
            if self._socket.poll(1):
                heard.append(unpack_from_daemon(self._socket.recv_multipart()))
            return bool(heard)

        wait_for(answered, 20.0, "an answer", pause_s=0.0)
        return heard[0]

    def is_silent(self) -> bool:
        for _ in range(10):
            self._bench.turn()
        return not self._socket.poll(50)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Bench:
    def __init__(self, root: Path) -> None:
        self.path = root / "run" / "ingest.sock"
        self.address = f"ipc://{self.path}"
        self.ingest = Ingest(str(root / "state"), 10**9)
        self.ingest.open()
        self.listener = Listener(self.ingest, [self.address])
        self.listener.open()
        self._peers: list[Peer] = []

    def peer(self) -> Peer:
        self._peers.append(Peer(self))
        return self._peers[-1]

    def turn(self, *, settle: bool = True) -> None:
        self.listener.poll(0.01)
        if settle and self.ingest.unsettled:
            self.listener.acknowledge(self.ingest.settle())

    def turn_until_taken(self) -> None:
        def taken() -> bool:
            self.turn(settle=False)
            return self.ingest.unsettled

        wait_for(taken, 20.0, "the bytes are taken", pause_s=0.0)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self.listener.close()
        self.ingest.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def _hello(header: StreamHeader) -> Hello:
    return Hello(header.stream_id, encode_header(header))


def test_hello_welcome_data_ack(bench: Bench) -> None:
    peer, header = bench.peer(), make_header()

    assert peer.ask(_hello(header)) == Welcome(header.stream_id, 0)
    content = frame(0) + frame(1)
    assert peer.ask(Data(header.stream_id, 0, gap=False, content=content)) == Ack(header.stream_id, len(content))
    assert peer.ask(_hello(header)) == Welcome(header.stream_id, len(content))


def test_nothing_is_acknowledged_before_it_is_durable(bench: Bench) -> None:
    peer, header = bench.peer(), make_header()
    peer.ask(_hello(header))
    peer.say(*pack(Data(header.stream_id, 0, gap=False, content=frame(0))))
    bench.turn_until_taken()

    assert peer.ask(_hello(header), settle=False) == Welcome(header.stream_id, 0)
    assert peer.hear() == Ack(header.stream_id, len(frame(0)))


def test_bytes_that_are_durable_already_are_acknowledged_at_once(bench: Bench) -> None:
    peer, header = bench.peer(), make_header()
    peer.ask(_hello(header))
    data = Data(header.stream_id, 0, gap=False, content=frame(0))
    peer.ask(data)

    assert peer.ask(data, settle=False) == Ack(header.stream_id, len(frame(0)))


def test_a_stream_nobody_knows_is_asked_to_greet(bench: Bench) -> None:
    header = make_header()

    assert bench.peer().ask(Data(header.stream_id, 0, gap=False, content=b"x")) == Greet(header.stream_id)


def test_a_hole_is_answered_with_where_we_are(bench: Bench) -> None:
    peer, header = bench.peer(), make_header()
    peer.ask(_hello(header))
    peer.ask(Data(header.stream_id, 0, gap=False, content=frame(0)))

    answer = peer.ask(Data(header.stream_id, 5000, gap=False, content=frame(9)))

    assert answer == Welcome(header.stream_id, len(frame(0)))


def test_a_full_node_refuses_with_its_reason(bench: Bench) -> None:
    peer, header = bench.peer(), make_header()
    peer.ask(_hello(header))
    bench.ingest.quota_bytes = 1

    answer = peer.ask(Data(header.stream_id, 0, gap=False, content=frame(0)))

    assert isinstance(answer, Refuse)
    assert "full" in answer.reason


@pytest.mark.parametrize("header", [b"", b"\0" * 50, b"\x80"])
def test_a_header_that_cannot_be_read_is_refused(bench: Bench, header: bytes) -> None:
    assert isinstance(bench.peer().ask(Hello("a" * 32, header)), Refuse)


def test_a_header_of_another_stream_is_refused(bench: Bench) -> None:
    assert isinstance(bench.peer().ask(Hello("a" * 32, encode_header(make_header()))), Refuse)


@pytest.mark.parametrize(
    "parts", [[b""], [b"XX", b"a" * 32], [b"D1", b"../../etc", b"0" * 9, b"x"], [b"D1", b"a" * 32, b"short", b"x"]]
)
def test_a_stranger_costs_a_count(bench: Bench, parts: list[bytes]) -> None:
    peer = bench.peer()
    peer.say(*parts)

    assert peer.is_silent()
    assert bench.listener.rejected_messages == 1
    assert bench.ingest.streams == {}


def test_a_message_that_breaks_something_does_not_end_the_daemon(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_self: Ingest, _header: StreamHeader) -> int:
        raise KeyError("our own mistake")

    monkeypatch.setattr(Ingest, "greet", broken)
    peer, header = bench.peer(), make_header()
    assert isinstance(peer.ask(_hello(header)), Refuse)
    monkeypatch.undo()

    assert peer.ask(_hello(header)) == Welcome(header.stream_id, 0)


def test_a_flood_of_one_peer_leaves_a_turn_for_the_rest(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "ROUND_MESSAGES_MAX", 2)
    handled = 0

    def count(_self: Ingest, _stream_id: str, _now_s: float) -> None:
        nonlocal handled
        handled += 1

    monkeypatch.setattr(Ingest, "hear", count)
    peer, header = bench.peer(), make_header()
    for _ in range(20):
        peer.say(*pack(_hello(header)))

    while handled < 20:
        before = handled
        bench.listener.poll(0.2)
        assert handled <= before + 2


def test_a_peer_that_is_gone_costs_nothing(bench: Bench) -> None:
    peer, header = bench.peer(), make_header()
    peer.ask(_hello(header))
    peer.say(*pack(Data(header.stream_id, 0, gap=False, content=frame(0))))
    bench.turn_until_taken()
    bench._peers.remove(peer)
    peer.close()

    bench.turn()

    assert bench.ingest.durable(header.stream_id) == len(frame(0))


# The socket's place


def test_the_socket_is_private_and_gone_afterwards(bench: Bench, tmp_path: Path) -> None:
    assert bench.path.stat().st_mode & 0o077 == 0
    assert bench.path.parent.stat().st_mode & 0o077 == 0
    bench.listener.close()
    assert not bench.path.exists()
    bench.listener = Listener(bench.ingest, [bench.address])
    bench.listener.open()


def test_a_stale_socket_is_no_obstacle(bench: Bench) -> None:
    bench.listener.close()
    with unix_sockets.socket(unix_sockets.AF_UNIX) as stale:
        stale.bind(str(bench.path))

    bench.listener = Listener(bench.ingest, [bench.address])
    bench.listener.open()

    assert bench.peer().ask(_hello(make_header())) is not None


def test_a_second_daemon_is_told_who_is_there(bench: Bench) -> None:
    second = Listener(bench.ingest, [bench.address])

    with pytest.raises(HeldError, match=str(os.getpid())):
        second.open()
    second.close()

    assert stat.S_ISSOCK(bench.path.stat().st_mode)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_never_removed(tmp_path: Path, bench: Bench, kind: str) -> None:
    path = tmp_path / "precious"
    target = tmp_path / "target"
    target.write_text("results of a year")
    if kind == "file":
        path.write_text("results of a year")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    listener = Listener(bench.ingest, [f"ipc://{path}"], must_listen=True)

    with pytest.raises(ConfigError, match="no socket"):
        listener.open()
    listener.close()

    assert os.path.lexists(path)
    assert target.read_text() == "results of a year"


@pytest.mark.parametrize("must_listen", [True, False])
def test_a_place_that_cannot_be_is_fatal_only_when_it_was_asked_for(
    tmp_path: Path, bench: Bench, must_listen: bool
) -> None:
    (tmp_path / "file").write_text("")
    listener = Listener(bench.ingest, [f"ipc://{tmp_path}/file/x.sock"], must_listen=must_listen)

    if must_listen:
        with pytest.raises(ConfigError, match="cannot use socket"):
            listener.open()
    else:
        listener.open()
        assert listener.bound == []
        assert not listener.poll(0.0)
    listener.close()


def test_a_port_that_is_taken_is_one_line(bench: Bench) -> None:
    with unix_sockets.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listener = Listener(bench.ingest, [f"tcp://127.0.0.1:{taken.getsockname()[1]}"], must_listen=True)
        with pytest.raises(ConfigError, match="cannot listen"):
            listener.open()
        listener.close()


def _remove_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def _remove_socket(path: Path) -> None:
    path.unlink()


def _replace_socket(path: Path) -> None:
    path.unlink()
    with unix_sockets.socket(unix_sockets.AF_UNIX) as other:
        other.bind(str(path))


@pytest.mark.parametrize("harm", [_remove_folder, _remove_socket, _replace_socket])
def test_a_removed_socket_is_bound_again(bench: Bench, harm: Callable[[Path], None]) -> None:
    harm(bench.path)

    bench.listener.mend()

    assert bench.peer().ask(_hello(make_header())) is not None
    before = bench.path.stat().st_ino
    bench.listener.mend()
    assert bench.path.stat().st_ino == before


def test_mending_that_fails_is_tried_again(bench: Bench) -> None:
    shutil.rmtree(bench.path.parent)
    bench.path.parent.write_text("in the way")
    for _ in range(3):
        bench.listener.mend()
    bench.path.parent.unlink()

    bench.listener.mend()

    assert bench.peer().ask(_hello(make_header())) is not None


def test_mending_leaves_the_socket_of_another_daemon_alone(bench: Bench) -> None:
    shutil.rmtree(bench.path.parent)
    other = Listener(bench.ingest, [bench.address])
    other.open()
    inode = bench.path.stat().st_ino

    bench.listener.mend()
    bench.listener.mend()

    assert bench.path.stat().st_ino == inode
    other.close()
    bench.listener.mend()
    assert bench.peer().ask(_hello(make_header())) is not None
