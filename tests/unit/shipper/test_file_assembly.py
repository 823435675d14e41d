"""Files put together from parts: whatever is repeated, torn, removed, full or forbidden, a file is right or refused."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.batches import item, run_info
from support.disk import require_disks, small_disk
from support.memory import FakeMemory
from support.seeds import seeded
from verl_shipper.backends import file_assembly, file_shelf
from verl_shipper.backends.base import Batch, Delivered, Item, Reject, Retry
from verl_shipper.backends.file import FileBackend
from verl_shipper.backends.file_assembly import IDLE_S, KEEP_S, SWEEP_S, Staging, Whole, sweep
from verl_shipper.backends.file_names import Places, fit, path_of, trace_name
from verl_shipper.backends.paths import ARTIFACT_FORBIDDEN, LOCAL_FORBIDDEN
from verl_shipper_spool.file_parts import PART_BYTES, parts_of
from verl_shipper_spool.record import RecordKind

OTHER = "7" * 32


def parts(content: bytes, name: str = "a.bin", stream: str = "5" * 32, first: int = 0) -> list[Item]:
    made = parts_of(io.BytesIO(content), name)
    return [
        item(RecordKind.FILE, body, ordinal=first + place, step=3, stream_id=stream) for place, body in enumerate(made)
    ]


def content_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(str(tmp_path / "w" / "files"), "place", "run")


def again(staging: Staging, **changes: Any) -> Staging:
    """As after a crash."""
    return Staging(staging.root, "place", "run", **changes)


def staged(staging: Staging) -> list[str]:
    return sorted(os.listdir(staging.folder)) if os.path.isdir(staging.folder) else []


# Put together


def test_parts_in_any_order_any_number_of_times_over_restarts_are_one_file(staging: Staging) -> None:
    draw = seeded("parts")
    content = content_of(1, 5 * PART_BYTES + 17)
    *most, last = parts(content)
    order = most * 2
    draw.shuffle(order)
    for each in order:
        staging = again(staging)
        assert staging.take([each]).wholes == []
    (whole,) = again(staging).take([last]).wholes
    assert Path(whole.path).read_bytes() == content
    assert (whole.name, whole.size, whole.step, whole.index) == ("a.bin", len(content), 3, 0)


def test_a_file_that_the_tracker_has_is_known_again_and_leaves_only_a_note(staging: Staging) -> None:
    items = parts(content_of(2, 2 * PART_BYTES))
    (whole,) = staging.take(items).wholes
    staging.finish(whole, path="there")
    assert staged(staging) == [f"{whole.key}.done"]
    for repeat in (items, items[-1:], items[:1]):
        taken = again(staging).take(repeat)
        assert not taken.wholes
        assert not taken.refused
        assert [note["path"] for note in taken.there.values()] == ["there"] * (repeat[-1] is items[-1])
    assert staged(staging) == [f"{whole.key}.done"]


def test_a_crash_between_note_and_removal_is_cleaned_up_at_open(staging: Staging) -> None:
    (whole,) = staging.take(parts(b"x")).wholes
    kept = Path(whole.path).read_bytes()
    staging.finish(whole)
    Path(whole.path).write_bytes(kept)
    Path(staging.folder, f"{whole.key}.done").write_bytes(b"\0" * 9)  # and its note is damaged
    again(staging).open()
    assert staged(staging) == [f"{whole.key}.done"]
    assert again(staging).take(parts(b"y")).wholes
    assert list(again(staging).take(parts(b"x")[-1:]).there) == []  # another call, another file


def test_files_of_two_streams_with_one_id_stay_two(staging: Staging) -> None:
    first = parts(b"one")
    second = [replace(each, stream_id=OTHER) for each in parts(b"two")]
    second[0].record.body["file_id"] = first[0].record.body["file_id"]
    wholes = staging.take([*first, *second]).wholes
    assert sorted(Path(whole.path).read_bytes() for whole in wholes) == [b"one", b"two"]


def test_the_sum_decides_not_the_holes(staging: Staging) -> None:
    content = bytes(PART_BYTES) + b"x" + bytes(3 * PART_BYTES)
    (whole,) = staging.take(parts(content)).wholes
    assert Path(whole.path).read_bytes() == content


# Damage


def lose_tail(path: Path) -> None:
    os.truncate(path, 2 * PART_BYTES + 100)


def lose_all(path: Path) -> None:
    shutil.rmtree(path.parents[1])


def zero_middle(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(PART_BYTES)
        file.write(bytes(4096))


def grow(path: Path) -> None:
    os.truncate(path, 10 * PART_BYTES)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lose_tail, "bytes never came, from byte"),
        (lose_all, "bytes never came, from byte 0"),
        (zero_middle, "its sha256 is"),
        (grow, f"{10 * PART_BYTES} bytes came, it should have"),
    ],
)
def test_damage_in_the_staging_folder_is_told_and_healed_by_all_parts_again(
    staging: Staging, damage: Any, why: str
) -> None:
    content = content_of(3, 4 * PART_BYTES)
    *most, last = parts(content)
    staging.take(most)
    (path,) = Path(staging.folder).iterdir()
    damage(path)
    taken = again(staging).take([last])
    assert why in taken.refused[0]
    if damage is not grow:
        assert again(staging).take([*most, last]).wholes


def test_a_power_failure_leaves_at_worst_what_was_not_answered(staging: Staging) -> None:
    """What was answered was synced; of the part that was not, ext4 may leave nothing, a piece, or zeros."""
    content = content_of(4, 3 * PART_BYTES)
    first, second, last = parts(content)
    for tail in (b"", b"\0" * PART_BYTES, content[PART_BYTES : PART_BYTES + 999]):
        shutil.rmtree(staging.folder, ignore_errors=True)
        again(staging).take([first])
        (path,) = Path(staging.folder).iterdir()
        with path.open("ab") as file:
            file.write(tail)
        again(staging).take([second])
        (whole,) = again(staging).take([last]).wholes
        assert Path(whole.path).read_bytes() == content


# Bounds


def test_what_finds_no_room_is_refused_and_arrives_when_it_is_retried(staging: Staging) -> None:
    content = content_of(5, 6 * PART_BYTES)
    items = parts(content)
    small = again(staging, bytes_max=4 * PART_BYTES)
    refused: list[Item] = []
    for each in items:
        refused += [each] if small.take([each]).refused else []
    assert refused == items[4:]
    assert "no room" in small.take(items[4:5]).refused[0]
    assert "retry it later" in small.take(items[4:5]).refused[0]
    taken = [again(staging).take([each]) for each in refused]
    assert Path(taken[-1].wholes[0].path).read_bytes() == content


def test_idle_files_make_way_the_oldest_first_and_never_the_one_that_grows(staging: Staging) -> None:
    old = Staging(staging.root, "place", "other run")
    for number, name in enumerate(("older", "old")):
        first, *_ = parts(content_of(6, 3 * PART_BYTES), name, stream=f"{number}" * 32)
        old.take([first])
    for number in range(2):
        (path,) = Path(old.folder).glob(f"{number}*")
        at_s = path.stat().st_mtime - IDLE_S - 100 + number
        os.utime(path, (at_s, at_s))
    items = parts(content_of(7, 3 * PART_BYTES))
    small = again(staging, bytes_max=3 * PART_BYTES)
    for each in items[:2]:
        assert not small.take([each]).refused
    assert [name[0] for name in staged(old)] == ["1"]
    (whole,) = small.take(items[2:]).wholes
    assert whole
    assert staged(old) == []


def test_folders_of_runs_that_nobody_opens_go_and_those_of_others_stay(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, kept = Staging(staging.root, "place", "gone"), Staging(staging.root, "place", "kept")
    for each in (gone, kept):
        each.take(parts(content_of(8, 2 * PART_BYTES))[:1])
    now_s = os.stat(gone.folder).st_mtime
    long_ago_s = now_s - KEEP_S - 1
    for folder in (gone.folder, kept.folder):
        for path in (*Path(folder).iterdir(), Path(folder)):
            os.utime(path, (long_ago_s, long_ago_s))
    kept.open()  # its run waits for its tracker
    clock = [1000.0]
    monkeypatch.setattr("verl_shipper.backends.file_assembly.time.monotonic", lambda: clock[0])
    file_assembly._next_sweep_s.clear()
    staging.open()
    assert os.path.isdir(gone.folder)  # not before every run had the time to say that it is there
    clock[0] += SWEEP_S + 1
    staging.open()
    assert not os.path.isdir(gone.folder)
    assert staged(kept)
    sweep(str(Path(staging.root) / "nowhere"), now_s)


def test_a_full_disk_is_retried_and_the_file_arrives_when_there_is_room(tmp_path: Path) -> None:
    require_disks()
    content = content_of(9, 5 * PART_BYTES)
    items = parts(content)
    with small_disk(tmp_path, 4) as disk:
        filling = disk / "filling"
        filling.write_bytes(bytes(2 * 1024**2))
        backend = FileBackend(run_info(), {"dir": str(disk / "out")}, FakeMemory())
        answers = [backend.upload(Batch(f"b{place}", run_info(), (each,))) for place, each in enumerate(items)]
        assert isinstance(answers[0], Delivered)
        assert isinstance(answers[-1], Retry)
        assert "No space left" in answers[-1].reason
        filling.unlink()
        failed = [place for place, answer in enumerate(answers) if isinstance(answer, Retry)]
        for place in failed:
            assert isinstance(backend.upload(Batch(f"b{place}", run_info(), (items[place],))), Delivered)
        shelf = disk / "out" / "project" / "experiment-run1.files" / "files" / "step_3" / "a.bin"
        assert shelf.read_bytes() == content


def test_a_staging_folder_that_is_read_only_is_retried(tmp_path: Path) -> None:
    require_disks()
    with small_disk(tmp_path, 4) as disk:
        backend = FileBackend(run_info(), {"dir": str(disk / "out")}, FakeMemory())
        first, second = parts(content_of(10, PART_BYTES + 1))
        assert isinstance(backend.upload(Batch("a", run_info(), (first,))), Delivered)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        outcome = backend.upload(Batch("b", run_info(), (second,)))
        assert isinstance(outcome, Retry)
        assert "Read-only" in outcome.reason
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert isinstance(backend.upload(Batch("b", run_info(), (second,))), Delivered)


# Names


def whole(name: str, file_id: str = "a" * 32, **changes: Any) -> Whole:
    made = Whole(0, "key", "/p", file_id, name, "profile", 1, "0" * 64, 4, 0)
    return replace(made, **changes)


def test_a_path_tells_what_for_and_when_and_of_which_rank() -> None:
    assert path_of(whole("t/a.json.gz"), LOCAL_FORBIDDEN) == "profiles/step_4/t/a.json.gz"
    assert path_of(whole("a", purpose="memory", step=None), LOCAL_FORBIDDEN) == "memory/no_step/a"
    assert path_of(whole("a", purpose="odd", rank=3), LOCAL_FORBIDDEN) == "files/step_4/rank_3/a"


def test_places_are_given_once_and_kept_over_a_restart() -> None:
    places = Places()
    names = ["a", "a", "A", "a/b", "c/d", "c", "e"]
    given = [places.place(whole(name, file_id=f"{n}" * 32), ARTIFACT_FORBIDDEN) for n, name in enumerate(names)]
    assert len({path.casefold() for path in given}) == len(names)
    assert given[0] == "profiles/step_4/a"
    assert given[6] == "profiles/step_4/e"
    assert not any(path.casefold().startswith(other.casefold() + "/") for path in given for other in given)
    restarted = Places(json.loads(json.dumps(places.notes())))
    for n, name in enumerate(names):
        assert restarted.place(whole(name, file_id=f"{n}" * 32), ARTIFACT_FORBIDDEN) == given[n]
    assert not restarted.is_changed


def test_a_name_that_is_changed_keeps_its_ending_and_stays_different() -> None:
    long = [fit("x" * 300 + end, ARTIFACT_FORBIDDEN) for end in (".json.gz", "y.json.gz")]
    assert all(name.endswith(".json.gz") and len(name) <= 200 for name in long)
    assert len(set(long)) == 2
    assert fit("a(1).txt", ARTIFACT_FORBIDDEN) != fit("a[1].txt", ARTIFACT_FORBIDDEN)
    assert fit("plain.txt", ARTIFACT_FORBIDDEN) == "plain.txt"
    assert trace_name("a.json.gz") == "a.pt.trace.json.gz"
    assert trace_name("a.pt.trace.json") == "a.pt.trace.json"
    assert trace_name("a.nsys-rep") == "a.nsys-rep"


# The folder of the backend `file`


def stored(folder: Path, content: bytes, name: str, number: int) -> Whole:
    path = folder / f"staged{number}"
    path.write_bytes(content)
    return whole(name, f"{number}" * 32, path=str(path), size=len(content), sha256=hashlib.sha256(content).hexdigest())


def test_a_name_that_is_taken_by_another_content_is_left_alone(tmp_path: Path) -> None:
    shelf = str(tmp_path / "shelf")
    first, second = stored(tmp_path, b"one", "a.txt", 1), stored(tmp_path, b"two", "a.txt", 2)
    assert file_shelf.put(first, shelf) == file_shelf.put(first, shelf) == "profiles/step_4/a.txt"
    assert file_shelf.put(second, shelf) == "profiles/step_4/again_22222222/a.txt"
    torn = tmp_path / "shelf" / "profiles" / "step_4" / "again_22222222" / "a.txt"
    torn.unlink()
    torn.write_bytes(b"t")
    assert file_shelf.put(second, shelf) == "profiles/step_4/again_22222222/a.txt"
    assert torn.read_bytes() == b"two"
    assert (tmp_path / "shelf/profiles/step_4/a.txt").stat().st_mode & 0o777 == 0o644


def test_where_links_cannot_be_made_a_file_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(source: str, path: str) -> None:
        raise OSError(errno.EPERM, "no links here", source, None, path)

    monkeypatch.setattr("verl_shipper.backends.file_shelf.os.link", no_link)
    shelf = str(tmp_path / "shelf")
    for number, content in enumerate((b"one", b"two")):
        assert file_shelf.put(stored(tmp_path, content, "a.txt", number), shelf)
    found = sorted(path.read_bytes() for path in (tmp_path / "shelf").rglob("*") if path.is_file())
    assert found == [b"one", b"two"]


def test_a_refused_file_costs_no_line_of_another_record(tmp_path: Path) -> None:
    memory = FakeMemory()
    backend = FileBackend(run_info(), {"dir": str(tmp_path)}, memory)
    good = parts(b"good", "good")
    bad = parts(b"bad", "bad", first=1)
    bad[0].record.body["sha256"] = b"0" * 32
    outcome = backend.upload(Batch("b", run_info(), (*good, *bad)))
    assert isinstance(outcome, Reject)
    assert outcome.items == [1]
    assert isinstance(backend.upload(Batch("b.r", run_info(), tuple(good))), Delivered)
    (line,) = map(json.loads, (tmp_path / "project" / "experiment-run1.jsonl").read_bytes().splitlines())
    assert line["data"]["path"] == "experiment-run1.files/files/step_3/good"
    assert (line["data"]["bytes"], line["data"]["size"]) == (4, 4)
    assert "data" not in line["data"]
