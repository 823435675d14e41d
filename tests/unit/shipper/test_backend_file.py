"""The file backend: strict JSON lines, each record once, whatever was killed when."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest

from support.batches import STREAM, batch, item, metrics, run_info
from support.memory import FakeMemory
from verl_shipper.backends import file as file_module
from verl_shipper.backends.base import Batch, Delivered, Retry, RunInfo
from verl_shipper.backends.file import FileBackend
from verl_shipper.errors import ConfigError
from verl_shipper_spool.record import RecordKind, Unsupported

OTHER_STREAM = "7" * 32


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


@pytest.fixture
def backend(tmp_path: Path, memory: FakeMemory) -> FileBackend:
    return made(tmp_path, memory)


def made(folder: Path, memory: FakeMemory, run: RunInfo | None = None) -> FileBackend:
    backend = FileBackend(run or run_info(), {"dir": str(folder)}, memory)
    assert backend.open() is None
    return backend


def delivered(backend: FileBackend, sent: Batch, memory: FakeMemory | None = None) -> Delivered:
    """Upload, and commit as the lane does when a memory is given."""
    outcome = backend.upload(sent)
    assert isinstance(outcome, Delivered), outcome
    if memory is not None:
        memory.remember(outcome.remember)
    return outcome


def lines(backend: FileBackend) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"not strict JSON: {word}")

    content = Path(backend.path).read_bytes()
    assert content == b"" or content.endswith(b"\n")
    return [json.loads(line, parse_constant=refuse) for line in content.splitlines()]


def ordinals(backend: FileBackend) -> list[int]:
    return [int(line["id"].rpartition(":")[2]) for line in lines(backend)]


def test_a_record_becomes_one_line_with_its_frozen_fields(backend: FileBackend, tmp_path: Path) -> None:
    sent = metrics(4, {"loss": 0.5, "a": {"b": True}}, step=3, rank=2)

    delivered(backend, batch(sent))

    assert Path(backend.path) == tmp_path / "project" / "experiment-run1.jsonl"
    assert lines(backend) == [
        {
            "kind": "metrics",
            "run_id": "run1",
            "rank": 2,
            "seq": 4,
            "step": 3,
            "time_ns": sent.record.time_ns,
            "data": {"loss": 0.5, "a/b": 1},
            "id": f"{STREAM}:4",
        }
    ]


def test_every_line_is_strict_json_whatever_the_values(backend: FileBackend) -> None:
    odd = {"nan": math.nan, "up": math.inf, "down": -math.inf, "big": 2**64, "k\ud83d": 1, "奖励": 2.0, "t": "text"}

    outcome = delivered(backend, batch(metrics(0, odd, step=None), metrics(1, {"m": Unsupported("Tensor"), "ok": 1})))

    first, second = lines(backend)
    assert first["data"] == {
        "nan": "NaN",
        "up": "Infinity",
        "down": "-Infinity",
        "big": 2**64,
        "k\ufffd": 1,
        "奖励": 2.0,
    }
    assert first["step"] is None
    assert second["data"] == {"ok": 1}
    assert outcome.ignored == {"text": 1, "not_a_number": 1}


def test_other_kinds_keep_their_body_and_lose_their_secrets(backend: FileBackend) -> None:
    span = {"trace_id": b"\x01" * 16, "outputs": ["cut \ud83d", None]}
    config = {"lr": 1e-6, "swanlab": {"api_key": "SENTINEL"}}

    delivered(
        backend,
        batch(
            item(RecordKind.SPAN, span, ordinal=0),
            item(RecordKind.RUN_START, {"config": config}, ordinal=1, step=None),
            item(RecordKind.GENERATIONS, {"columns": ["a"], "rows": [["x"]]}, ordinal=2),
        ),
    )

    kinds = {line["kind"]: line["data"] for line in lines(backend)}
    assert kinds["span"] == {"trace_id": "01" * 16, "outputs": ["cut \ufffd", None]}
    assert kinds["run_start"]["config"] == {"lr": 1e-6, "swanlab": {"api_key": "[redacted]"}}
    assert kinds["generations"] == {"columns": ["a"], "rows": [["x"]]}


def test_batches_follow_each_other(backend: FileBackend, memory: FakeMemory) -> None:
    delivered(backend, batch(metrics(0), metrics(1)), memory)
    delivered(backend, batch(metrics(2)), memory)

    assert ordinals(backend) == [0, 1, 2]
    assert memory.get("offset") == os.path.getsize(backend.path)


def test_a_batch_whose_commit_was_lost_is_not_doubled(backend: FileBackend, memory: FakeMemory) -> None:
    delivered(backend, batch(metrics(0)), memory)
    sent = batch(metrics(1), metrics(2))

    for _attempt in range(3):
        delivered(backend, sent)

    assert ordinals(backend) == [0, 1, 2]


def test_every_cut_of_the_last_upload_is_mended(tmp_path: Path) -> None:
    """Killed anywhere inside the append: whatever is behind the committed offset, the file ends up right."""
    whole_memory = FakeMemory()
    whole = made(tmp_path / "whole", whole_memory)
    delivered(whole, batch(metrics(0)), whole_memory)
    committed = whole_memory.get("offset")
    sent = batch(metrics(1), metrics(2))
    delivered(whole, sent)
    right = Path(whole.path).read_bytes()

    for size in range(committed, len(right) + 1):
        memory = FakeMemory()
        memory.put("offset", committed)
        cut = made(tmp_path / f"cut{size}", memory)
        Path(cut.path).write_bytes(right[:size])

        outcome = delivered(cut, sent)

        assert Path(cut.path).read_bytes() == right, size
        assert outcome.remember == {"offset": len(right)}


@pytest.mark.parametrize(
    "garbage", [b"\0" * 4096, b"\xff\xfe garbage", b'{"torn": ', b"not json\n", b'{"id": 3', b"\n\n"]
)
def test_garbage_behind_the_committed_offset_is_cut_off(
    backend: FileBackend, memory: FakeMemory, garbage: bytes
) -> None:
    delivered(backend, batch(metrics(0)), memory)
    with Path(backend.path).open("ab") as file:
        file.write(garbage)

    delivered(backend, batch(metrics(1)), memory)

    assert ordinals(backend) == [0, 1]


def test_lost_lane_state_cuts_a_torn_line_and_doubles_nothing(backend: FileBackend, tmp_path: Path) -> None:
    delivered(backend, batch(metrics(0), metrics(1), metrics(2)))
    with Path(backend.path).open("ab") as file:
        file.write(b'{"kind":"metrics","run_id":"ru')

    again = made(tmp_path, FakeMemory())
    delivered(again, batch(metrics(1), metrics(2), metrics(3)))

    assert ordinals(again) == [0, 1, 2, 3]


def test_the_watermark_is_rebuilt_from_the_lines(backend: FileBackend, tmp_path: Path) -> None:
    delivered(backend, batch(metrics(0), metrics(5, stream_id=OTHER_STREAM), metrics(2), metrics(1)))
    with Path(backend.path).open("ab") as file:
        file.write(b'{"id":"' + STREAM.encode() + b':99"')

    assert made(tmp_path, FakeMemory()).watermark() == {STREAM: 3, OTHER_STREAM: 6}


def test_there_is_no_watermark_without_a_file(backend: FileBackend) -> None:
    assert backend.watermark() == {}


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_rotated_file_is_gone_on_with_and_told(
    backend: FileBackend, memory: FakeMemory, caplog: pytest.LogCaptureFixture, is_deleted: bool
) -> None:
    delivered(backend, batch(metrics(0)), memory)
    path = Path(backend.path)
    path.unlink() if is_deleted else os.truncate(path, 0)

    with caplog.at_level(logging.WARNING):
        delivered(backend, batch(metrics(1)), memory)
        delivered(backend, batch(metrics(2)), memory)

    assert ordinals(backend) == [1, 2]
    assert [record.message.count("going on from its end") for record in caplog.records] == [1]


def test_a_deleted_folder_is_made_again(backend: FileBackend, memory: FakeMemory, tmp_path: Path) -> None:
    delivered(backend, batch(metrics(0)), memory)
    Path(backend.path).unlink()
    (tmp_path / "project").rmdir()

    delivered(backend, batch(metrics(1)), memory)

    assert ordinals(backend) == [1]


def test_two_daemons_share_the_file_of_a_run_without_harm(tmp_path: Path) -> None:
    memories = FakeMemory(), FakeMemory()
    daemons = [made(tmp_path, memory) for memory in memories]

    for number in range(6):
        stream_id = STREAM if number % 2 == 0 else OTHER_STREAM
        sent = batch(metrics(number, stream_id=stream_id))
        delivered(daemons[number % 2], sent)  # its commit is lost
        delivered(daemons[number % 2], sent, memories[number % 2])

    assert ordinals(daemons[0]) == [0, 1, 2, 3, 4, 5]


def test_a_file_that_another_daemon_is_writing_is_waited_for(backend: FileBackend) -> None:
    delivered(backend, batch(metrics(0)))
    fd = os.open(backend.path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        outcome = backend.upload(batch(metrics(1)))
    finally:
        os.close(fd)

    assert isinstance(outcome, Retry)
    assert outcome.after_s is not None
    assert ordinals(backend) == [0]


def test_a_full_disk_is_retried_and_leaves_no_half_line(
    backend: FileBackend, memory: FakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered(backend, batch(metrics(0)), memory)
    sent = batch(metrics(1))

    def half(fd: int, content: bytes) -> None:
        os.write(fd, content[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(file_module, "write_all", half)
        outcome = backend.upload(sent)

    assert isinstance(outcome, Retry)
    assert "No space left on device" in outcome.reason
    assert ordinals(backend) == [0]
    delivered(backend, sent, memory)
    assert ordinals(backend) == [0, 1]


def test_a_folder_that_cannot_be_made_is_retried_with_the_reason(tmp_path: Path, memory: FakeMemory) -> None:
    (tmp_path / "out").write_text("a file where a folder should be")

    outcome = FileBackend(run_info(), {"dir": str(tmp_path / "out")}, memory).open()

    assert isinstance(outcome, Retry)
    assert "cannot make the folder" in outcome.reason


@pytest.mark.parametrize(
    "name", ["../../etc", "..", ".", "", "a/b", "nul\0", "\ud83d", "x" * 500, "奖" * 300, "new\nline", "/abs"]
)
def test_hostile_names_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    backend = made(tmp_path, FakeMemory(), run_info(project=name, experiment=name, run_id=name))

    delivered(backend, batch(metrics(0), run=backend.run))

    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path) for path in found] == [backend.path]
    assert len(found[0].relative_to(tmp_path).parts) == 2
    assert all(len(os.fsencode(part)) <= 210 for part in found[0].relative_to(tmp_path).parts)
    assert ordinals(backend) == [0]


def test_names_that_had_to_be_changed_do_not_meet(tmp_path: Path) -> None:
    names = ["a/b", "a\0b", "a_b", "x" * 300, "x" * 301, "", "_", ".", "..", "\ud83d", "\ud83e"]

    paths = {made(tmp_path, FakeMemory(), run_info(project=name)).path for name in names}

    assert len(paths) == len(names)


def test_runs_whose_names_read_the_same_do_not_harm_each_other(tmp_path: Path) -> None:
    one, two = run_info(experiment="a-b", run_id="c"), run_info(experiment="a", run_id="b-c")
    first_memory, second_memory = FakeMemory(), FakeMemory()
    first, second = made(tmp_path, first_memory, one), made(tmp_path, second_memory, two)

    for ordinal in range(3):
        delivered(first, batch(metrics(ordinal), run=one), first_memory)
        delivered(second, batch(metrics(ordinal, stream_id=OTHER_STREAM), run=two), second_memory)

    assert sorted(line["run_id"] for line in lines(first)) == ["b-c"] * 3 + ["c"] * 3


@pytest.mark.parametrize("settings", [{}, {"dir": ""}, {"dir": None}, {"dir": 3}])
def test_a_missing_folder_is_a_configuration_error_that_says_what_to_set(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"backends\.file\.dir"):
        FileBackend.check(settings)


def test_a_folder_is_all_it_needs(tmp_path: Path) -> None:
    FileBackend.check({"dir": str(tmp_path)})
