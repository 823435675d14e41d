"""A bench whose lane samples: orders, records by step, and what of them the tracker has.

Must not know: what a test expects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.samples import metrics, record
from unit.shipper.scripted import BACKEND, Bench, Tracker, with_limits
from verl_shipper.lane_intake import Order
from verl_shipper.policy.wishes import MAY_CHOOSE
from verl_shipper_spool.frame import encode
from verl_shipper_spool.record import Record, RecordKind, decode_record, encode_record

MakeBench = Callable[..., Bench]


@contextlib.contextmanager
def benches(folder: Path) -> Iterator[MakeBench]:
    """Makes benches, and closes them in the end."""
    made: list[Bench] = []

    def new(order: Order | None = None, tracker: Tracker | None = None, **limits: Any) -> Bench:
        made.append(Bench(folder / f"state{len(made)}", tracker, with_limits(**limits), order))
        return made[-1]

    yield new
    for bench in made:
        bench.close()


def order_of(may_choose: tuple[str, ...] = MAY_CHOOSE, release_idle_s: float | None = None, **given: Any) -> Order:
    return Order(BACKEND, given, may_choose, (BACKEND, "other"), release_idle_s)


def start(**trainer: Any) -> Record:
    return record(RecordKind.RUN_START, {"config": {"trainer": trainer}})


def log(bench: Bench, stream: str, *records: Record) -> None:
    first = bench._next[stream]
    bench.put(stream, b"".join(encode(encode_record(each), first + index) for index, each in enumerate(records)))
    bench._next[stream] = first + len(records)


def log_steps(bench: Bench, stream: str, *steps: int) -> None:
    log(bench, stream, *(metrics(step, {"train/loss": step}) for step in steps))


def delivered(bench: Bench, stream: str) -> list[Record]:
    """What the tracker has of a stream, in the order of arrival."""
    return [decode_record(bench.tracker.kept[stream, number]) for number in bench.tracker.numbers(stream)]


def shown_steps(bench: Bench, stream: str) -> list[int | None]:
    return [each.step for each in delivered(bench, stream) if each.kind is RecordKind.METRICS]
