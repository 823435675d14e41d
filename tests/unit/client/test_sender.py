"""The sender against a real listener and ingest over ipc: the node gets the stream byte for byte, whatever happens."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from support.processes import wait_for
from support.streams import make_header, payload
from unit.client.conftest import MakeClient
from verl_shipper.ingest import Ingest
from verl_shipper.listener import Listener
from verl_shipper_client import link
from verl_shipper_client.link import State
from verl_shipper_client.sender import Sender, Track
from verl_shipper_spool.header import BULK
from verl_shipper_spool.location import socket_address
from verl_shipper_spool.wire import Data, Greet, pack, unpack_from_client
from verl_shipper_spool.writer import StreamWriter

PATIENCE_S = 30.0


class Node:
    """The daemon's half that faces the socket, turned by hand."""

    def __init__(self, root: Path, address: str, quota_bytes: int = 10**9) -> None:
        self.ingest = Ingest(str(root / "state"), quota_bytes)
        self.listener = Listener(self.ingest, [address])
        self.ingest.open()
        self.listener.open()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def turn(self, *, settle: bool = True) -> None:
        self.listener.poll(0.01)
        if settle and self.ingest.unsettled:
            self.listener.acknowledge(self.ingest.settle())

    def until(self, condition: Callable[[], object], what: str, *, settle: bool = True) -> None:
        def turned() -> object:
            self.turn(settle=settle)
            return condition()

        wait_for(turned, PATIENCE_S, what, pause_s=0.0)

    def run(self) -> None:
        """Turn in a thread of its own from now on."""

        def loop() -> None:
            while not self._stop.is_set():
                self.turn()

        self._thread = threading.Thread(target=loop)
        self._thread.start()

    def content(self, stream_id: str) -> bytes:
        folder = os.path.join(self.ingest.spool_dir, stream_id)
        parts = [Path(folder, name).read_bytes() for name in sorted(os.listdir(folder)) if name.endswith(".seg")]
        return b"".join(parts)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.listener.close()
        self.ingest.close()


class Trainer:
    """A process's streams and its sender."""

    def __init__(self, root: Path) -> None:
        self.spool = root / "spool"
        self.address = socket_address(str(self.spool))
        self.lock = threading.RLock()
        self.sender = Sender(self.address, self.lock)
        self.written: dict[str, bytes] = {}

    def writer(self, *, segment_bytes_max: int = 10_000_000, bulk: bool = False) -> StreamWriter:
        header = make_header(BULK) if bulk else make_header()
        made = StreamWriter(str(self.spool), header, segment_bytes_max=segment_bytes_max)
        self.sender.add(made)
        return made

    def log(self, writer: StreamWriter, count: int, size_bytes: int = 100) -> None:
        for _ in range(count):
            with self.lock:
                assert writer.append(payload(writer.records, size_bytes), "metrics")

    def track(self, writer: StreamWriter) -> Track:
        return next(track for track in self.sender._tracks if track.writer is writer)

    def acked(self, writer: StreamWriter) -> bool:
        return self.track(writer).link.acked == writer.end_offset


def _content(writer: StreamWriter) -> bytes:
    """The stream as it stands on the client's disk."""
    return b"".join(Path(segment.path).read_bytes() for segment in writer.segments)


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    monkeypatch.setattr(link, "REFUSED_PAUSE_S", 0.1)
    made = Trainer(tmp_path)
    yield made
    made.sender.stop()


@pytest.fixture
def nodes(tmp_path: Path, trainer: Trainer) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def new(quota_bytes: int = 10**9) -> Node:
        made.append(Node(tmp_path, trainer.address, quota_bytes))
        return made[-1]

    yield new
    for node in made:
        if not node.listener._context or not node.listener._context.closed:
            node.close()


def test_a_stream_arrives_byte_for_byte_and_is_acknowledged(trainer: Trainer, nodes: Callable[..., Node]) -> None:
    node, writer = nodes(), trainer.writer()
    trainer.log(writer, 5000)
    trainer.sender.start()

    node.until(lambda: trainer.acked(writer), "all is acknowledged")

    stream_id = writer.header.stream_id
    assert node.content(stream_id) == _content(writer)
    assert node.ingest.streams[stream_id].header == writer.header
    assert node.ingest.streams[stream_id].walker.ordinal_next == 5000


def test_what_is_logged_later_follows(trainer: Trainer, nodes: Callable[..., Node]) -> None:
    node, writer = nodes(), trainer.writer()
    trainer.sender.start()
    for _ in range(5):
        trainer.log(writer, 20)
        node.until(lambda: trainer.acked(writer), "all is acknowledged")

    assert node.content(writer.header.stream_id) == _content(writer)


def test_a_frame_larger_than_a_message_arrives(trainer: Trainer, nodes: Callable[..., Node]) -> None:
    node, writer = nodes(), trainer.writer()
    trainer.log(writer, 2, size_bytes=1_500_000)
    trainer.sender.start()

    node.until(lambda: trainer.acked(writer), "all is acknowledged")

    assert node.content(writer.header.stream_id) == _content(writer)


def test_scalars_go_before_bulk(trainer: Trainer, nodes: Callable[..., Node]) -> None:
    node, bulk, scalars = nodes(), trainer.writer(bulk=True), trainer.writer()
    trainer.log(bulk, 100, size_bytes=100_000)
    trainer.log(scalars, 100)
    trainer.sender.start()

    node.until(lambda: trainer.acked(scalars), "the scalars are acknowledged")

    assert node.ingest.durable(bulk.header.stream_id) < bulk.end_offset
    node.until(lambda: trainer.acked(bulk), "the bulk too")


def test_acknowledged_segments_are_removed_and_the_open_one_stays(trainer: Trainer, nodes: Callable[..., Node]) -> None:
    node, writer = nodes(), trainer.writer(segment_bytes_max=5000)
    trainer.log(writer, 200)
    paths = [segment.path for segment in writer.segments]
    whole = _content(writer)
    assert len(paths) > 3
    trainer.sender.start()

    node.until(lambda: trainer.acked(writer) and len(writer.segments) == 1, "acknowledged and trimmed")
    wait_for(lambda: [path for path in paths if os.path.exists(path)] == paths[-1:], PATIENCE_S, "files are removed")

    assert node.content(writer.header.stream_id) == whole


def test_nothing_is_removed_before_it_is_durable_at_the_node(trainer: Trainer, nodes: Callable[..., Node]) -> None:
    node, writer = nodes(), trainer.writer(segment_bytes_max=5000)
    trainer.log(writer, 200)
    stream_id = writer.header.stream_id
    trainer.sender.start()

    node.until(lambda: node.ingest.end(stream_id) == writer.end_offset, "all was taken", settle=False)

    assert node.ingest.durable(stream_id) == 0
    assert trainer.track(writer).link.acked == 0
    assert all(os.path.exists(segment.path) for segment in writer.segments)


def test_the_window_bounds_what_is_not_acknowledged(
    trainer: Trainer, nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "WINDOW_BYTES", 300_000)
    node, writer = nodes(), trainer.writer()
    trainer.log(writer, 100, size_bytes=10_000)
    stream_id = writer.header.stream_id
    trainer.sender.start()

    node.until(lambda: node.ingest.end(stream_id) == 300_000, "the window is full", settle=False)
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s:
        node.turn(settle=False)
    assert node.ingest.end(stream_id) == 300_000

    node.until(lambda: trainer.acked(writer), "the rest follows")
    assert node.content(stream_id) == _content(writer)


def test_a_restarted_daemon_goes_on_where_it_was(trainer: Trainer, nodes: Callable[..., Node]) -> None:
    node, writer = nodes(), trainer.writer()
    trainer.log(writer, 100)
    trainer.sender.start()
    node.until(lambda: trainer.acked(writer), "all is acknowledged")
    node.close()
    trainer.log(writer, 100)

    node = nodes()
    node.until(lambda: trainer.acked(writer), "the rest is acknowledged")

    assert node.content(writer.header.stream_id) == _content(writer)


def test_bytes_that_died_with_a_daemon_are_sent_again(trainer: Trainer, nodes: Callable[..., Node]) -> None:
    node, writer = nodes(), trainer.writer()
    trainer.log(writer, 3000)
    stream_id = writer.header.stream_id
    trainer.sender.start()
    node.until(lambda: node.ingest.end(stream_id) > 0, "some was taken", settle=False)
    node.listener.close()
    node.ingest.streams[stream_id].close()
    shutil.rmtree(Path(node.ingest.spool_dir) / stream_id)
    node.ingest.store.execute("DELETE FROM streams")
    node.ingest.streams.clear()
    node.ingest._changed.clear()
    node.ingest.close()

    node = nodes()
    node.until(lambda: trainer.acked(writer), "all is acknowledged")

    assert node.content(stream_id) == _content(writer)


def test_a_daemon_without_memory_is_greeted_and_gets_what_is_left(
    trainer: Trainer, nodes: Callable[..., Node], tmp_path: Path
) -> None:
    node, writer = nodes(), trainer.writer(segment_bytes_max=5000)
    trainer.log(writer, 200)
    trainer.sender.start()
    node.until(lambda: trainer.acked(writer) and len(writer.segments) == 1, "acknowledged and trimmed")
    node.close()
    shutil.rmtree(tmp_path / "state")

    node = nodes()
    trainer.log(writer, 10)
    kept = _content(writer)
    first = writer.segments[0].first_offset
    node.until(lambda: node.ingest.durable(writer.header.stream_id) == writer.end_offset, "the rest is there")

    stream = node.ingest.streams[writer.header.stream_id]
    assert node.content(writer.header.stream_id) == kept
    assert stream._segment_first == first > 0
    assert stream.walker.ordinal_next == 210


def test_a_full_node_refuses_and_takes_again_later(trainer: Trainer, nodes: Callable[..., Node]) -> None:
    node, writer = nodes(quota_bytes=50_000), trainer.writer()
    trainer.log(writer, 1000)
    trainer.sender.start()
    node.until(lambda: trainer.track(writer).link.state is State.REFUSED, "it is refused")
    assert "node spool is full" in trainer.sender.last_error

    node.ingest.quota_bytes = 10**9
    node.until(lambda: trainer.acked(writer), "it is taken")

    assert node.content(writer.header.stream_id) == _content(writer)


def test_a_hole_in_the_spool_is_told_as_a_gap_and_what_follows_arrives(
    trainer: Trainer, nodes: Callable[..., Node]
) -> None:
    node, writer = nodes(), trainer.writer(segment_bytes_max=5000)
    trainer.log(writer, 200)
    gone = writer.segments[2]
    size = os.path.getsize(gone.path)
    whole = _content(writer)
    Path(gone.path).unlink()
    trainer.sender.start()

    node.until(lambda: trainer.acked(writer), "all is acknowledged")

    expected = whole[: gone.first_offset] + whole[gone.first_offset + size :]
    assert node.content(writer.header.stream_id) == expected
    assert node.ingest.end(writer.header.stream_id) == len(whole)


def test_a_gap_is_told_only_when_everything_before_it_is_safe(
    trainer: Trainer, nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a daemon that lost the bytes before it would take the gap for larger than it is."""
    node, writer = nodes(), trainer.writer(segment_bytes_max=5000)
    trainer.log(writer, 200)
    Path(writer.segments[2].path).unlink()
    told: list[tuple[bool, int, int]] = []
    real_pack = pack

    def spy(message: object) -> list[bytes]:
        if isinstance(message, Data):
            state = trainer.track(writer).link
            told.append((message.gap, state.sent, state.acked))
        return real_pack(message)  # type: ignore[arg-type]

    monkeypatch.setattr("verl_shipper_client.sender.pack", spy)
    trainer.sender.start()
    node.until(lambda: trainer.acked(writer), "all is acknowledged")

    gaps = [(sent, acked) for gap, sent, acked in told if gap]
    assert len(gaps) == 1
    assert gaps[0][0] == gaps[0][1]


def test_a_removed_socket_is_mended_and_found_again(trainer: Trainer, nodes: Callable[..., Node]) -> None:
    node, writer = nodes(), trainer.writer()
    trainer.log(writer, 10)
    trainer.sender.start()
    node.until(lambda: trainer.acked(writer), "all is acknowledged")
    shutil.rmtree(os.path.dirname(trainer.address.removeprefix("ipc://")))

    node.listener.mend()
    trainer.log(writer, 10)
    node.until(lambda: trainer.acked(writer), "the rest is acknowledged")

    assert node.content(writer.header.stream_id) == _content(writer)


def test_answers_of_a_stranger_are_told_and_change_nothing(trainer: Trainer) -> None:
    writer = trainer.writer()
    trainer.log(writer, 10)
    os.makedirs(os.path.dirname(trainer.address.removeprefix("ipc://")))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as stranger:
        stranger.linger = 0
        stranger.bind(trainer.address)
        trainer.sender.start()
        assert stranger.poll(int(PATIENCE_S * 1000))
        routing_id, *parts = stranger.recv_multipart()
        assert unpack_from_client(parts) is not None
        for answer in ([b""], [b"X9", b"a" * 32], [b"A1", writer.header.stream_id.encode(), b"short"]):
            stranger.send_multipart([routing_id, *answer])
        stranger.send_multipart([routing_id, *pack(Greet("f" * 32))])
        wait_for(lambda: "none of ours" in trainer.sender.last_error, PATIENCE_S, "it is told")
        assert trainer.sender._thread.is_alive()
        assert trainer.track(writer).link.acked == 0


def test_a_spool_removed_under_it_does_not_end_the_sender(trainer: Trainer, nodes: Callable[..., Node]) -> None:
    node, writer = nodes(), trainer.writer(segment_bytes_max=5000)
    trainer.log(writer, 200)
    trainer.sender.start()
    shutil.rmtree(writer.folder)
    trainer.log(writer, 200)
    node.until(lambda: trainer.acked(writer), "what is left is acknowledged")

    assert trainer.sender._thread.is_alive()


def test_without_a_daemon_a_drain_ends_soon_and_keeps_everything(trainer: Trainer) -> None:
    writer = trainer.writer()
    trainer.log(writer, 10)
    trainer.sender.start()
    began_s = time.monotonic()

    assert not trainer.sender.drain(10.0)

    assert time.monotonic() - began_s < 5.0
    assert len(_content(writer)) == writer.end_offset


def test_finish_is_true_when_the_daemon_has_everything(make: MakeClient, spool: Path, tmp_path: Path) -> None:
    node = Node(tmp_path, socket_address(str(spool)))
    node.run()
    try:
        made = make()
        made.log({"a": 1}, step=1)
        made.log_generations([("q", "a", 1)], step=1)

        assert made.finish(exit_code=0, timeout_s=PATIENCE_S)
        assert made.finish(exit_code=0, timeout_s=0.0)
        assert {stream.durable for stream in node.ingest.streams.values()} == {
            writer.end_offset for writer in made._writers()
        }

        made.log({"late": 1}, step=2)
        assert made.finish(timeout_s=PATIENCE_S)
    finally:
        node.close()


def test_finish_is_false_when_nobody_is_there(make: MakeClient) -> None:
    made = make()
    made.log({"a": 1}, step=1)

    assert made.finish(timeout_s=5.0) is False
