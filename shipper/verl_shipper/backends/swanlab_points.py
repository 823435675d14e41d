"""Records made into points of SwanLab: one number, text or table of one key at one step. Pure.

    metrics       a point for every number
    system        the same, at the second of the run's time; SwanLab's own "system" keys are not open to others
    generations   a table val/generations, parts of one table side by side (…_part_2, …)
    text          a text for every key
    run_start, run_finish     no point: configuration and state of the run

SwanLab only appends, and its package goes on behind the last step of every key. So the points of a batch are sent in
the order of their steps, and a point that is not above what its key has already cannot be shown: it is counted, as
`same_step` when the key has that step (the first one wins), else as `late_step`. A record without a step stands at the
last one before it in its stream. A record whose step SwanLab cannot take is refused.

Names: trimmed and without control characters as SwanLab wants them, never two into one; a number, a text and a table
never share a key, whose kind is fixed for ever.
Must not know: SDK, network. Never raises.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.backends.base import Batch, Item
from verl_shipper.backends.mlflow_names import Names, with_digest
from verl_shipper.backends.sdk.parts import pieces, table_key, table_of, take_state, text_of
from verl_shipper.backends.system_facts import facts_of, step_of
from verl_shipper.values import flatten_metrics, key_text
from verl_shipper_spool.file_parts import is_last
from verl_shipper_spool.record import RecordKind

STEP_MAX = 2**48
NAME_CHARS_MAX = 512
FILE_BYTES_MAX = 10 * 1024 * 1024  # the package leaves out a larger one, with a word on its console only
MARGIN_BYTES = 64 * 1024  # for what is around the rows
FORBIDDEN = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
EDGES = " \t\n\r./"
RESERVED = "__swanlab__"
KIND_MARK = "\0"  # between the kind of a key and the key itself, in the notes of names


@dataclass(frozen=True, slots=True)
class Media:
    """A text or a table ({"columns", "rows"}) that goes up as a file of its own."""

    key: str
    kind: str
    content: Any


@dataclass(frozen=True, slots=True)
class Row:
    """What one record shows: points at one step. `item` is the record's place in its batch."""

    row_id: str
    item: int
    step: int
    time_ns: int
    scalars: dict[str, float]
    media: tuple[Media, ...] = ()

    def points(self) -> Iterator[tuple[str, str, int]]:
        """Kind, key and step of every point: what SwanLab knows it by."""
        for key in self.scalars:
            yield "scalar", key, self.step
        for each in self.media:
            yield "media", each.key, self.step


@dataclass(slots=True)
class Plan:
    """What a batch becomes: `rows` by step, `refused` with reason by index, `tops` the last step by key after it."""

    rows: list[Row] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    last_steps: dict[str, int] = field(default_factory=dict)
    tops: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    finish: Item | None = None


def plan(batch: Batch, last_steps: Mapping[str, int], tops: Mapping[str, int], names: Names) -> Plan:
    """The points of a batch. `last_steps`: the last step by stream, `tops`: by key, both of the batches before."""
    made = Plan(last_steps=dict(last_steps), tops=dict(tops))
    found: list[Row] = []
    for index, item in enumerate(batch.items):
        if item.record.kind is RecordKind.SYSTEM:
            found.append(_facts(index, item, batch.run.created_ns, made, names))
        else:
            found += _rows(index, item, made, names)
    shown: set[tuple[str, int]] = set()
    for row in found:
        fresh = {key: number for key, number in row.scalars.items() if _is_fresh(key, row.step, tops, shown, made)}
        media = tuple(each for each in row.media if _is_fresh(each.key, row.step, tops, shown, made))
        if fresh or media:
            made.rows.append(Row(row.row_id, row.item, row.step, row.time_ns, fresh, media))
    made.rows.sort(key=lambda row: row.step)
    for row in made.rows:
        made.tops.update((key, row.step) for _, key, _ in row.points())
    return made


def names_of(metric_names: Mapping[str, str] | None, media_names: Mapping[str, str] | None) -> Names:
    """Names by SwanLab's rules, as two notes of `notes_of` have them."""
    numbers = {_marked("number", original): name for original, name in (metric_names or {}).items()}
    return Names({**numbers, **(media_names or {})}, clean_name=clean, fold=str)


def notes_of(names: Names) -> dict[str, dict[str, str]]:
    """What is to be remembered of names: metrics as a user wrote them, and everything that carries a mark."""
    notes = names.notes()
    return {
        "metric_names": {_unmarked(key): name for key, name in notes.items() if _is_number(key)},
        "media_names": {key: name for key, name in notes.items() if not _is_number(key)},
    }


def clean(original: str) -> str:
    """The nearest key that SwanLab takes as it is; different originals may come out the same."""
    wanted = original.partition(KIND_MARK)[2] or original
    name = FORBIDDEN.sub("_", wanted).strip(EDGES)
    if name.startswith(RESERVED):
        name = name.lstrip("_")  # keys of SwanLab's own, which its package leaves out
    if len(name) > NAME_CHARS_MAX:
        return with_digest(name, original)
    return name or "unnamed"


def _is_fresh(key: str, step: int, tops: Mapping[str, int], shown: set[tuple[str, int]], made: Plan) -> bool:
    """Whether SwanLab will show the point; counted when not."""
    top = tops.get(key, -1)
    if step <= top or (key, step) in shown:
        made.ignored["late_step" if step < top else "same_step"] += 1
        return False
    shown.add((key, step))
    return True


def _rows(index: int, item: Item, made: Plan, names: Names) -> Iterator[Row]:
    kind = item.record.kind
    if kind in (RecordKind.RUN_START, RecordKind.RUN_FINISH):
        take_state(item, made)
    elif kind not in (RecordKind.METRICS, RecordKind.GENERATIONS, RecordKind.TEXT):
        made.ignored[kind.name.lower()] += kind is not RecordKind.FILE or is_last(item.record.body)
    else:
        step = item.record.step
        step = made.last_steps.get(item.stream_id, 0) if step is None else step
        if not 0 <= step <= STEP_MAX:
            made.refused[index] = f"step {step}; SwanLab takes 0 to 2^48"
            return
        made.last_steps[item.stream_id] = step
        scalars, media = _content(item, made, names)
        if item.record.step is None:
            made.ignored["no_step"] += len(scalars)
        large = next((each for each in media if each.kind == "text" and len(each.content) * 4 > FILE_BYTES_MAX), None)
        if large is not None:
            made.refused[index] = (
                f"{large.key} has {len(large.content)} characters; SwanLab takes {FILE_BYTES_MAX} bytes"
            )
            return
        yield Row(f"{item.stream_id}:{item.ordinal}", index, step, item.record.time_ns, scalars, media)


def _facts(index: int, item: Item, created_ns: int, made: Plan, names: Names) -> Row:
    facts = facts_of(item.record, made.ignored)
    scalars = {names.name(_marked("number", name)): number for name, number in facts.items()}
    step = min(step_of(item.record, created_ns), STEP_MAX)
    return Row(f"{item.stream_id}:{item.ordinal}", index, step, item.record.time_ns, scalars)


def _content(item: Item, made: Plan, names: Names) -> tuple[dict[str, float], tuple[Media, ...]]:
    body = item.record.body
    if item.record.kind is RecordKind.METRICS:
        flat = flatten_metrics(body)
        made.ignored.update(flat.ignored)
        numbers = flat.numbers.items()
        return {names.name(_marked("number", name)): _float(number) for name, number in numbers}, ()
    if item.record.kind is RecordKind.GENERATIONS:
        return {}, tuple(_tables(body, made, names))
    texts: dict[str, str] = {}
    for key, text in body.items():
        name = names.name(_marked("text", key_text(key)))
        texts.setdefault(name, text_of(text))
    return {}, tuple(Media(name, "text", text) for name, text in texts.items())


def _tables(body: Mapping[Any, Any], made: Plan, names: Names) -> Iterator[Media]:
    """The table of one part, in pieces that SwanLab takes."""
    columns, rows = table_of(body, "")
    head_bytes = len(json.dumps(columns)) + 8 * len(columns)  # in the file a row is an object
    size = {"rows_max": max(len(rows), 1), "bytes_max": FILE_BYTES_MAX - MARGIN_BYTES, "head_bytes": head_bytes}
    for first, piece, cut in pieces(columns, rows, **size):
        made.ignored["text_cut"] += cut
        key = f"{table_key(body)}_from_{first}" if first else table_key(body)
        yield Media(names.name(_marked("table", key)), "table", {"columns": columns, "rows": piece})


def _marked(kind: str, key: str) -> str:
    """What a key is known by in the notes: itself, when it is a number's."""
    return key if kind == "number" and KIND_MARK not in key else f"{kind}{KIND_MARK}{key}"


def _is_number(key: str) -> bool:
    """Whether a key of the notes is a number's."""
    return KIND_MARK not in key or key.startswith(f"number{KIND_MARK}")


def _unmarked(key: str) -> str:
    return key.partition(KIND_MARK)[2] if KIND_MARK in key else key


def _float(number: float) -> float:
    """As the package makes it; a whole number beyond all floats is infinite, and shown as nan like one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
