"""Lines of a file that may be torn, endless or no JSON, and the values in them. Nothing here raises for what it reads.

    cut(blocks, offset)     Line(start, end, content, is_whole)   content None: longer than LINE_BYTES_MAX
    metrics_of(content)     (step, values), or the reason why not
    row_of(content)         a row of a table by column, or the reason why not

Numbers that JSON has and MessagePack has not become floats, half of a UTF-16 pair becomes U+FFFD, as everywhere.

Must not know: files, records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from verl_shipper.policy.file_names import STEP_MAX
from verl_shipper.values import DEPTH_MAX, TOO_DEEP, visible

LINE_BYTES_MAX = 8 * 1024 * 1024  # a frame holds 16 MiB, and a number of two digits takes nine bytes in it
TEXT_CHARS_MAX = 1_000_000  # of one text, as at a client
INT_MIN, INT_MAX = -(2**63), 2**64 - 1

TOO_LONG, NO_JSON, NO_RECORD, TORN, TOO_LARGE = "line_too_long", "no_json", "no_record", "torn_line", "too_large"


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes `start` to `end` of a file, the line's end included. Not whole: the file ends in its midst."""

    start: int
    end: int
    content: bytes | None
    is_whole: bool = True


def cut(blocks: Iterable[bytes], offset: int, *, bytes_max: int = LINE_BYTES_MAX) -> Iterator[Line | None]:
    """Lines of what begins at `offset`; None for every block that ends none, so that a caller can do something else."""
    rest, start, is_long = b"", offset, False
    for block in blocks:
        place, found = 0, False
        while (newline := block.find(b"\n", place)) >= 0:
            piece = rest + block[place:newline]
            end = start + len(piece) + 1 if not is_long else offset + newline + 1
            yield Line(start, end, None if is_long or len(piece) > bytes_max else piece)
            rest, start, is_long, place, found = b"", end, False, newline + 1, True
        rest += block[place:]
        offset += len(block)
        if len(rest) > bytes_max:
            rest, is_long = b"", True
        if not found:
            yield None
    if offset > start:
        yield Line(start, offset, None if is_long else rest, is_whole=False)


def metrics_of(content: bytes) -> tuple[int | None, dict[str, Any]] | str:
    """Step and values of a line `{"step": 3, "data": {…}}`, or of a flat one."""
    found = _object(content)
    if isinstance(found, str):
        return found
    step = step_of(found.get("step"))
    data = found.get("data")
    if not isinstance(data, dict):
        data = {key: value for key, value in found.items() if key != "step"}
    return (step, _plain(data, 0)) if data else NO_RECORD


def row_of(content: bytes) -> dict[str, Any] | str:
    found = _object(content)
    return found if isinstance(found, str) else _plain(found, 0)


def step_of(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) <= STEP_MAX else None


def _object(content: bytes) -> dict[str, Any] | str:
    try:
        found = json.loads(content.decode("utf-8", "replace") if b"\xff" in content else content)
    except (ValueError, RecursionError):
        return NO_JSON
    return found if isinstance(found, dict) else NO_RECORD


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        text = visible(value)
        return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}…"
    if isinstance(value, bool) or value is None or isinstance(value, float):
        return value
    if isinstance(value, int):
        return value if INT_MIN <= value <= INT_MAX else _large(value)
    if depth >= DEPTH_MAX:
        return TOO_DEEP
    if isinstance(value, dict):
        return {visible(key): _plain(child, depth + 1) for key, child in value.items()}
    return [_plain(child, depth + 1) for child in value]


def _large(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
