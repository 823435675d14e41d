"""`kill -9` of a writer: what `append` said is what a reader finds, on a healthy disk and on a full one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from struct import Struct

from support.seeds import seeded
from support.streams import Found, make_header, payload, read_all
from verl_shipper_spool.header import StreamHeader
from verl_shipper_spool.testing import FaultyFiles
from verl_shipper_spool.writer import StreamWriter

_TOLD = Struct("<I?")


def _killed(work: Callable[[Callable[[int, bool], object]], None], life_s: float) -> tuple[list[int], list[int]]:
    """Run `work(tell)` in a child that is killed after `life_s`; the numbers it told to be kept, and to be lost."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            work(lambda number, kept: os.write(writing, _TOLD.pack(number, kept)))
        finally:
            os._exit(1)
    os.close(writing)
    told = b""
    deadline_s = None
    while part := os.read(reading, 65536):
        told += part
        deadline_s = deadline_s or time.monotonic() + life_s  # its life begins with its first word
        if time.monotonic() >= deadline_s:
            os.kill(pid, signal.SIGKILL)
    os.close(reading)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    whole = len(told) // _TOLD.size * _TOLD.size
    pairs = list(_TOLD.iter_unpack(told[:whole]))
    return [number for number, kept in pairs if kept], [number for number, kept in pairs if not kept]


def _folder(spool: Path, header: StreamHeader) -> str:
    return os.path.join(spool, header.stream_id)


def _assert_exact(found: Found, kept: list[int], lost: list[int], reason: str = "disk_full") -> None:
    """All that was told, and at most one record more: the one the killed call was about."""
    offered = len(kept) + len(lost)
    assert found.ledger.ordinal in (offered, offered + 1)
    assert found.numbers[: len(kept)] == kept
    assert found.ledger.seen - len(kept) + found.ledger.dropped.get(reason, 0) - len(lost) in (0, 1)
    assert set(found.ledger.dropped) <= {reason}
    assert not found.damages
    assert not found.gaps


def test_what_was_kept_is_there_after_a_kill_and_what_was_lost_is_counted(tmp_path: Path) -> None:
    rng = seeded("killed writer")
    for _ in range(15):
        header = make_header()
        seed = rng.randrange(1 << 32)

        def work(tell: Callable[[int, bool], object], header: StreamHeader = header, seed: int = seed) -> None:
            files = FaultyFiles(seed)
            writer = StreamWriter(str(tmp_path), header, files=files, segment_bytes_max=2_000)
            while True:
                if files.random.random() < 0.03:
                    files.full = not files.full and writer.records > 0
                tell(writer.records, writer.append(payload(writer.records), "metrics"))

        kept, lost = _killed(work, rng.uniform(0, 0.1))

        _assert_exact(read_all(_folder(tmp_path, header), journal=True), kept, lost)


def test_on_a_real_full_disk_the_journal_survives_a_kill_with_exact_numbers(tight_disk: Path) -> None:
    header = make_header()

    def work(tell: Callable[[int, bool], object]) -> None:
        writer = StreamWriter(str(tight_disk), header)
        while True:
            tell(writer.records, writer.append(payload(writer.records, size_bytes=4_000), "metrics"))

    kept, lost = _killed(work, 1.0)

    assert len(lost) > 100
    _assert_exact(read_all(_folder(tight_disk, header), journal=True), kept, lost)


def test_a_kill_that_leaves_a_torn_frame_leaves_the_numbers_exact(tmp_path: Path) -> None:
    header = make_header()

    def work(tell: Callable[[int, bool], object]) -> None:
        files = FaultyFiles(seed=7)
        writer = StreamWriter(str(tmp_path), header, files=files)
        for number in range(10):
            tell(number, writer.append(payload(number), "metrics"))
        files.truncate_fails = files.full = True
        for number in range(10, 15):
            files.short_writes_next = 1
            tell(number, writer.append(payload(number), "metrics"))
        os.kill(os.getpid(), signal.SIGKILL)

    kept, lost = _killed(work, 60.0)
    found = read_all(_folder(tmp_path, header), journal=True)

    assert (kept, lost) == (list(range(10)), list(range(10, 15)))
    assert (found.numbers, found.ledger.dropped) == (kept, {"disk_full": 5})
