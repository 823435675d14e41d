"""Lines of a growing file become metrics: each line of each of its lives once."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.collecting import Collected, dump, steps
from verl_shipper.collect import logs

NAME = "exp.jsonl"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Collected]:
    made = Collected(tmp_path)
    made.entries = [made.entry(kind="metrics", stable_s=100.0)]
    yield made
    made.close()


def losses(bench: Collected) -> list[float]:
    return [record.body["loss"] for record in bench.of("metrics")]


def write(bench: Collected, content: str, mode: str = "a", name: str = NAME) -> None:
    with open(bench.folder / name, mode) as file:
        file.write(content)


def take(bench: Collected) -> None:
    """Look and take; what is torn keeps waiting."""
    bench.look()


def test_lines_arrive_at_their_steps_as_they_are_written(bench: Collected) -> None:
    for first in (0, 3, 5):
        write(bench, dump(steps(first, first + 2)))
        take(bench)

    assert [(record.step, record.body) for record in bench.of("metrics")] == [
        (step, {"loss": step}) for step in (0, 1, 3, 4, 5, 6)
    ]
    assert (bench.figures()["files"], bench.figures()["records"]) == (1, 6)


def test_half_a_line_waits_for_its_other_half(bench: Collected) -> None:
    line = dump(steps(7, 8))
    write(bench, dump(steps(0, 1)) + line[:9])
    take(bench)
    assert losses(bench) == [0]
    write(bench, line[9:])
    take(bench)

    assert losses(bench) == [0, 7]
    bench.settle()


def test_a_flat_line_and_odd_ones(bench: Collected) -> None:
    write(bench, '{"step": 3, "a": 1, "b/c": NaN}\n\n{"step": "x", "data": {"a": null}}\nx\n[1]\n{"step": 4}\n')
    write(bench, '{"step": 5.0, "data": {"a": {"b": 2}}}\n')
    take(bench)

    first, second, third = bench.of("metrics")
    assert (first.step, first.body["a"]) == (3, 1)
    assert math.isnan(first.body["b/c"])
    assert (second.step, second.body) == (None, {"a": None})
    assert (third.step, third.body) == (5, {"a": {"b": 2}})
    assert (bench.figures()["no_json"], bench.figures()["no_record"]) == (1, 2)


def test_a_file_that_a_restart_made_shorter_is_read_anew(bench: Collected) -> None:
    write(bench, dump(steps(0, 5)))
    take(bench)
    write(bench, dump(steps(0, 2, 0.5)), "w")
    take(bench)

    assert losses(bench) == [0, 1, 2, 3, 4, 0.5, 1.5]
    assert bench.figures()["restarted"] == 1


@pytest.mark.parametrize("same_head", [False, True])
def test_a_file_that_grew_beyond_our_place_between_two_looks_is_read_anew(bench: Collected, same_head: bool) -> None:
    head = dump(steps(0, 200)) if same_head else ""
    write(bench, head + dump(steps(300, 305)))
    take(bench)
    before = losses(bench)
    write(bench, head + dump(steps(0, 100, 0.25)), "w")
    take(bench)

    assert losses(bench)[len(before) :] == [*(range(200) if same_head else ()), *(step + 0.25 for step in range(100))]


def test_a_file_copied_over_it_is_read_anew(bench: Collected) -> None:
    write(bench, dump(steps(0, 3)))
    take(bench)
    (bench.folder / "other").write_text(dump(steps(10, 20)))
    shutil.copyfile(bench.folder / "other", bench.folder / NAME)
    take(bench)

    assert losses(bench) == [0, 1, 2, *range(10, 20)]


def test_a_rotated_file_keeps_its_place_and_the_new_one_begins(tmp_path: Path) -> None:
    bench = Collected(tmp_path)
    bench.entries = [bench.entry(f"{bench.folder}/*.jsonl*", kind="metrics", stable_s=100.0)]
    write(bench, dump(steps(0, 3)))
    take(bench)
    write(bench, dump(steps(3, 5)))
    (bench.folder / NAME).rename(bench.folder / f"{NAME}.1")
    write(bench, dump(steps(5, 7)))
    take(bench)
    with open(bench.folder / f"{NAME}.1", "a") as file:
        file.write(dump(steps(7, 8)))
    take(bench)
    write(bench, dump(steps(8, 9)))
    take(bench)

    assert sorted(losses(bench)) == list(range(9))
    assert "restarted" not in bench.figures()
    bench.close()


def test_an_inode_that_is_used_again_is_another_file(bench: Collected) -> None:
    for turn in range(5):
        write(bench, dump(steps(turn, turn + 1)), "w", f"{turn}x.jsonl")
        take(bench)
        (bench.folder / f"{turn}x.jsonl").unlink()

    assert sorted(losses(bench)) == [0, 1, 2, 3, 4]


def test_a_torn_last_line_costs_nobody_else_and_is_told(tmp_path: Path) -> None:
    bench = Collected(tmp_path)
    bench.entries = [bench.entry(kind="metrics", stable_s=0.0)]
    write(bench, dump(steps(0, 2)) + '{"step": 2, "da')
    bench.settle()
    assert losses(bench) == [0, 1]
    assert bench.figures()["torn_line"] == 1
    write(bench, 'ta": {"loss": 2}}\n')
    bench.settle()

    assert losses(bench) == [0, 1, 2]
    assert "torn_line" not in bench.figures(), "it was only slow"
    bench.close()


def test_a_last_line_without_an_end_counts_once_it_stands_still(tmp_path: Path) -> None:
    bench = Collected(tmp_path)
    bench.entries = [bench.entry(kind="metrics", stable_s=0.0)]
    write(bench, dump(steps(0, 2)).rstrip("\n"))
    bench.settle()
    write(bench, "\n" + dump(steps(2, 3)))
    bench.settle()

    assert losses(bench) == [0, 1, 2]
    bench.close()


def test_an_endless_line_is_skipped_to_its_end(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LINE_BYTES_MAX", 1000)
    monkeypatch.setattr(logs, "CHUNK_BYTES", 100)
    write(bench, dump(steps(0, 2)) + "x" * 5000)
    take(bench)
    write(bench, "y" * 5000)
    take(bench)
    write(bench, "z\n" + dump(steps(2, 3)))
    take(bench)

    assert losses(bench) == [0, 1, 2]
    assert bench.figures()["line_too_long"] == 1


def test_a_hole_that_a_network_file_system_shows_for_a_moment_is_no_line(bench: Collected) -> None:
    line = dump(steps(1, 2))
    write(bench, dump(steps(0, 1)) + "\0" * (len(line) - 1) + "\n")
    take(bench)
    assert losses(bench) == [0]
    with open(bench.folder / NAME, "r+") as file:
        file.seek(len(dump(steps(0, 1))))
        file.write(line)
    take(bench)

    assert losses(bench) == [0, 1]


def test_many_lines_come_in_many_chunks(bench: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(logs, "RECORDS_MAX", 7)
    write(bench, dump(steps(0, 500)))
    bench.settle()

    assert losses(bench) == list(range(500))


@pytest.mark.parametrize("end", ["", '{"step": 3, "da'])
def test_what_is_there_already_can_be_skipped(tmp_path: Path, end: str) -> None:
    bench = Collected(tmp_path)
    bench.entries = [bench.entry(kind="metrics", existing="skip")]
    write(bench, dump(steps(0, 3)) + end)
    os.utime(bench.folder / NAME, (1, 1))
    bench.settle()
    rest = json.dumps({"step": 3, "data": {"loss": 3}})[len(end) :] + "\n"
    write(bench, rest + dump(steps(4, 5)))
    write(bench, dump(steps(9, 10)), name="new.jsonl")
    bench.settle()

    assert sorted(losses(bench)) == [3, 4, 9]
    assert bench.figures()["skipped"] == 1
    bench.close()


def test_names_of_any_bytes_are_taken(bench: Collected) -> None:
    folder = os.path.join(os.fsencode(bench.folder), b"a\nb\xff")
    bench.entries = [bench.entry(kind="metrics", recursive=True)]
    os.mkdir(folder)
    with open(os.path.join(folder, b"na\xffme.jsonl"), "w") as file:
        file.write(dump(steps(0, 2)))

    bench.settle()

    assert losses(bench) == [0, 1]


@pytest.mark.parametrize("date_s", [0, -1])
def test_a_file_without_a_date_is_taken_like_any_other(bench: Collected, date_s: int) -> None:
    write(bench, dump(steps(0, 2)))
    os.utime(bench.folder / NAME, (date_s, date_s))

    bench.settle()

    assert losses(bench) == [0, 1]
