"""Shipped files at every tracker: whole and right, none in place of another, or refused with a reason and kept.

Where a tracker has no place for files, each counts as one ignored value and delays nothing.
"""

from __future__ import annotations

import io
import random
import time
from collections import Counter
from typing import Any

import pytest

from contract import kits
from contract.bench import DELIVER_S, Bench, Direct, LaneProcess, forgetful, lane_process, metric, numbers, started
from contract.file_readers import contents, files, has_place
from contract.kits import Kit
from support.batches import TIME_NS
from support.processes import wait_for
from support.seeds import seeded
from verl_shipper.backends.base import Backend, Delivered
from verl_shipper.letters import want
from verl_shipper_spool.file_parts import FILE, PART_BYTES, PROFILE, is_last, parts_of
from verl_shipper_spool.record import Record, RecordKind

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_environment")]
with_place = pytest.mark.parametrize(
    "kit", [name for name in kits.names() if has_place(kits.KITS[name])], indirect=True, scope="session"
)
B = "6" * 32
TRACE = "actor_step7_rank0.json.gz"


def bytes_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def parts(content: bytes, name: str = TRACE, purpose: str = PROFILE, step: int | None = 7) -> list[Record]:
    made = parts_of(io.BytesIO(content), name, purpose)
    return [Record(RecordKind.FILE, 0, step, TIME_NS, body) for body in made]


def changed(record: Record, **body: Any) -> Record:
    return Record(record.kind, record.seq, record.step, record.time_ns, {**record.body, **body})


def test_a_file_counts_once_where_there_is_no_place_for_it(kit: Kit, direct: Direct) -> None:
    records = [started(), *parts(bytes_of(1, 3 * PART_BYTES)), metric({"n": 1.0}, 1), *parts(b"", "empty")]
    ignored, refused = direct.deliver(direct.fresh(), direct.batch(*records))
    assert not refused
    assert ignored.get("file", 0) == (0 if has_place(type(kit)) or kit.backend == "console" else 2)
    assert kit.values(direct.run, "n") == [(1, 1.0)]


@with_place
def test_a_file_of_many_parts_arrives_whole_beside_the_metrics(kit: Kit, bench: Bench, backend: type[Backend]) -> None:
    run, content = kit.run(), bytes_of(2, 5 * PART_BYTES + 12345)
    bench.open_lane(backend)
    bench.log(bench.stream(run), started(), *numbers(0, 5))
    bench.log(bench.stream(run), *parts(content))
    bench.deliver_all()
    assert contents(kit, run) == [content]
    assert kit.values(run, "n") == [(n, float(n)) for n in range(5)]
    assert bench.account().delivered == bench.account().logged == 12


@with_place
def test_a_crash_after_every_batch_and_before_every_commit_loses_and_doubles_nothing(kit: Kit, direct: Direct) -> None:
    content = bytes_of(3, 4 * PART_BYTES + 1)
    direct.deliver(direct.fresh(), direct.batch(started()))
    records = parts(content)
    for first in range(0, len(records), 2):
        sent = direct.batch(*records[first : first + 2], stream=B, first=first)
        for _ in range(2):
            assert isinstance(direct.fresh().upload(sent), Delivered)
        direct.deliver(direct.fresh(), sent)
    assert contents(kit, direct.run) == [content]


@with_place
def test_a_lane_killed_at_random_while_a_file_goes_up_sends_it_once(kit: Kit, bench: Bench) -> None:
    draw = seeded("lane killed")
    run, content = kit.run(), bytes_of(4, 12 * PART_BYTES)
    stream = bench.stream(run)
    bench.log(stream, started(), *numbers(0, 3))
    bench.log(bench.stream(run), *parts(content))
    for _ in range(6):
        process = LaneProcess(bench)
        time.sleep(draw.uniform(0.1, 4.0))
        process.kill()
    with lane_process(bench):
        wait_for(lambda: bench.account().pending == 0, DELIVER_S, "the last lane delivers all")
    assert contents(kit, run) == [content]
    assert kit.values(run, "n") == [(n, float(n)) for n in range(3)]
    assert bench.account().balanced
    assert not bench.account().dead_lettered


@with_place
def test_answers_lost_twice_for_every_batch_send_a_file_once(kit: Kit, bench: Bench, backend: type[Backend]) -> None:
    run, content = kit.run(), bytes_of(5, 2 * PART_BYTES + 7)
    bench.open_lane(forgetful(kit, backend))
    bench.log(bench.stream(run), started(), *parts(content), *numbers(0, 3))
    bench.deliver_all()
    assert contents(kit, run) == [content]
    assert kit.values(run, "n") == [(n, float(n)) for n in range(3)]


@with_place
def test_a_wrong_file_is_a_dead_letter_with_the_reason_and_the_others_go_on(
    kit: Kit, bench: Bench, backend: type[Backend]
) -> None:
    run, good = kit.run(), bytes_of(6, PART_BYTES + 1)
    *most, last = parts(bytes_of(7, 3 * PART_BYTES), "wrong.bin")
    first, _lost, end = parts(bytes_of(8, 3 * PART_BYTES), "torn.bin")
    bench.open_lane(backend)
    bench.log(bench.stream(run), started(), *most, changed(last, sha256=b"\0" * 32), first, end, *parts(good))
    bench.log(bench.stream(run, rank=1), *numbers(0, 3))
    bench.deliver_all()
    assert contents(kit, run) == [good]
    assert sorted(letter.reason.partition(":")[0] for letter in bench.letters()) == ["torn.bin", "wrong.bin"]
    reasons = " ".join(letter.reason for letter in bench.letters())
    assert "its sha256 is" in reasons
    assert f"{PART_BYTES} of its {3 * PART_BYTES} bytes never came, from byte {PART_BYTES} on" in reasons
    assert (bench.account().dead_lettered, bench.account().pending) == (2, 0)


@with_place
def test_a_retried_dead_letter_finds_what_was_kept(kit: Kit, bench: Bench, backend: type[Backend]) -> None:
    run, content = kit.run(), bytes_of(9, 3 * PART_BYTES)
    first, second, last = parts(content, "late.bin", FILE)
    bench.open_lane(backend)
    stream = bench.stream(run)
    bench.log(stream, started(), first, last)
    bench.deliver_all()
    assert bench.account().dead_lettered == 1
    bench.log(stream, second)
    bench.deliver_all()
    assert want(str(bench.root), "retry", None, (), None) == 1
    bench.turn(lambda: not bench.account().dead_lettered and not bench.account().pending, "the retry arrives")
    assert contents(kit, run) == [content]


@with_place
def test_files_of_one_name_and_step_all_arrive(kit: Kit, direct: Direct) -> None:
    backend = direct.fresh()
    made = [bytes_of(seed, 1000) for seed in range(10, 14)]
    direct.deliver(backend, direct.batch(started(), *parts(made[0]), *parts(made[1])))
    direct.deliver(backend, direct.batch(*parts(made[2]), stream=B))
    direct.deliver(direct.fresh(), direct.batch(*parts(made[3]), stream=B, first=1, rank=3))
    assert contents(kit, direct.run) == sorted(made)


ODD_NAMES = [
    "奖励 trace(1)😀.json.gz",
    "../../../etc/passwd",
    "/abs/olute",
    "a//b/./c.txt",
    "Case.txt",
    "case.txt",
    "x" * 300 + ".pickle.gz",
    "y" * 300 + ".pickle.gz",
    "cut \ud83d here",
    "",
    "..",
    ".hidden",
    " lead",
    "end. ",
    "new\nline\x1b[31m",
    "100%_#?&=:",
    "folder",
    "folder/in.txt",
    "folder/in.txt/in",
    "C:\\temp\\x",
]


@with_place
def test_odd_names_lose_no_file_and_lead_nowhere_else(kit: Kit, direct: Direct) -> None:
    backend = direct.fresh()
    records = [started()]
    for number, name in enumerate(ODD_NAMES):
        (last,) = parts(b"%d" % number, "x", FILE, step=[None, -1, 2**40][number % 3])
        records.append(changed(last, name=name))
    _, refused = direct.deliver(backend, direct.batch(*records))
    assert not refused
    found = files(kit, direct.run)
    assert sorted(content for _, content in found) == sorted(b"%d" % number for number in range(len(ODD_NAMES)))
    assert sum(name.endswith(".pickle.gz") for name, _ in found) == 2
    assert not any(".." in name.split("/") for name, _ in found)


@with_place
def test_an_empty_file_and_a_large_one_arrive(kit: Kit, bench: Bench, backend: type[Backend]) -> None:
    run, large = kit.run(), bytes_of(15, 20 * 1024**2)
    bench.open_lane(backend)
    stream = bench.stream(run)
    bench.log(stream, started(), *parts(b"", "empty.txt", FILE))
    begin_s = time.monotonic()
    bench.log(stream, *parts(large))
    bench.deliver_all()
    print(f"{type(kit).__name__}: {len(large) / 1e6 / (time.monotonic() - begin_s):.1f} MB/s")
    assert contents(kit, run) == sorted([b"", large])


NONSENSE: list[dict[Any, Any]] = [
    {},
    {"file_id": "text", "offset": 0, "data": b"x"},
    {"file_id": b"1" * 16, "name": 3, "offset": -1, "data": b"x"},
    {"file_id": b"1" * 16, "name": "x", "offset": 2**62, "data": b"x"},
    {"file_id": b"1" * 16, "name": "x", "offset": 0, "data": "text"},
    {"file_id": b"1" * 16, "name": "x", "offset": 0, "data": b"x", "size": None, "sha256": b"1"},
    {"file_id": b"1" * 16, "name": "x", "offset": 0, "data": b"x", "size": 10, "sha256": None},
]


def test_nonsense_in_a_file_record_costs_that_record_only(kit: Kit, direct: Direct) -> None:
    odd = [Record(RecordKind.FILE, 0, 1, TIME_NS, body) for body in NONSENSE]
    _, refused = direct.deliver(direct.fresh(), direct.batch(started(), metric({"n": 1.0}, 1), *odd, finish_of(2)))
    assert len(refused) in (0, len(NONSENSE))
    assert kit.values(direct.run, "n") == [(1, 1.0), (2, 2.0)]
    if has_place(type(kit)):
        assert refused
        assert not files(kit, direct.run)


def finish_of(step: int) -> Record:
    return metric({"n": float(step)}, step)


@with_place
def test_an_outage_in_the_middle_of_a_file_only_delays_it(kit: Kit, bench: Bench, backend: type[Backend]) -> None:
    run, content = kit.run(), bytes_of(16, 4 * PART_BYTES)
    records = parts(content)
    assert Counter(map(is_last, (record.body for record in records))) == {False: 3, True: 1}
    bench.open_lane(backend)
    stream = bench.stream(run)
    bench.log(stream, started(), *numbers(0, 2), *records[:2])
    bench.deliver_all()
    kit.gone()
    bench.log(stream, *records[2:], *numbers(2, 2))
    bench.turn(lambda: bench.account().last_error, "the outage is told of")
    kit.heal()
    bench.skip_pauses()
    bench.deliver_all()
    assert contents(kit, run) == [content]
    assert kit.values(run, "n") == [(n, float(n)) for n in range(4)]
