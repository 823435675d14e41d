"""Traces and snapshots are shipped as they are: each content whole and once."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.collecting import Collected
from verl_shipper.collect import wholes


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Collected]:
    made = Collected(tmp_path)
    made.entries = [made.entry(kind="file", recursive=True)]
    yield made
    made.close()


def shipped(bench: Collected) -> dict[str, tuple[int | None, str, bytes]]:
    """Whole files by name: step, purpose, content."""
    parts: dict[bytes, bytearray] = {}
    found = {}
    for record in bench.of("file"):
        body = record.body
        whole = parts.setdefault(body["file_id"], bytearray())
        assert body["offset"] == len(whole)
        whole += body["data"]
        if "sha256" in body:
            assert hashlib.sha256(whole).digest() == body["sha256"]
            assert body["name"] not in found, "it came twice"
            found[body["name"]] = (record.step, body["purpose"], bytes(whole))
    return found


def test_files_arrive_with_name_step_and_purpose(bench: Collected) -> None:
    content = os.urandom(1_500_000)
    (bench.folder / "step_4").mkdir()
    (bench.folder / "actor_train_step12_rank0-of-8_pid7_1.json.gz").write_bytes(content)
    (bench.folder / "step_4" / "torch_memory_rank0_pid7.pickle").write_bytes(b"p" * 10)
    (bench.folder / "worker_process_7.nsys-rep").write_bytes(b"n")
    (bench.folder / "x.pt.trace.json").write_bytes(b"{}" * 1000)

    bench.settle()

    found = shipped(bench)
    assert found["actor_train_step12_rank0-of-8_pid7_1.json.gz"] == (12, "profile", content)
    assert found["step_4/torch_memory_rank0_pid7.pickle"] == (4, "memory", b"p" * 10)
    assert found["worker_process_7.nsys-rep"] == (None, "profile", b"n")
    step, purpose, packed = found["x.pt.trace.json.gz"]
    assert (step, purpose, gzip.decompress(packed)) == (None, "profile", b"{}" * 1000)


def test_the_same_file_again_is_nothing_new_and_another_content_is(bench: Collected) -> None:
    path = bench.folder / "a_step1_x.pickle"
    path.write_bytes(b"1")
    bench.settle()
    path.write_bytes(b"1")
    bench.settle()
    assert len(bench.of("file")) == 1
    path.write_bytes(b"2")
    bench.settle()

    assert [record.body["data"] for record in bench.of("file")] == [b"1", b"2"]
    assert bench.figures()["known"] == 1


def test_a_file_that_is_too_large_is_refused_and_told(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wholes, "FILE_BYTES_MAX", 10)
    (bench.folder / "a.pickle").write_bytes(b"x" * 11)
    bench.settle()

    assert bench.records() == []
    assert bench.figures()["too_large"] == 1


def test_a_file_that_changes_while_it_is_read_is_not_completed(
    bench: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_shipper.collect.collector.TURN_S", 0.0)
    path = bench.folder / "a.pickle"
    path.write_bytes(os.urandom(2_000_000))
    bench.until(lambda: bench.of("file"), "a part is kept")
    path.write_bytes(b"short")
    bench.settle()

    assert shipped(bench) == {"a.pickle": (None, "memory", b"short")}


def test_a_pattern_names_files_of_any_name(tmp_path: Path) -> None:
    bench = Collected(tmp_path)
    bench.entries = [bench.entry(f"{bench.folder}/**/*.txt", kind="file", purpose="file")]
    (bench.folder / "deep" / "er").mkdir(parents=True)
    (bench.folder / "deep" / "er" / "a.txt").write_bytes(b"a")
    (bench.folder / "b.txt").write_bytes(b"b")
    (bench.folder / "b.pickle").write_bytes(b"b")
    bench.settle()

    assert {name: each[1] for name, each in shipped(bench).items()} == {"deep/er/a.txt": "file", "b.txt": "file"}
    bench.close()
