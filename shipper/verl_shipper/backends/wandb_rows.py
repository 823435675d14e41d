"""Records made into rows of wandb's history: one record, one row, in order. Pure.

    metrics       {flat name: number, …}
    system        {system/<node>/name: number, …}, see wandb_system.py
    generations   {"val/generations": table}, parts of one table side by side (…_part_2, …)
    text          {key: page}
    run_start, run_finish     no row: configuration and state of the run

Every row but a node's carries `trainer/global_step`, the x axis of all charts, so that late, repeated and out-of-order
steps stand at their own step; `_timestamp`, the wall time of capture; and `_shipper`, the record's own id, by which a
row that is there is recognised whatever happened in between. A record without a step stands at the last one before it
in its stream.

Names: an empty one is `unnamed`; one that wandb or we use ourselves gets a digest.
Must not know: SDK, network. Never raises.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.backends.base import Batch, Item
from verl_shipper.backends.mlflow_names import with_digest
from verl_shipper.backends.sdk.parts import pieces, table_key, table_of, take_state, text_of
from verl_shipper.backends.wandb_system import ELAPSED_KEY, system_values
from verl_shipper.values import flatten_metrics, key_text
from verl_shipper_spool.record import RecordKind

STEP_KEY = "trainer/global_step"
TIME_KEY = "_timestamp"
ID_KEY = "_shipper"
RESERVED = frozenset({"_step", "_runtime", TIME_KEY, "_wandb", ID_KEY, STEP_KEY, ELAPSED_KEY})
NAME_CHARS_MAX = 500
# wandb-core leaves out a longer line, and with it our count of lines.
ROW_BYTES_MAX = 9 * 1024 * 1024
TABLE_BYTES_MAX = 8 * 1024 * 1024  # proxies and servers are known to stop at 10 MB
TABLE_ROWS_MAX = 10_000  # wandb's Table.MAX_ROWS: it leaves out what is behind
ROW_VALUES_SMALL = 2000  # with names of NAME_CHARS_MAX that many cannot fill a line


@dataclass(frozen=True, slots=True)
class Media:
    """What goes up as a file of its own: `content` is {"columns", "rows"} of a table, the text of a page, or says where
    a shipped file is."""

    key: str
    kind: str
    content: Any


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the history, but for its number."""

    row_id: str
    values: dict[str, Any]
    media: tuple[Media, ...] = ()


def media_of(row: Row) -> list[list[Any]]:
    """A row's media as they travel to the child."""
    return [[media.key, media.kind, media.content] for media in row.media]


@dataclass(slots=True)
class Plan:
    """What a batch becomes. `refused`: reason by index of the item."""

    rows: list[Row] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    last_steps: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    finish: Item | None = None
    renamed: dict[str, str] = field(default_factory=dict)  # names that wandb shows otherwise


def plan(batch: Batch, last_steps: Mapping[str, int]) -> Plan:
    """The rows of a batch. `last_steps`: the last step by stream, of the batches before."""
    made = Plan(last_steps=dict(last_steps))
    for index, item in enumerate(batch.items):
        kind = item.record.kind
        if kind in (RecordKind.RUN_START, RecordKind.RUN_FINISH):
            take_state(item, made)
        elif kind is RecordKind.SYSTEM:
            _take_facts(index, item, batch.run.created_ns, made)
        elif kind in (RecordKind.METRICS, RecordKind.GENERATIONS, RecordKind.TEXT):
            _take_row(index, item, made)
        elif kind is not RecordKind.FILE:  # wandb_files.py has those
            made.ignored[kind.name.lower()] += 1
    return made


def name_of(original: str) -> str:
    """wandb's name for a key."""
    if not original:
        return "unnamed"
    if original in RESERVED or len(original) > NAME_CHARS_MAX:
        return with_digest(original.lstrip("_")[:NAME_CHARS_MAX], original)  # names in _ are hidden
    return original


def _take_row(index: int, item: Item, made: Plan) -> None:
    record = item.record
    if record.step is not None:
        made.last_steps[item.stream_id] = record.step
    values: dict[str, Any] = {}
    media: list[Media] = []
    if record.kind is RecordKind.METRICS:
        flat = flatten_metrics(record.body)
        made.ignored.update(flat.ignored)
        for name, number in flat.numbers.items():
            shown = name_of(name)
            if shown != name:
                shown = shown if shown not in flat.numbers else with_digest(shown, name)
                made.renamed[name] = shown
            values[shown] = number
        if record.step is None:
            made.ignored["no_step"] += len(values)
    elif record.kind is RecordKind.GENERATIONS:
        media += _tables(record.body, made.ignored)
    else:
        media += _pages(record.body)
    values[STEP_KEY] = made.last_steps.get(item.stream_id, 0)
    _add(index, item, values, tuple(media), made)


def _take_facts(index: int, item: Item, created_ns: int, made: Plan) -> None:
    values: dict[str, Any] = {}
    for name, number in system_values(item, created_ns, made.ignored):
        shown = name if name == ELAPSED_KEY else name_of(name)
        if shown != name:
            made.renamed[name] = shown
        values[shown] = number
    if values:
        _add(index, item, values, (), made)


def _add(index: int, item: Item, values: dict[str, Any], media: tuple[Media, ...], made: Plan) -> None:
    """A row, if wandb can take it."""
    values[TIME_KEY] = item.record.time_ns / 1e9
    values[ID_KEY] = f"{item.stream_id}:{item.ordinal}"
    size = len(json.dumps(values)) if len(values) > ROW_VALUES_SMALL else 0
    if size > ROW_BYTES_MAX:
        made.refused[index] = f"a row of {size} bytes; wandb takes {ROW_BYTES_MAX}"
        return
    made.rows.append(Row(values[ID_KEY], values, media))


def _tables(body: Mapping[Any, Any], ignored: Counter[str]) -> Iterator[Media]:
    """The table of one part, in pieces that wandb shows whole."""
    key = table_key(body)
    columns, rows = table_of(body, None)
    for first, piece, cut in pieces(columns, rows, rows_max=TABLE_ROWS_MAX, bytes_max=TABLE_BYTES_MAX):
        ignored["text_cut"] += cut
        yield Media(f"{key}_from_{first}" if first else key, "table", {"columns": columns, "rows": piece})


def _pages(body: Mapping[Any, Any]) -> Iterator[Media]:
    names: set[str] = set()
    for key, text in body.items():
        name = name_of(key_text(key))
        if name not in names:
            names.add(name)
            yield Media(name, "page", text_of(text))
