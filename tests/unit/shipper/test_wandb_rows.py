"""From a batch to rows of W&B's history: one record, one row, whatever it holds, the same every time."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from support.batches import TIME_NS, batch, item, metrics
from verl_shipper.backends.base import Item
from verl_shipper.backends.sdk.parts import GENERATIONS_KEY
from verl_shipper.backends.wandb_rows import (
    ID_KEY,
    RESERVED,
    STEP_KEY,
    TABLE_ROWS_MAX,
    TIME_KEY,
    name_of,
    plan,
)
from verl_shipper_spool.record import RecordKind, Unsupported

OTHER = "6" * 32


def table(**body: Any) -> Item:
    whole = {"columns": ["input", "output"], "rows": [["q", "a"]], "part": 0, "parts": 1, "call": 0, **body}
    return item(RecordKind.GENERATIONS, whole, step=3)


def test_every_record_with_values_is_one_row_with_its_id_step_and_time() -> None:
    made = plan(batch(metrics(0, {"a": {"b": 1}}, step=7), table(), metrics(2, {}, step=8)), {})
    assert [row.row_id.rpartition(":")[2] for row in made.rows] == ["0", "0", "2"]
    assert made.rows[0].values == {"a/b": 1, STEP_KEY: 7, TIME_KEY: TIME_NS / 1e9, ID_KEY: made.rows[0].row_id}
    assert [row.values[STEP_KEY] for row in made.rows] == [7, 3, 8]


def test_a_record_without_a_step_stands_at_the_last_one_of_its_stream() -> None:
    items = [
        metrics(0, step=None),
        metrics(1, step=5),
        metrics(2, step=None),
        metrics(0, step=None, stream_id=OTHER),
        metrics(1, step=2, stream_id=OTHER),
    ]
    made = plan(batch(*items), {OTHER: 9})
    assert [row.values[STEP_KEY] for row in made.rows] == [0, 5, 5, 9, 2]
    assert made.last_steps == {metrics(0).stream_id: 5, OTHER: 2}


def test_only_rank_0_of_the_job_itself_speaks_for_the_run() -> None:
    def state(kind: RecordKind, rank: int = 0, **body: Any) -> Item:
        return item(kind, body, step=None, rank=rank)

    begin, end = RecordKind.RUN_START, RecordKind.RUN_FINISH
    assert plan(batch(state(begin, 1, config={"a": 1}), state(end, 1, exit_code=0)), {}).config is None
    assert plan(batch(state(begin, config={"a": 1}, forked=True)), {}).config is None
    made = plan(batch(state(begin, config={"a": 1}), state(end, exit_code=0)), {})
    assert (made.config, made.finish is not None, made.rows) == ({"a": 1}, True, [])
    assert plan(batch(state(end, exit_code=0), state(begin, config={})), {}).finish is None


def test_parts_and_calls_of_one_table_stand_side_by_side() -> None:
    keys = [
        plan(batch(table(part=part, call=call)), {}).rows[0].media[0].key
        for part, call in ((0, 0), (1, 0), (0, 1), (2, 1))
    ]
    assert keys == [GENERATIONS_KEY, f"{GENERATIONS_KEY}_part_2", f"{GENERATIONS_KEY}_2", f"{GENERATIONS_KEY}_2_part_3"]


def test_a_table_is_rectangular_its_columns_differ_and_none_is_longer_than_wandb_shows() -> None:
    odd = table(columns=["a", "a"], rows=[["x", {"y": math.nan}, 3], [], [Unsupported("tensor")]])
    (media,) = plan(batch(odd), {}).rows[0].media
    assert media.content == {
        "columns": ["a", "a'", "column 3"],
        "rows": [["x", '{"y": "NaN"}', 3], [None, None, None], ["<tensor>", None, None]],
    }
    long = table(rows=[[n, n] for n in range(2 * TABLE_ROWS_MAX + 1)])
    pieces = plan(batch(long), {}).rows[0].media
    assert [len(piece.content["rows"]) for piece in pieces] == [TABLE_ROWS_MAX, TABLE_ROWS_MAX, 1]
    assert len({piece.key for piece in pieces}) == 3


def test_what_wandb_cannot_show_is_counted() -> None:
    odd = metrics(0, {"word": "x", "none": None, "list": [1, 2], "ok": 1})
    span = item(RecordKind.SPAN, {"name": "s"})
    made = plan(batch(odd, span), {})
    assert dict(made.ignored) == {"text": 1, "none": 1, "not_a_number": 1, "span": 1}
    assert len(made.rows) == 1


def test_an_empty_name_beside_unnamed_costs_neither() -> None:
    values = plan(batch(metrics(0, {"": 1, "unnamed": 2})), {}).rows[0].values
    assert values["unnamed"] == 2
    assert 1 in values.values()


def test_names_that_are_taken_get_another_one_and_no_two_become_one() -> None:
    names = ["", "unnamed", *RESERVED, "k" * 600, "k" * 601, "loss", " loss", "a.b", "奖励"]
    shown = [name_of(name) for name in names if name != "unnamed"]
    assert len(set(shown)) == len(shown)
    assert not RESERVED.intersection(shown)
    assert name_of("loss") == "loss"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text() | st.integers(), VALUES, max_size=5), st.sampled_from(list(RecordKind)))
def test_whatever_a_record_holds_the_plan_can_be_sent_and_is_the_same_again(
    body: dict[Any, Any], kind: RecordKind
) -> None:
    sent = batch(item(kind, body))
    made = plan(sent, {})
    assert made == plan(sent, {})
    for row in made.rows:
        json.dumps(row.values)
        assert not made.refused
