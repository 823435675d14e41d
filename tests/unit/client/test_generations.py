"""Generations: samples of any shape become a table, a table becomes records that fit."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from verl_shipper_client.generations import CALLS_REMEMBERED_MAX, COLUMNS, PART_CHARS_MAX, CallCounter, parts, table
from verl_shipper_client.values import to_plain
from verl_shipper_spool.frame import PAYLOAD_BYTES_MAX
from verl_shipper_spool.record import Unsupported


def test_tuples_are_rows_of_the_columns_named() -> None:
    assert table([("q", "a", 1.0), ["q2", "a2", 0.0]], COLUMNS) == (
        ["input", "output", "score"],
        [["q", "a", 1.0], ["q2", "a2", 0.0]],
    )


def test_dicts_bring_their_own_columns_in_the_order_of_the_first() -> None:
    names, rows = table([{"gts": "4", "input": "2+2"}, {"input": "3+3", "extra": 1}], COLUMNS)

    assert names == ["gts", "input"]
    assert rows == [["4", "2+2"], [None, "3+3"]]


@pytest.mark.parametrize("sample", ["text", 7, None, {"a", "b"}, object()])
def test_a_sample_that_is_no_sequence_is_a_row_of_one_cell(sample: Any) -> None:
    _, rows = table([("q", "a", 1.0), sample], COLUMNS)

    assert len(rows) == 2
    assert len(rows[1]) == 1


def test_a_row_that_is_no_dict_among_dicts_is_kept() -> None:
    assert table([{"a": 1}, "odd"], COLUMNS) == (["a"], [[1], ["odd"]])


def test_cells_become_plain() -> None:
    _, rows = table([("a\ud800", np.float32(0.5), object())], COLUMNS)

    assert rows[0][:2] == ["a�", 0.5]
    assert isinstance(rows[0][2], Unsupported)


def test_samples_may_come_from_a_generator() -> None:
    _, rows = table((("q", str(number), 0) for number in range(3)), COLUMNS)

    assert [row[1] for row in rows] == ["0", "1", "2"]


def test_long_texts_are_cut_with_a_marker_wherever_they_stand() -> None:
    long = "x" * 1_200_000
    _, rows = table([(long, [{"role": "user", "content": long}], 1.0)], COLUMNS)

    marker = "…[cut: 1000000 of 1200000 characters]"
    assert rows[0][0].endswith(marker)
    assert rows[0][1][0]["content"].endswith(marker)


def test_a_small_table_is_one_part() -> None:
    (body,) = parts(["a"], [["x"], ["y"]], call=3)

    assert body == {"columns": ["a"], "rows": [["x"], ["y"]], "part": 0, "parts": 1, "call": 3}


def test_an_empty_table_is_one_empty_record() -> None:
    names, rows = table([], COLUMNS)

    assert [body["rows"] for body in parts(names, rows, 0)] == [[]]


@pytest.mark.parametrize(
    "cell",
    ["𝄞" * 40_000, b"x" * 40_000, [{"role": "user", "content": "𝄞" * 40_000}], {"deep": {"er": ["é" * 40_000]}}],
    ids=["text", "bytes", "conversation", "nested"],
)
def test_every_part_fits_a_frame_and_no_row_is_lost(cell: Any) -> None:
    names, rows = table([(cell, "a", number) for number in range(600)], COLUMNS)

    made = list(parts(names, rows, 0))

    assert [row[2] for body in made for row in body["rows"]] == list(range(600))
    assert [body["part"] for body in made] == list(range(len(made)))
    assert {body["parts"] for body in made} == {len(made)}
    assert len(made) > 1
    for body in made:
        assert len(msgpack.packb(body, default=to_plain)) < PAYLOAD_BYTES_MAX / 2


def test_one_row_larger_than_a_part_is_a_part_of_its_own() -> None:
    big = "x" * (PART_CHARS_MAX - 1)
    made = list(parts(["a"], [["s"], [big], ["s"]], 0))

    assert [len(body["rows"]) for body in made] == [2, 1]


def test_calls_of_a_step_are_numbered_and_old_steps_are_forgotten() -> None:
    counter = CallCounter()

    assert [counter.next(5), counter.next(5), counter.next(6), counter.next(None), counter.next(None)] == [
        0,
        1,
        0,
        0,
        1,
    ]
    for step in range(1000, 1000 + 3 * CALLS_REMEMBERED_MAX):
        counter.next(step)
    assert len(counter._calls) == CALLS_REMEMBERED_MAX
