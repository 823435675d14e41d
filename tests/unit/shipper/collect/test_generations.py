"""Dumps of generations become tables: each content once, whatever happens to the file that holds it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.collecting import Collected, dump, samples
from verl_shipper.collect import lines, tables


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Collected]:
    made = Collected(tmp_path)
    yield made
    made.close()


def outputs(bench: Collected) -> list[str]:
    """All cells of the column `output`, in the order of steps and parts."""
    found = sorted(bench.of("generations"), key=lambda each: (each.step or 0, each.body["call"], each.body["part"]))
    return [row[record.body["columns"].index("output")] for record in found for row in record.body["rows"]]


def test_a_dump_is_a_named_table_at_its_step(bench: Collected) -> None:
    (bench.folder / "12.jsonl").write_text(dump(samples(12, 3)))

    bench.settle()

    (record,) = bench.of("generations")
    assert record.step == 12
    assert record.body["name"] == "rollouts"
    assert record.body["columns"] == ["input", "output", "gts", "score", "step", "acc"]
    assert record.body["rows"][1] == ["q1", "a1", "1", 0.5, 12, 1.0]
    assert (record.body["part"], record.body["parts"], record.body["call"]) == (0, 1, 0)
    assert bench.figures()["files"] == 1


def test_a_validation_is_the_table_without_a_name(tmp_path: Path) -> None:
    bench = Collected(tmp_path)
    bench.entries = [bench.entry(kind="generations", table="validation")]
    (bench.folder / "0.jsonl").write_text(dump(samples(0, 1)))
    bench.settle()

    (record,) = bench.of("generations")
    assert "name" not in record.body
    bench.close()


def test_verls_columns_come_first_and_those_of_later_rows_too(bench: Collected) -> None:
    rows: list[dict[str, Any]] = [{"acc": 1, "output": "o", "input": "i"}, {"input": "i", "tool": "x", "output": "o"}]
    (bench.folder / "1.jsonl").write_text(dump(rows))

    bench.settle()

    (record,) = bench.of("generations")
    assert record.body["columns"] == ["input", "output", "acc", "tool"]
    assert record.body["rows"] == [["i", "o", 1, None], ["i", "o", None, "x"]]


def test_a_large_dump_is_cut_into_parts_that_make_it_whole(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PART_BYTES", 1000)
    (bench.folder / "3.jsonl").write_text(dump(samples(3, 200)))

    bench.settle()

    found = sorted(bench.of("generations"), key=lambda each: int(each.body["part"]))
    assert [each.body["part"] for each in found] == list(range(len(found)))
    assert {each.body["parts"] for each in found} == {len(found)}
    assert len(found) > 10
    assert outputs(bench) == [f"a{index}" for index in range(200)]


def test_the_same_content_written_again_is_nothing_new(bench: Collected) -> None:
    for _ in range(3):
        (bench.folder / "10.jsonl").write_text(dump(samples(10, 2)))
        bench.settle()

    assert outputs(bench) == ["a0", "a1"]
    assert bench.figures()["known"] == 2


def test_another_content_of_the_same_step_is_another_call(bench: Collected) -> None:
    for mark in ("x", "y"):
        (bench.folder / "10.jsonl").write_text(dump(samples(10, 1, mark)))
        bench.settle()

    assert [record.body["call"] for record in bench.of("generations")] == [0, 1]
    assert outputs(bench) == ["ax0", "ay0"]


def test_a_copy_and_a_renamed_folder_are_nothing_new(tmp_path: Path) -> None:
    bench = Collected(tmp_path)
    bench.entries = [bench.entry(recursive=True)]
    first = bench.folder / "first"
    first.mkdir()
    (first / "1.jsonl").write_text(dump(samples(1, 2)))
    bench.settle()
    shutil.copytree(first, bench.folder / "copy")
    bench.settle()
    first.rename(bench.folder / "renamed")
    bench.settle()

    assert outputs(bench) == ["a0", "a1"]
    bench.close()


def test_a_bad_line_costs_only_itself_and_is_told(bench: Collected) -> None:
    good = [json.dumps(row) for row in samples(5, 3)]
    content = "\n".join([good[0], '{"output": "half', "[1]", "", good[1], good[2], '{"output": "tor'])
    (bench.folder / "5.jsonl").write_text(content)

    bench.settle()

    assert outputs(bench) == ["a0", "a1", "a2"]
    figures = bench.figures()
    assert {reason: figures[reason] for reason in ("no_json", "no_record", "torn_line")} == {
        "no_json": 1,
        "no_record": 1,
        "torn_line": 1,
    }


def test_a_last_line_without_its_end_counts_when_it_is_whole(bench: Collected) -> None:
    (bench.folder / "5.jsonl").write_text(dump(samples(5, 2)).rstrip("\n"))

    bench.settle()

    assert outputs(bench) == ["a0", "a1"]


def test_a_line_that_is_too_long_costs_only_itself(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "cut", lambda blocks, offset: lines.cut(blocks, offset, bytes_max=200))
    rows = samples(5, 4)
    rows[2]["output"] = "x" * 5000
    (bench.folder / "5.jsonl").write_text(dump(rows))

    bench.settle()

    assert outputs(bench) == ["a0", "a1", "a3"]
    assert bench.figures()["line_too_long"] == 1


def test_odd_values_arrive_or_cost_themselves(bench: Collected) -> None:
    text = '{"output": "\\ud800x", "score": NaN, "big": 123456789012345678901234567890, "deep": %s}\n'
    (bench.folder / "5.jsonl").write_text(text % ("[" * 200 + "]" * 200))

    bench.settle()

    (record,) = bench.of("generations")
    row = dict(zip(record.body["columns"], record.body["rows"][0], strict=True))
    assert row["output"] == "\ufffdx"
    assert row["score"] != row["score"]
    assert row["big"] == pytest.approx(1.2345678901234568e29)


def test_an_empty_dump_is_done_with(bench: Collected) -> None:
    (bench.folder / "5.jsonl").touch()

    bench.settle()

    assert bench.of("generations") == []


def test_files_that_are_none_of_an_entrys_kind_are_left_alone(bench: Collected) -> None:
    for name in ("notes.txt", ".5.jsonl", "5.jsonl.tmp", "latest_checkpointed_iteration.txt"):
        (bench.folder / name).write_text("{}\n")
    os.mkfifo(bench.folder / "6.jsonl")
    (bench.folder / "7.jsonl").mkdir()
    (bench.folder / "8.jsonl").symlink_to(bench.folder / "8.jsonl")

    bench.settle()

    assert bench.records() == []


def test_names_of_any_bytes_are_taken(bench: Collected) -> None:
    folder = os.path.join(os.fsencode(bench.folder), b"a\nb\xff")
    bench.entries = [bench.entry(recursive=True)]
    os.mkdir(folder)
    for name in (b"3.jsonl", b"4.jsonl"):
        with open(os.path.join(folder, name), "w") as file:
            file.write(dump(samples(3, 1, name.decode())))

    bench.settle()

    assert len(outputs(bench)) == 2
    assert bench.figures()["files"] == 2


def test_a_file_nobody_may_read_is_refused_now_and_taken_later(
    bench: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_shipper.collect.place.REFUSED_PAUSE_S", 0.05)
    (bench.folder / "1.jsonl").write_text(dump(samples(1, 1)))
    real = os.open

    def refuse(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith("1.jsonl"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr("verl_shipper.collect.work.os.open", refuse)
        bench.settle()
        assert bench.figures()["unreadable: Permission denied"] == 1
        assert bench.of("generations") == []
    bench.until(lambda: bench.figures().get("files"), "it is taken")

    assert outputs(bench) == ["a0"]


def test_a_file_that_went_before_it_was_taken_is_counted(tmp_path: Path) -> None:
    bench = Collected(tmp_path)
    bench.entries = [bench.entry(stable_s=100.0)]
    (bench.folder / "1.jsonl").write_text(dump(samples(1, 1)))
    bench.turn(3)
    (bench.folder / "1.jsonl").unlink()
    bench.settle()

    assert bench.figures()["gone"] == 1
    bench.close()


def test_a_file_that_is_still_written_waits_until_the_next_step_begins(tmp_path: Path) -> None:
    bench = Collected(tmp_path)
    bench.entries = [bench.entry(stable_s=100.0)]
    (bench.folder / "1.jsonl").write_text(dump(samples(1, 1)))
    bench.turn(5)
    assert bench.of("generations") == []
    found = os.stat(bench.folder / "1.jsonl")
    (bench.folder / "2.jsonl").write_text("")
    os.utime(bench.folder / "2.jsonl", ns=(0, found.st_mtime_ns + 1))

    bench.until(lambda: bench.figures().get("files"), "the first is taken")

    assert [record.step for record in bench.of("generations")] == [1]
    bench.close()


def test_the_next_steps_file_of_an_attempt_before_says_nothing(tmp_path: Path) -> None:
    bench = Collected(tmp_path)
    bench.entries = [bench.entry(stable_s=100.0)]
    (bench.folder / "2.jsonl").write_text(dump(samples(2, 1)))
    os.utime(bench.folder / "2.jsonl", ns=(0, 10**9))
    bench.until(lambda: bench.figures().get("files"), "an old file is taken at once")
    (bench.folder / "1.jsonl").write_text(dump(samples(1, 1)))
    bench.turn(5)

    assert [record.step for record in bench.of("generations")] == [2]
    bench.close()


def test_a_table_whose_file_changes_in_its_midst_goes_on_with_the_new_one(
    bench: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "PART_BYTES", 100)
    monkeypatch.setattr("verl_shipper.collect.collector.TURN_S", 0.0)
    (bench.folder / "1.jsonl").write_text(dump(samples(1, 50, "old")))
    bench.start()
    bench.until(lambda: len(bench.of("generations")) >= 5, "some parts are kept")
    assert bench.figures().get("files", 0) == 0
    (bench.folder / "1.jsonl").write_text(dump(samples(1, 50, "new")))
    monkeypatch.setattr("verl_shipper.collect.collector.TURN_S", 0.2)
    bench.settle()

    found = outputs(bench)
    assert [each for each in found if "new" in each] == [f"anew{index}" for index in range(50)]
    assert len(set(found)) == len(found) < 100
    assert bench.figures()["changed"] == 1
