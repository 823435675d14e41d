"""Which rows of a validation are kept, when only some are wanted: the same prompts at every validation.

As verl chooses them: rows sorted by input, shuffled with the seed 42, the first N. A table may come in many parts; the
choice is made when the last one is there, from the inputs alone, so that nobody has to hold the outputs meanwhile.

Parts of another table in between, or more than can be held, end a table: the choice is among the rows so far, and what
comes of it later is left out.

Must not know: where the parts are kept. A table of any shape gives some choice; without a column `input` the first
column counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.policy.shuffle import shuffled
from verl_shipper.values import to_json

SEED = 42  # verl's
INPUTS_CHARS_MAX = 64 * 1024 * 1024  # of one table; beyond, the choice is made among the rows so far


@dataclass(slots=True)
class Table:
    """A validation's table while its parts come in. Part numbers here are those of arrival."""

    key: tuple[int | None, int]
    inputs: list[tuple[str, int, int]] = field(default_factory=list)  # input, part, row
    parts: int = 0
    chars: int = 0
    is_whole: bool = False
    chosen: dict[int, tuple[int, ...]] = field(default_factory=dict)  # rows by part

    def add(self, body: Mapping[Any, Any]) -> int:
        """Take a part; returns its number."""
        rows = rows_of(body)
        columns = body.get("columns")
        column = columns.index("input") if isinstance(columns, list) and "input" in columns else 0
        for index, row in enumerate(rows):
            text = _text(row, column)
            self.chars += len(text)
            self.inputs.append((text, self.parts, index))
        self.parts += 1
        return self.parts - 1

    def choose(self, count: int) -> None:
        """No part will follow: pick `count` rows."""
        self.is_whole = True
        in_order = sorted(self.inputs, key=lambda each: each[0])
        rows: dict[int, list[int]] = {}
        for index in shuffled(len(in_order), SEED)[:count]:
            _, part, row = in_order[index]
            rows.setdefault(part, []).append(row)
        self.chosen = {part: tuple(sorted(found)) for part, found in rows.items()}
        self.inputs.clear()


def key_of(step: int | None, body: Mapping[Any, Any]) -> tuple[int | None, int]:
    """Which table of a stream a part belongs to."""
    call = body.get("call")
    return step, call if isinstance(call, int) else 0


def is_first(body: Mapping[Any, Any]) -> bool:
    """Whether a part says that it is the first one of its table."""
    part = body.get("part")
    return not isinstance(part, int) or part <= 0


def rows_of(body: Mapping[Any, Any]) -> list[Any]:
    rows = body.get("rows")
    return rows if isinstance(rows, list) else []


def is_last(body: Mapping[Any, Any]) -> bool:
    """Whether a part says that it is the last one of its table."""
    part, parts = body.get("part"), body.get("parts")
    return not (isinstance(part, int) and isinstance(parts, int) and part + 1 < parts)


def picked(body: Mapping[Any, Any], rows: tuple[int, ...], part: int, parts: int) -> dict[Any, Any]:
    """A part with the chosen rows only, numbered among the parts that are left."""
    all_rows = rows_of(body)
    return {**body, "rows": [all_rows[row] for row in rows if row < len(all_rows)], "part": part, "parts": parts}


def _text(row: Any, column: int) -> str:
    cell = row[column] if isinstance(row, (list, tuple)) and len(row) > column else row
    return cell if isinstance(cell, str) else repr(to_json(cell))
