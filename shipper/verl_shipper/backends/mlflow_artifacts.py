"""Generations and texts as artifacts: their paths and contents. Pure, apart from the claims that keep paths apart.

    val_generations/step_40.json                          [{"input": …, "output": …, "score": …}, …]
    val_generations/step_40.rank_1.call_2.part_3.json     a suffix only for what is not zero
    val_generations/step_40.writer_1f3a5c7e.json          the same step again, from another process
    tables/NAME/step_40.json                              a table that is no validation has a name
    text/notes/step_40.txt                                text/notes/no_step.txt without a step

Writing the same path again replaces the file, which makes a repeat harmless and a clash of two records a loss. Hence
every path belongs to whoever claimed it first, and later comers get a suffix of their own. Claims live in the run's
memory; of the oldest only CLAIMS_MAX are kept, so a resumed run may in the end replace what it wrote very long ago.

Must not know: requests. Never raises.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from verl_shipper.backends.base import Item
from verl_shipper.backends.paths import ARTIFACT_FORBIDDEN, component
from verl_shipper.values import key_text, to_json, visible

CLAIMS_MAX = 2000


class Claims:
    """Who owns which path of one run. `notes()` goes to the memory whenever `is_changed`."""

    def __init__(self, notes: Mapping[str, str] | None = None) -> None:
        self._owner_of: dict[str, str] = dict(notes or {})
        self.is_changed = False

    def claim(self, stem: str, suffix: str, owner: str) -> str:
        """The path `stem + suffix`, or one with the owner in its name when the path has another owner."""
        if self._owner_of.get(stem, owner) != owner:
            stem = f"{stem}.writer_{owner}"
        if stem not in self._owner_of:
            self._owner_of[stem] = owner
            self.is_changed = True
        return stem + suffix

    def notes(self) -> dict[str, str]:
        """What a later `Claims` needs to give the same answers."""
        self.is_changed = False
        newest = list(self._owner_of.items())[-CLAIMS_MAX:]
        self._owner_of = dict(newest)
        return dict(newest)


def generations_artifact(item: Item, claims: Claims) -> tuple[str, str]:
    """Path and content of a part of a generations table."""
    body = item.record.body
    stem = step_name(item.record.step)
    for word, number in (("rank", item.rank), ("call", body.get("call")), ("part", body.get("part"))):
        stem += f".{word}_{number}" if number else ""
    name = body.get("name")
    folder = "/".join(["tables", *_folders(name)]) if name else "val_generations"
    path = claims.claim(f"{folder}/{stem}", ".json", item.stream_id[:8])
    return path, json.dumps(rows_of(body), ensure_ascii=False, indent=1)


def text_artifact(item: Item, key: Any, text: Any, claims: Claims) -> tuple[str, str]:
    """Path and content of one text of a text record."""
    stem = "/".join(["text", *_folders(key), step_name(item.record.step)]) + (f".rank_{item.rank}" if item.rank else "")
    path = claims.claim(stem, ".txt", f"{item.stream_id[:8]}-{item.ordinal}")
    return path, visible(text) if isinstance(text, str) else json.dumps(to_json(text), ensure_ascii=False)


def _folders(key: Any) -> list[str]:
    return [component(part, ARTIFACT_FORBIDDEN) for part in key_text(key).split("/") if part] or ["unnamed"]


def rows_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One object a row, its keys the columns. A row that is longer than the columns keeps its rest."""
    columns = body.get("columns")
    names = [key_text(name) for name in columns] if isinstance(columns, list) else []
    rows = body.get("rows")
    return [row_of(names, row) for row in rows] if isinstance(rows, list) else []


def row_of(names: list[str], row: Any) -> dict[str, Any]:
    cells: Iterable[Any] = row if isinstance(row, list | tuple) else [row]
    result: dict[str, Any] = {}
    for index, cell in enumerate(cells):
        name = names[index] if index < len(names) else f"column_{index + 1}"
        while name in result:
            name += "'"
        result[name] = to_json(cell)
    return result


def step_name(step: int | None) -> str:
    return "no_step" if step is None else f"step_{step}"
