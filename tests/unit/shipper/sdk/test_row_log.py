"""An offline run, kept row by row: what was added is there, once, whatever tore the file's tail."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_shipper.backends.sdk.row_log import RowLog

ROWS = [(f"s:{number}", {"n": number, "text": "x" * number}) for number in range(20)]


def test_rows_come_back_in_order_and_none_twice(tmp_path: Path) -> None:
    log = RowLog(str(tmp_path / "a" / "rows.log"))
    log.append(ROWS[:10])
    log.append(ROWS[5:])
    log.append(ROWS)
    assert list(log) == ROWS
    log.close()
    again = RowLog(log.path)
    assert list(again) == ROWS
    assert again.ids == {row_id for row_id, _ in ROWS}
    again.remove()
    again.remove()
    assert not Path(log.path).exists()


@pytest.mark.parametrize("lost_bytes", [1, 7, 8, 9, 30])
def test_a_torn_tail_costs_its_own_rows_which_come_again(tmp_path: Path, lost_bytes: int) -> None:
    log = RowLog(str(tmp_path / "rows.log"))
    log.append(ROWS)
    log.close()
    path = Path(log.path)
    path.write_bytes(path.read_bytes()[:-lost_bytes])
    again = RowLog(log.path)
    kept = list(again)
    assert kept == ROWS[: len(kept)]
    assert len(kept) >= len(ROWS) - 2
    again.append(ROWS)
    assert list(again) == ROWS
    again.close()


def test_zeros_behind_the_last_row_are_cut_off(tmp_path: Path) -> None:
    log = RowLog(str(tmp_path / "rows.log"))
    log.append(ROWS[:3])
    log.close()
    with open(log.path, "ab") as file:
        file.write(b"\0" * 5000)
    again = RowLog(log.path)
    again.append(ROWS[3:5])
    assert list(again) == ROWS[:5]
    again.close()
