"""Signal handlers that append while they interrupt an append, handlers that raise, and threads behind one lock."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from support.streams import Found, make_header, number_of, payload, read_all
from verl_shipper_spool.testing import FaultyFiles
from verl_shipper_spool.writer import StreamWriter

METRICS = "metrics"
Handler = Callable[[int, FrameType | None], object]


@pytest.fixture(autouse=True)
def _close_what_was_interrupted(tmp_path: Path) -> Iterator[None]:
    """A handler that raises between an open and its assignment leaves a descriptor that nobody knows."""
    yield
    for link in [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]:
        if link.is_symlink() and os.readlink(link).startswith(f"{tmp_path}/"):
            os.close(int(link.name))


class Interrupting(FaultyFiles):
    """Calls `handler` behind every system call, where the interpreter would run a signal's handler."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.handler: Callable[[str], None] = lambda _call: None

    def create(self, path: str) -> int:
        fd = super().create(path)
        self.handler("create")
        return fd

    def write(self, fd: int, data: bytes) -> int:
        self.handler("before write")
        written = super().write(fd, data)
        self.handler("write")
        return written

    def overwrite(self, fd: int, data: bytes) -> None:
        super().overwrite(fd, data)
        self.handler("overwrite")

    def truncate(self, fd: int, size_bytes: int) -> None:
        self.handler("before truncate")
        super().truncate(fd, size_bytes)
        self.handler("truncate")

    def size(self, file: str | int) -> int:
        size = super().size(file)
        self.handler("size")
        return size

    def close(self, fd: int) -> None:
        super().close(fd)
        self.handler("close")

    def remove(self, path: str) -> None:
        self.handler("before remove")
        super().remove(path)
        self.handler("remove")

    def make_folder(self, path: str) -> None:
        super().make_folder(path)
        self.handler("make_folder")

    def replace(self, path: str, content: bytes, *, durable: bool = True) -> None:
        super().replace(path, content, durable=durable)
        self.handler("replace")


class Log:
    """Appends numbered records to a writer, remembers which were kept."""

    def __init__(self, writer: StreamWriter) -> None:
        self.writer = writer
        self.kept: list[int] = []
        self.lost: list[int] = []
        self.appended = 0

    def append(self, record_class: str = METRICS) -> None:
        # The payload does not know its ordinal: a handler may come in between. It never ends with F5, which a torn
        # frame that lacks its last byte would find at the beginning of the next frame.
        number = self.appended
        self.appended += 1
        kept = self.writer.append(payload(number, size_bytes=1), record_class)
        (self.kept if kept else self.lost).append(number)


def _numbers(found: Found) -> list[int]:
    """Numbers in the payloads by ordinal; no number has two ordinals."""
    by_ordinal = {item.ordinal: number_of(item.payload) for item in found.frames}
    assert len(by_ordinal) == len(set(by_ordinal.values()))
    return list(by_ordinal.values())


@contextlib.contextmanager
def _alarm(handler: Handler, pause_s: float) -> Iterator[None]:
    """Run `handler` every `pause_s` of real time in the main thread."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, pause_s, pause_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.timeout(120, method="thread")  # the default method needs SIGALRM itself
def test_a_handler_that_appends_a_thousand_times_a_second_loses_and_doubles_nothing(tmp_path: Path) -> None:
    # Segments of 30 KB roll every few hundred records; the handler's class differs, and would roll too.
    writer = StreamWriter(str(tmp_path), make_header(), segment_bytes_max=30_000)
    log = Log(writer)

    with _alarm(lambda *_: log.append("text"), 0.001):
        while log.appended < 50_000:
            log.append()

    writer.close()
    found = read_all(writer.folder)
    assert log.lost == []
    assert len(log.kept) == writer.records == found.ledger.seen == len(found.frames) == log.appended
    assert (found.damages, found.gaps, found.ledger.dropped) == ([], [], {})
    assert sorted(_numbers(found)) == sorted(log.kept)


def test_a_handler_at_any_system_call_loses_and_doubles_nothing(tmp_path: Path) -> None:
    for seed in range(12):
        print(f"seed {seed}")
        _append_and_interrupt(tmp_path / str(seed), seed)


def _append_and_interrupt(spool: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = Interrupting(seed)
    writer = StreamWriter(str(spool), make_header(), files=files, segment_bytes_max=400)
    log = Log(writer)
    depth = 0

    def handler(_call: str) -> None:
        nonlocal depth
        if depth < 3 and rng.random() < 0.3:
            depth += 1
            log.append(rng.choice([METRICS, "text"]))
            depth -= 1

    files.handler = handler
    for _ in range(200):
        log.append(rng.choice([METRICS, METRICS, METRICS, "text"]))
    files.handler = lambda _call: None
    writer.close()

    found = read_all(writer.folder)
    assert log.lost == []
    assert (found.damages, found.gaps, found.ledger.dropped) == ([], [], {})
    assert writer.records == found.ledger.seen == len(found.frames) == log.appended
    assert found.end == writer.end_offset
    assert sorted(_numbers(found)) == sorted(log.kept)


def test_a_handler_at_any_system_call_of_a_full_disk_keeps_every_number(tmp_path: Path) -> None:
    for seed in range(12):
        print(f"seed {seed}")
        _append_and_interrupt_on_a_full_disk(tmp_path / str(seed), seed)


def _append_and_interrupt_on_a_full_disk(spool: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = Interrupting(seed)
    writer = StreamWriter(str(spool), make_header(), files=files, segment_bytes_max=400)
    log = Log(writer)
    log.append()
    depth = 0

    def handler(_call: str) -> None:
        nonlocal depth
        files.short_writes_next = rng.random() < 0.05
        files.full = rng.random() < 0.3
        files.truncate_fails = rng.random() < 0.3
        if depth < 3 and rng.random() < 0.3:
            depth += 1
            log.append(rng.choice([METRICS, "text"]))
            depth -= 1

    files.handler = handler
    for _ in range(200):
        log.append(rng.choice([METRICS, METRICS, METRICS, "text"]))
    files.handler = lambda _call: None
    files.full = files.truncate_fails = False
    files.short_writes_next = 0
    log.append()
    assert writer.declare_losses()
    writer.close()

    found = read_all(writer.folder)
    # A waiting record that finds no room after all was promised: it is among the dropped, with a number.
    assert found.ledger.ordinal == writer.records == log.appended
    assert sum(found.ledger.dropped.values()) == writer.lost_records
    assert found.end == writer.end_offset
    assert len(_numbers(found)) == found.ledger.seen == len(found.frames)
    assert not set(log.lost) & set(_numbers(found))
    assert not found.gaps


class _AlarmError(Exception):
    """What a time limit's handler raises."""


def test_a_handler_that_raises_at_any_system_call_leaves_a_sound_stream(tmp_path: Path) -> None:
    for seed in range(12):
        print(f"seed {seed}")
        _append_and_raise(tmp_path / str(seed), seed)


def _append_and_raise(spool: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = Interrupting(seed)
    writer = StreamWriter(str(spool), make_header(), files=files, segment_bytes_max=400)
    log = Log(writer)

    def handler(_call: str) -> None:
        if rng.random() < 0.05:
            raise _AlarmError
        if rng.random() < 0.1:
            log.append("text")

    files.handler = handler
    raised = 0
    for _ in range(200):
        try:
            log.append(rng.choice([METRICS, METRICS, METRICS, "text"]))
        except _AlarmError:
            raised += 1
    files.handler = lambda _call: None
    log.append()
    writer.close()

    found = read_all(writer.folder)
    assert raised
    assert not found.gaps
    assert found.ledger.ordinal == writer.records == log.appended
    assert found.end == writer.end_offset
    assert set(log.kept) <= set(_numbers(found))


@pytest.mark.timeout(120, method="thread")
def test_a_handler_that_raises_in_real_time_leaves_a_sound_stream(tmp_path: Path) -> None:
    writer = StreamWriter(str(tmp_path), make_header(), segment_bytes_max=5_000)
    log = Log(writer)

    def handler(_signal: int, frame: FrameType | None) -> None:
        if frame is None or "verl_shipper_spool" not in frame.f_code.co_filename:
            return  # somebody's callback in a garbage collection: what it raises goes nowhere
        while frame is not None:
            if frame.f_code is StreamWriter.append.__code__:
                raise _AlarmError
            frame = frame.f_back

    raised = 0
    with _alarm(handler, 0.0007):
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s:
            try:
                log.append(METRICS if log.appended % 10 else "text")
            except _AlarmError:
                raised += 1
    log.append()
    writer.close()

    found = read_all(writer.folder)
    assert raised > 10
    assert not found.gaps
    assert found.ledger.ordinal == writer.records
    assert found.end == writer.end_offset
    assert set(log.kept) <= set(_numbers(found))


def test_threads_behind_one_lock_lose_and_double_nothing(tmp_path: Path) -> None:
    writer = StreamWriter(str(tmp_path), make_header(), segment_bytes_max=20_000)
    lock = threading.RLock()
    log = Log(writer)

    def work() -> None:
        for _ in range(2_000):
            with lock:
                log.append()

    threads = [threading.Thread(target=work) for _ in range(4)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            writer.sync()  # the sender's part: no lock
    finally:
        sys.setswitchinterval(interval_s)
    for thread in threads:
        thread.join()
    writer.close()

    assert log.kept == list(range(8_000)) == read_all(writer.folder).numbers
