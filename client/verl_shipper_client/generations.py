"""Validation generations: samples made into a table, the table cut into records.

One record must fit a frame and should not hold up a stream, so a table is cut into parts of about PART_CHARS_MAX.
Must not know: spool, sockets. Samples of any shape give a row; what is no sequence becomes a row of one cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from verl_shipper_client import identity
from verl_shipper_client.values import cut_text, is_a, plain

COLUMNS = ("input", "output", "score")  # as verl's validation gives them
PART_CHARS_MAX = 1_000_000
CALLS_REMEMBERED_MAX = 1000


class CallCounter:
    """Numbers the calls of one step: a second table of the same step is a second table, not a replacement."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int | None], int] = {}

    def next(self, step: int | None, name: str = "") -> int:
        call = self._calls.get((name, step), -1) + 1
        self._calls[name, step] = call
        if len(self._calls) > CALLS_REMEMBERED_MAX:
            del self._calls[next(iter(self._calls))]
        return call


def table(samples: Iterable[Any], columns: Iterable[str]) -> tuple[list[str], list[list[Any]]]:
    """Column names and rows. Dicts bring their own columns; the names of the first one count for all."""
    rows = _listed(samples)
    names = [identity.name(column) for column in _listed(columns)]
    if rows and is_a(rows[0], Mapping):
        keys = _listed(rows[0])
        return [identity.name(key) for key in keys], [_cells(_picked(row, keys)) for row in rows]
    return names, [_cells(_listed(row) if is_a(row, (list, tuple)) else [row]) for row in rows]


def parts(columns: list[str], rows: list[list[Any]], call: int, name: str = "") -> Iterator[dict[str, Any]]:
    """Bodies of generations records; an empty table is one empty record. `name`: of a table that is no validation."""
    named = {"name": name} if name else {}
    groups: list[list[list[Any]]] = [[]]
    chars = 0
    for row in rows:
        size = sum(map(_chars, row))
        if groups[-1] and chars + size > PART_CHARS_MAX:
            groups.append([])
            chars = 0
        groups[-1].append(row)
        chars += size
    for index, group in enumerate(groups):
        yield {"columns": columns, "rows": group, "part": index, "parts": len(groups), "call": call, **named}


def _listed(values: Any) -> list[Any]:
    """The elements of `values`; what has none is the only one."""
    try:
        return list(values)
    except Exception:  # noqa: BLE001 - any object may be given
        return [values]


def _picked(row: Any, keys: list[Any]) -> list[Any]:
    """Cells of a row in the order of `keys`."""
    if not is_a(row, Mapping):
        return [row]
    try:
        return [row.get(key) for key in keys]
    except Exception:  # noqa: BLE001 - a foreign mapping; it stays visible as a marker
        return [row]


def _cells(row: list[Any]) -> list[Any]:
    return [_cut(plain(cell, _as_it_is)) for cell in row]


def _as_it_is(tensor: Any) -> Any:
    """What is on a device is read when the record is made."""
    return tensor


def _cut(cell: Any) -> Any:
    """A plain value with its long texts cut, wherever they stand: a cell may be a whole conversation."""
    if isinstance(cell, str):
        return cut_text(cell)
    if isinstance(cell, dict):
        return {key: _cut(value) for key, value in cell.items()}
    return [_cut(value) for value in cell] if isinstance(cell, list) else cell


def _chars(cell: Any) -> int:
    """About how much room a plain value needs in a record."""
    if isinstance(cell, (str, bytes)):
        return len(cell)
    if isinstance(cell, dict):
        return sum(_chars(key) + _chars(value) for key, value in cell.items())
    return sum(map(_chars, cell)) if isinstance(cell, list) else 16
