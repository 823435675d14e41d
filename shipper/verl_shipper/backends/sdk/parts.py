"""What backends that write through a tracker's package make of a batch in the same way. Pure.

    who speaks for a run      rank 0 of the job itself: its configuration, its end
    a table of generations    rectangular, cells plain, columns different; one key for each part and call
    a large table             pieces; what fits into none is cut, visibly and counted
    a refusal                 reasons in one line, items by index
    what is left of a batch   the lane appends to the id of the batch that it takes apart

Must not know: any tracker. Never raises, but for ConfigError from `check_settings`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from verl_shipper.backends.base import Item, Reject
from verl_shipper.errors import ConfigError
from verl_shipper.values import key_text, to_json, visible
from verl_shipper_spool.record import RecordKind
from verl_shipper_spool.redact import redact

GENERATIONS_KEY = "val/generations"
REASONS_SHOWN = 3
CHAR_BYTES_MAX = 12  # of a character in ASCII JSON: two halves of a UTF-16 pair
CUT_MARK = "… [cut by verl-shipper]"
SETTLE_S_MAX = 60.0


class RunPlan(Protocol):
    """The part of a plan that is about the run itself."""

    config: dict[str, Any] | None
    finish: Item | None


def take_state(item: Item, made: RunPlan) -> None:
    """Configuration or end of the run into a plan, if this record speaks for the run."""
    if item.rank != 0 or item.record.body.get("forked"):
        return
    if item.record.kind is RecordKind.RUN_FINISH:
        made.finish = item
        return
    made.finish = None
    config = item.record.body.get("config")
    made.config = to_json(redact(config)) if isinstance(config, Mapping) else {}


def exit_code_of(finish: Item) -> int:
    """A run of which nobody knows how it ended has failed."""
    code = finish.record.body.get("exit_code")
    return code if isinstance(code, int) else 1


def table_key(body: Mapping[Any, Any]) -> str:
    """Parts of one table, and tables of one step, side by side."""
    part, call = body.get("part") or 0, body.get("call") or 0
    key = key_text(body["name"]) if body.get("name") else GENERATIONS_KEY
    return key + (f"_{call + 1}" if call else "") + (f"_part_{part + 1}" if part else "")


def table_of(body: Mapping[Any, Any], empty: Any) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a generations record; `empty` stands for a cell of nothing."""
    columns = [visible(key_text(column)) for column in body.get("columns") or ()]
    rows = [[_cell(cell, empty) for cell in row] for row in body.get("rows") or ()]
    width = max([len(columns), 1, *map(len, rows)])
    columns += [f"column {number + 1}" for number in range(len(columns), width)]
    return list(_different(columns)), [row + [empty] * (width - len(row)) for row in rows]


def pieces(
    columns: Sequence[str], rows: Sequence[list[Any]], *, rows_max: int, bytes_max: int, head_bytes: int = 0
) -> Iterator[tuple[int, list[list[Any]], int]]:
    """A table in pieces that a tracker takes whole: first row, rows, and how many cells had to be cut to fit.

    Sizes are those of JSON in ASCII; `head_bytes` is what a row costs besides its cells.
    """
    budget = bytes_max - len(json.dumps(columns)) - head_bytes
    first, size, cut, piece = 0, 0, 0, list[list[Any]]()
    for place, row in enumerate(rows):
        fitting, cells_cut = _fitted(row, budget)
        row_bytes = len(json.dumps(fitting)) + head_bytes
        if piece and (len(piece) == rows_max or size + row_bytes > budget):
            yield first, piece, cut
            first, size, cut, piece = place, 0, 0, []
        piece.append(fitting)
        size += row_bytes
        cut += cells_cut
    yield first, piece, cut


def text_of(text: Any) -> str:
    """A value that was logged as text."""
    return visible(text) if isinstance(text, str) else json.dumps(to_json(text))


def content_chars(content: Any) -> int:
    """About how much the file of a text, or of a table as {"columns", "rows"}, takes."""
    if isinstance(content, str):
        return len(content)
    return sum(len(cell) if isinstance(cell, str) else 8 for row in content["rows"] for cell in row)


def is_part(batch_id: str, of: str) -> bool:
    """Whether a batch is another one, or what is left of it."""
    return bool(of) and (batch_id == of or batch_id.startswith(f"{of}."))


def rejected(refused: Mapping[int, str]) -> Reject:
    """The refusal of items, by index with their reasons."""
    return Reject("; ".join(list(dict.fromkeys(refused.values()))[:REASONS_SHOWN]), sorted(refused), dict(refused))


def mode_of(settings: Mapping[str, Any], variable: str, words: Mapping[str, str]) -> str:
    """The setting `mode`, else the tracker's own variable, else online, in our `words`; or a word that
    `check_settings` refuses."""
    given = settings.get("mode")
    mode = str(os.environ.get(variable, "").strip().lower() or "online" if given is None else given)
    return words.get(mode, mode)


def check_settings(
    name: str, settings: Mapping[str, Any], *, mode: str, modes: Collection[str], url: str, variable: str
) -> None:
    """What every such backend wants of its settings. `variable`: where `url` comes from when not from them."""

    def refuse(key: str, hint: str) -> None:
        raise ConfigError(f"{key} is {settings.get(key)!r}", where=f"backends.{name}.{key}", hint=hint)

    if settings.get("transport", "sdk") != "sdk":
        refuse("transport", "it may be sdk")
    if mode not in modes:
        key = f"backends.{name}.mode"
        where = key if settings.get("mode") is not None else f"{name.upper()}_MODE"
        if mode == "disabled":
            hint = f"take {name} out of the backends, or set {key} to {' or '.join(modes)}"
            raise ConfigError(f"{name} is told to be off (disabled) and to be delivered to", where=where, hint=hint)
        raise ConfigError(f"mode is {mode!r}", where=where, hint=f"it may be {', '.join(modes)}")
    settle_s = settings.get("settle_s", 1.0)
    if isinstance(settle_s, bool) or not isinstance(settle_s, int | float) or not 0 < settle_s <= SETTLE_S_MAX:
        refuse("settle_s", f"give seconds from 0 to {SETTLE_S_MAX:g}")
    if not urlsplit(url).hostname:
        refuse("base_url", f"give https://HOST, or unset {variable}")


def _cell(cell: Any, empty: Any) -> Any:
    """Numbers stay numbers, everything else is text: a column of mixed kinds is not everybody's."""
    plain = to_json(cell)
    if plain is None:
        return empty
    return plain if isinstance(plain, str | int | float) else json.dumps(plain, ensure_ascii=False)


def _fitted(row: list[Any], bytes_max: int) -> tuple[list[Any], int]:
    """A row that one piece can hold: its long texts are cut, visibly. How many were."""
    if len(json.dumps(row)) <= bytes_max:
        return row, 0
    chars_max = max(bytes_max // (CHAR_BYTES_MAX * max(len(row), 1)) - len(CUT_MARK), 0)
    fitting = [
        cell[:chars_max] + CUT_MARK if isinstance(cell, str) and len(cell) > chars_max + len(CUT_MARK) else cell
        for cell in row
    ]
    return fitting, sum(cell is not old for cell, old in zip(fitting, row, strict=True))


def _different(names: list[str]) -> Iterator[str]:
    """Column names, none twice: a row may be an object with them as keys."""
    seen: set[str] = set()
    for name in names:
        unique = name
        while unique in seen:
            unique += "'"
        seen.add(unique)
        yield unique
