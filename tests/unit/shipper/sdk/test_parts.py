"""What backends with a package make of a batch alike: tables that fit, texts cut where needed, refusals by item."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_shipper.backends.sdk.parts import CUT_MARK, check_settings, is_part, pieces, rejected, table_key, table_of
from verl_shipper.errors import ConfigError

CELLS = st.none() | st.integers() | st.text(max_size=40) | st.just("\U0001f600" * 30)


@given(st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=12), st.integers(200, 600), st.integers(1, 4))
def test_pieces_hold_all_rows_in_order_and_fit(rows: list[list[Any]], bytes_max: int, rows_max: int) -> None:
    found = list(pieces(["a", "b"], rows, rows_max=rows_max, bytes_max=bytes_max))
    assert [first for first, _, _ in found] == [sum(len(piece) for _, piece, _ in found[:n]) for n in range(len(found))]
    shown = [row for _, piece, _ in found for row in piece]
    assert len(shown) == len(rows)
    cut = 0
    for old, new in zip(rows, shown, strict=True):
        for old_cell, new_cell in zip(old, new, strict=True):
            if old_cell != new_cell:
                cut += 1
                assert new_cell.endswith(CUT_MARK)
                assert old_cell.startswith(new_cell.removesuffix(CUT_MARK))
    assert cut == sum(told for _, _, told in found)
    for _, piece, _ in found:
        assert len(piece) <= rows_max
        assert len(piece) == 1 or sum(len(json.dumps(row)) for row in piece) <= bytes_max


def test_a_row_larger_than_a_piece_is_cut_to_fit() -> None:
    ((first, piece, cut),) = pieces(["a"], [["\U0001f600" * 1_000_000]], rows_max=10, bytes_max=1_000_000)
    assert (first, cut) == (0, 1)
    assert len(json.dumps(piece)) <= 1_000_000
    assert len(piece[0][0]) > 80_000


def test_an_empty_table_is_one_empty_piece() -> None:
    assert list(pieces(["a"], [], rows_max=5, bytes_max=100)) == [(0, [], 0)]


def test_a_table_of_anything_is_rectangular() -> None:
    columns, rows = table_of({"columns": ["a", 3, "a"], "rows": [[1], ["x", {"k": [1]}, None, b"\0"]]}, "")
    assert columns == ["a", "3", "a'", "column 4"]
    assert rows == [[1, "", "", ""], ["x", '{"k": [1]}', "", "00"]]


def test_what_is_left_of_a_batch_is_known_by_its_id() -> None:
    assert is_part("b", "b")
    assert is_part("b.r", "b")
    assert is_part("b.0.r", "b.0")
    assert not is_part("bc", "b")
    assert not is_part("b", "b.0")
    assert not is_part("b", "")


def test_a_refusal_names_every_item_with_its_reason_and_tells_three() -> None:
    refusal = rejected({5: "e", 2: "b", 9: "b", 1: "a", 3: "c"})
    assert (refusal.reason, list(refusal.items or ())) == ("e; b; a", [1, 2, 3, 5, 9])
    assert refusal.reasons[3] == "c"


@pytest.mark.parametrize(
    ("key", "value"), [("transport", "direct"), ("mode", "on"), ("settle_s", 0), ("settle_s", True), ("settle_s", "x")]
)
def test_a_setting_that_cannot_work_is_named_with_what_can(key: str, value: object) -> None:
    mode = str(value) if key == "mode" else "online"

    with pytest.raises(ConfigError) as caught:
        check_settings("x", {key: value}, mode=mode, modes=["online"], url="http://h", variable="X_URL")
    assert caught.value.where == f"backends.x.{key}"
    assert caught.value.hint


def test_an_address_without_a_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="base_url"):
        check_settings("x", {}, mode="online", modes=["online"], url="nonsense", variable="X_URL")


def test_a_table_is_a_validation_or_has_a_name_of_its_own() -> None:
    assert table_key({}) == "val/generations"
    assert table_key({"name": "training/groups", "call": 1, "part": 2}) == "training/groups_2_part_3"
