"""The console backend prints what verl would, one write a batch, and never dies of a closed stream."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.batches import batch, item, metrics, run_info
from support.memory import FakeMemory
from verl_shipper.backends.base import Delivered, Park
from verl_shipper.backends.console import ConsoleBackend
from verl_shipper.errors import ConfigError
from verl_shipper_spool.record import RecordKind


class Pipe:
    """Stands in for the process's stdout."""

    closed = False

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()

    def fileno(self) -> int:
        return self._writer

    def read(self) -> str:
        return os.read(self.reader, 1 << 16).decode()


@pytest.fixture
def stdout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    pipe = Pipe()
    monkeypatch.setattr(sys, "__stdout__", pipe)
    yield pipe
    os.close(pipe.fileno())


def made(**settings: Any) -> ConsoleBackend:
    return ConsoleBackend(run_info(), settings, FakeMemory())


def test_metrics_are_printed_as_verl_prints_them(stdout: Pipe) -> None:
    body = {"actor/loss": 0.25, "n": 3, "text": "no", "a": {"b": math.nan}}

    outcome = made().upload(batch(metrics(0, body, step=12)))

    assert stdout.read() == "step:12 - actor/loss:0.25 - n:3 - a/b:nan\n"
    assert outcome == Delivered(ignored={"text": 1})


def test_every_kind_that_is_shown_gets_one_line(stdout: Pipe) -> None:
    made().upload(
        batch(
            item(RecordKind.RUN_START, {}, ordinal=0, step=None),
            metrics(1, {"n": 1}, rank=3),
            item(RecordKind.GENERATIONS, {"rows": [["a"], ["b"]]}, ordinal=2, step=5),
            item(RecordKind.GENERATIONS, {"rows": [["a"]], "name": "training/groups"}, ordinal=2, step=5),
            item(RecordKind.RUN_START, {"forked": True}, ordinal=2, step=None),  # a helper of the run
            item(RecordKind.TEXT, {"note": "long text"}, ordinal=3, step=6),
            item(RecordKind.SPAN, {"name": "generate"}, ordinal=4),
            item(RecordKind.RUN_FINISH, {"exit_code": None}, ordinal=5, step=None),
        )
    )

    assert stdout.read().splitlines() == [
        "run experiment started",
        "[rank 3] step:1 - n:1",
        "step:5 - generations:2",
        "step:5 - training/groups:1",
        "step:6 - text:note",
        "run experiment finished, exit code unknown",
    ]


def test_a_batch_is_one_write(stdout: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    real = os.write

    def write(fd: int, content: bytes) -> int:
        writes.append(fd)
        return real(fd, content)

    monkeypatch.setattr(os, "write", write)

    made().upload(batch(*(metrics(ordinal) for ordinal in range(50))))

    assert writes == [stdout.fileno()]
    assert len(stdout.read().splitlines()) == 50


def test_no_name_breaks_a_line_or_drives_the_terminal(stdout: Pipe) -> None:
    made().upload(batch(metrics(0, {"a\nb": 1, "\x1b[2J": 2, "\ud83d": 3, "奖励": 4})))

    assert stdout.read() == "step:0 - a?b:1 - ?[2J:2 - \ufffd:3 - 奖励:4\n"


def test_a_reader_that_went_away_parks_the_lane(stdout: Pipe) -> None:
    os.close(stdout.reader)

    assert made().upload(batch(metrics(0))) == Park("stdout is closed")


def test_a_process_without_stdout_parks_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "__stdout__", None)

    assert made().open() == made().upload(batch(metrics(0))) == Park("stdout is closed")


def test_stderr_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe()
    monkeypatch.setattr(sys, "__stderr__", pipe)
    try:
        assert made(stream="stderr").open() is None
        made(stream="stderr").upload(batch(metrics(0, {"n": 1})))
        assert pipe.read() == "step:0 - n:1\n"
    finally:
        os.close(pipe.fileno())
        os.close(pipe.reader)


def test_an_unknown_stream_is_a_configuration_error() -> None:
    ConsoleBackend.check({})
    with pytest.raises(ConfigError, match="use stdout or stderr"):
        ConsoleBackend.check({"stream": str(Path("/dev/null"))})


def test_there_is_nothing_to_rebuild_a_watermark_from() -> None:
    assert made().watermark() == {}
