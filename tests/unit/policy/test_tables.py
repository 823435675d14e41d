"""Rows of a validation: the same choice as verl makes, from a table of any number of parts and any shape."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from support.samples import ODD_BODIES, ODD_VALUES, judged, part, record, sampler
from verl_shipper.policy import stream_sampler
from verl_shipper.policy.stream_sampler import BY_ROW, Decision
from verl_shipper.policy.tables import Table, is_first, is_last, key_of, picked, rows_of
from verl_shipper_spool.record import Record, RecordKind


def _verl(samples: list[tuple[str, Any, Any]], count: int) -> list[tuple[str, Any, Any]]:
    """As verl's `_maybe_log_val_generations` does it."""
    samples = list(samples)
    samples.sort(key=lambda each: each[0])
    np.random.RandomState(42).shuffle(samples)
    return samples[:count]


def _parts(samples: list[tuple[str, Any, Any]], parts: int, step: int = 1, call: int = 0) -> list[Record]:
    size = -(-len(samples) // parts)
    columns = ["input", "output", "score"]
    return [
        record(
            RecordKind.GENERATIONS,
            {
                "columns": columns,
                "rows": [list(row) for row in samples[number * size : (number + 1) * size]],
                "part": number,
                "parts": parts,
                "call": call,
            },
            step,
        )
        for number in range(parts)
    ]


def _shown(stream: list[Record | None], decisions: list[Decision[int]]) -> list[dict[Any, Any]]:
    """Bodies as they are delivered."""
    shown = []
    for decision in decisions:
        each = stream[decision.tag]
        if decision.rows and each is not None:
            shown.append(picked(each.body, decision.rows, decision.part, decision.parts))
        elif decision.record is not None:
            shown.append(decision.record.body)
    return shown


def _choose(stream: list[Record | None], count: int) -> list[dict[Any, Any]]:
    return _shown(stream, judged(sampler(log_val_generations=count), stream))


def _inputs(shown: list[dict[Any, Any]]) -> list[str]:
    return [row[0] for body in shown for row in body["rows"]]


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize(("size", "count"), [(1, 1), (5, 3), (5, 5), (5, 9), (100, 10), (257, 20), (1000, 1)])
def test_the_choice_is_verls_in_one_part_or_many(size: int, count: int, parts: int) -> None:
    draw = random.Random(size)
    samples: list[tuple[str, Any, Any]] = [(f"q{draw.randrange(size)}", number, 0.0) for number in range(size)]
    stream: list[Record | None] = [*_parts(samples, parts)]

    shown = _choose(stream, count)

    rows = [tuple(row) for body in shown for row in body["rows"]]
    assert sorted(rows) == sorted(_verl(samples, count))
    assert [(body["part"], body["parts"]) for body in shown] == [(n, len(shown)) for n in range(len(shown))]


def test_every_validation_shows_the_same_prompts_in_whatever_order_they_come() -> None:
    prompts = [f"prompt {number}" for number in range(50)]
    shown = []
    for step in range(3):
        random.Random(step).shuffle(prompts)
        shown.append(sorted(_inputs(_choose([part(step, prompts)], 5))))

    assert len(shown[0]) == 5
    assert shown[0] == shown[1] == shown[2]


def test_no_row_is_wanted() -> None:
    stream: list[Record | None] = [part(1, "abc", 0, 2), part(1, "def", 1, 2), part(2, "g")]

    assert [decision.why for decision in judged(sampler(log_val_generations=0), stream)] == [BY_ROW] * 3


def test_an_empty_table_is_kept() -> None:
    stream: list[Record | None] = [part(1, [])]

    assert [body["rows"] for body in _choose(stream, 3)] == [[]]
    assert [body["rows"] for body in _choose(stream, 0)] == [[]]


def test_a_table_waits_for_its_last_part() -> None:
    made = sampler(log_val_generations=2)

    assert judged(made, [part(1, "ab", 0, 3), part(1, "cd", 1, 3)], end=False) == []
    assert made.waits
    made.offer(2, part(1, "ef", 2, 3))
    assert len(list(made.decided())) == 3
    assert not made.waits


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_choice_is_among_what_is_there_when_a_part_was_lost(lost: int) -> None:
    stream = [part(1, "ab", 0, 3), part(1, "cd", 1, 3), part(1, "ef", 2, 3)]
    del stream[lost]

    rows = _inputs(_choose([*stream, part(2, "xyz")], 3))

    there = set("abcdef") - set(["ab", "cd", "ef"][lost])
    assert len(rows) == 6
    assert set(rows[:3]) <= there
    assert rows[3:] == ["x", "y", "z"]


def test_a_table_whose_end_never_comes_ends_with_the_stream() -> None:
    assert len(_inputs(_choose([part(1, "abcd", 0, 2)], 3))) == 3


def test_what_comes_of_a_table_after_another_began_is_left_out() -> None:
    stream: list[Record | None] = [
        *(part(1, "ab", 0, 2), part(2, "uv", 0, 2)),
        *(part(1, "cd", 1, 2), part(2, "wx", 1, 2)),
    ]

    decisions = judged(sampler(log_val_generations=4), stream)

    assert _inputs(_shown(stream, decisions)) == ["a", "b", "u", "v", "w", "x"]
    assert decisions[2].why == BY_ROW


def test_two_calls_at_one_step_are_two_tables() -> None:
    stream: list[Record | None] = [part(1, "abc", call=0), part(1, "xyz", call=1)]

    assert len(_inputs(_choose(stream, 2))) == 4


def test_a_table_larger_than_can_be_held_is_chosen_from_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_sampler, "INPUTS_CHARS_MAX", 10)
    stream: list[Record | None] = [part(1, ["a" * 6, "b" * 6], 0, 3), part(1, "cd", 1, 3), part(1, "ef", 2, 3)]

    decisions = judged(sampler(log_val_generations=2), stream)

    assert _inputs(_shown(stream, decisions)) == ["a" * 6, "b" * 6]
    assert [decision.why for decision in decisions] == ["", BY_ROW, BY_ROW]


def test_what_is_left_out_of_a_table_is_so_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_sampler, "INPUTS_CHARS_MAX", 1)
    first, second = sampler(log_val_generations=2), sampler(log_val_generations=2)
    judged(first, [part(1, "abc", 0, 3)])

    second.restore(first.state())

    assert [decision.why for decision in judged(second, [part(1, "cd", 1, 3), part(1, "ef", 2, 3)])] == [BY_ROW] * 2


def test_records_of_other_kinds_wait_behind_a_table() -> None:
    finish = record(RecordKind.RUN_FINISH, {})
    stream: list[Record | None] = [part(1, "ab", 0, 2), None, part(1, "cd", 1, 2), finish]

    assert [decision.tag for decision in judged(sampler(log_val_generations=9), stream)] == [0, 1, 2, 3]


@pytest.mark.parametrize("cell", ODD_VALUES)
def test_cells_may_be_anything(cell: Any) -> None:
    rows = [[cell, 1], cell, [], ["x"], {"input": cell}]

    shown = _choose([record(RecordKind.GENERATIONS, {"columns": ["input"], "rows": rows})], 5)

    assert len(shown[0]["rows"]) == 5


@pytest.mark.parametrize("value", ODD_VALUES)
@pytest.mark.parametrize("name", ["columns", "rows", "part", "parts", "call"])
def test_fields_may_be_anything(name: str, value: Any) -> None:
    body = part(1, "abc").body | {name: value}
    stream: list[Record | None] = [record(RecordKind.GENERATIONS, body, 1), part(2, "ab")]

    assert len(judged(sampler(log_val_generations=1), stream)) == 2


@pytest.mark.parametrize("body", ODD_BODIES)
def test_a_body_may_be_anything(body: dict[Any, Any]) -> None:
    table = Table(key_of(None, body))

    assert table.add(body) == 0
    table.choose(3)
    assert is_first(body)
    assert is_last(body)
    assert picked(body, (0, 7), 0, 1)["rows"] == rows_of(body)[:1]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [(["output", "input"], "b"), (["x", "y"], "a"), (None, "a"), ("input", "a"), ([], "a"), ([["input"]], "a")],
)
def test_without_a_column_of_inputs_the_first_one_counts(columns: Any, expected: str) -> None:
    table = Table((1, 0))

    table.add({"columns": columns, "rows": [["a", "b"]]})

    assert table.inputs[0][0] == expected
