"""How many records a second one lane takes from its spool to its outbox, without any tracker: read, check, decode,
sample, batch, commit. And where that time goes.

    python benchmarks/policy.py [--quick] [--records 100000] [--scalars 100] [--rounds 3] [--profile] [--json FILE]

A real lane in this process over a real node spool, with a backend that takes everything at once. Subjects take turns
within a round; a subject's rate is that of its best round. `limit` is what nobody could avoid: read the segments, check
the frames, decode the records, in one loop.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import os
import pstats
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from node import machine

from verl_shipper import status
from verl_shipper.backends.base import Backend, Batch, Delivered, Limits, Outcome
from verl_shipper.ingest import Ingest
from verl_shipper.lane import Lane
from verl_shipper.lane_intake import Order
from verl_shipper.lane_process import store_path
from verl_shipper.lane_store import LaneStore
from verl_shipper_spool.frame import Kind, encode
from verl_shipper_spool.header import SCALARS, Process, StreamHeader, new_id
from verl_shipper_spool.reader import Frame, StreamReader
from verl_shipper_spool.record import Record, RecordKind, decode_record, encode_record

CHUNK_BYTES = 4 * 1024 * 1024
GROUPS = ("actor", "critic", "timing_s", "perf", "response_length", "rollout")
NAME = "null"

SUBJECTS: dict[str, dict[str, Any]] = {
    "everything": {},
    "log_frequency 10": {"log_frequency": 10},
    "log_frequency 100": {"log_frequency": 100},
    "3 patterns": {"log_frequency": {"*": 10, "timing_s/*": 100, "perf/*": 50}, "exclude": ["response_length/*"]},
    "mean over 10": {"log_frequency": 10, "log_mode": "mean"},
    "mean over ranks": {"rank": "mean"},
}


class NullBackend(Backend):
    """A tracker that has it at once."""

    name: ClassVar[str] = NAME
    limits: ClassVar[Limits] = Limits(age_s_max=0.0)

    def open(self) -> Outcome | None:
        return None

    def upload(self, batch: Batch) -> Outcome:  # noqa: ARG002 - takes everything
        return Delivered()

    def watermark(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        """Holds nothing."""


@dataclass(frozen=True, slots=True)
class Result:
    """One round of a subject."""

    subject: str
    records: int
    seconds: float
    delivered: int
    sampled_out: int

    @property
    def per_s(self) -> float:
        return self.records / self.seconds


def fill(state_dir: str, records: int, scalars: int) -> int:
    """A node spool with one stream of metrics; returns its bytes."""
    ingest = Ingest(state_dir, 1 << 40)
    ingest.open()
    process = Process("node", "b" * 36, 1, "pid:[1]", 1, 0)
    header = StreamHeader(new_id(), new_id(), SCALARS, "run", "p", "e", 0, 1, time.time_ns(), False, process)
    ingest.greet(header)
    names = [f"{GROUPS[index % len(GROUPS)]}/metric_{index}" for index in range(scalars)]
    chunk = b""
    for number in range(records):
        body = {name: number * 0.001 + place for place, name in enumerate(names)}
        payload = encode_record(Record(RecordKind.METRICS, number, number, time.time_ns(), body))
        chunk += encode(payload, number)
        if len(chunk) >= CHUNK_BYTES or number == records - 1:
            assert ingest.take(header.stream_id, ingest.end(header.stream_id), chunk, gap=False)
            chunk = b""
    finish = encode_record(
        Record(RecordKind.RUN_FINISH, records, None, time.time_ns(), {"exit_code": 0, "reason": "finish"})
    )
    assert ingest.take(header.stream_id, ingest.end(header.stream_id), encode(finish, records), gap=False)
    ingest.settle()
    size = ingest.size_bytes
    ingest.seal(header.stream_id, [])
    ingest.close()
    return size


def spool_of(state_dir: str) -> str:
    return os.path.join(state_dir, "spool")


def lane_round(state_dir: str, subject: str, records: int) -> Result:
    """The lane from the first byte to the last record settled."""
    path = store_path(state_dir, NAME)
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    order = Order(NAME, SUBJECTS[subject])
    lane = Lane(NullBackend, {}, spool_of(state_dir), LaneStore(path), order)
    began_s = time.perf_counter()
    while not _is_done(lane, records):
        lane.tick(time.monotonic())
    seconds = time.perf_counter() - began_s
    lane.close(1.0)
    account = status.report(state_dir, [NAME]).total(NAME)
    assert account.balanced, account
    assert account.pending == 0, account
    return Result(subject, records, seconds, account.delivered, account.sampled_out)


def _is_done(lane: Lane, records: int) -> bool:
    """Looks at the lane's own numbers: asking `status` would cost time that is none of its."""
    return bool(lane.runs) and all(
        run.future is None
        and not run.has_outbox
        and sum(stream.cursor.ledger.ordinal for stream in run.intake.streams.values()) >= records
        for run in lane.runs.values()
    )


def limit_round(state_dir: str, records: int) -> Result:
    """Read, check, decode; nothing is kept."""
    (name,) = os.listdir(spool_of(state_dir))
    began_s = time.perf_counter()
    count = 0
    for finding in StreamReader(os.path.join(spool_of(state_dir), name)).frames(final=True):
        if isinstance(finding, Frame) and finding.kind is Kind.RECORD:
            decode_record(finding.payload)
            count += 1
    assert count == records, count
    return Result("limit", records, time.perf_counter() - began_s, 0, 0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--scalars", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tenth of the records, one round")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    parser.add_argument("--only", default="", help="subjects whose name contains this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", help="where the spool lies")
    options = parser.parse_args()
    records = options.records // 10 if options.quick else options.records
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(dir=options.dir) as state_dir:
        size = fill(state_dir, records - 1, options.scalars)  # and the run's end
        results = measure(state_dir, records, rounds, options.only, profile=options.profile)
    print(f"{records} records of {options.scalars} scalars, {size / records:.0f} bytes each; {machine()}")
    print(f"{'subject':<20} {'records/s':>10} {'x limit':>8} {'delivered':>10} {'sampled out':>12}  rounds")
    limit = max(result.per_s for result in results["limit"])
    for subject, found in results.items():
        best = max(found, key=lambda result: result.per_s)
        spread = ", ".join(f"{result.per_s:,.0f}" for result in found)
        print(
            f"{subject:<20} {best.per_s:>10,.0f} {limit / best.per_s:>8.2f} {best.delivered:>10} {best.sampled_out:>12}"
            f"  {spread} (median {statistics.median(result.per_s for result in found):,.0f})"
        )
    if options.json:
        options.json.write_text(json.dumps({name: [asdict(each) for each in found] for name, found in results.items()}))


def measure(state_dir: str, records: int, rounds: int, only: str, *, profile: bool) -> dict[str, list[Result]]:
    """Results by subject, rounds in turns."""
    rest: dict[str, Callable[[], Result]] = {
        name: functools.partial(lane_round, state_dir, name, records) for name in SUBJECTS if only in name
    }
    subjects = {"limit": functools.partial(limit_round, state_dir, records)} | rest
    results: dict[str, list[Result]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, run in subjects.items():
            if profile and name != "limit":
                watched = cProfile.Profile()
                results[name].append(watched.runcall(run))
                print(f"== {name}")
                pstats.Stats(watched).sort_stats("tottime").print_stats(14)
            else:
                results[name].append(run())
    return results


if __name__ == "__main__":
    main()
