"""When a file may be taken, by what was seen of it; and what its name says."""

from __future__ import annotations

from typing import Any

import pytest

from verl_shipper.policy.file_names import dump_step, kind_of, names_in, purpose_of, step_in
from verl_shipper.policy.watching import (
    OLD_S,
    Fate,
    Known,
    Seen,
    Sighting,
    digest,
    is_followed,
    sight,
    stands_still,
    time_of,
)

NOW_NS = 10**18


def seen(size: int = 10, age_s: float = 0.0, inode: int = 2) -> Seen:
    return Seen(1, inode, size, NOW_NS - int(age_s * 1e9))


def test_a_file_stands_still_when_it_was_seen_the_same_for_so_long() -> None:
    first = sight(None, seen(), 100.0)
    same = sight(first, seen(), 104.0)
    grown = sight(same, seen(11), 104.5)

    assert not stands_still(same, 104.0, NOW_NS, 5.0)
    assert stands_still(same, 105.0, NOW_NS, 5.0)
    assert not stands_still(grown, 105.0, NOW_NS, 5.0)


@pytest.mark.parametrize(
    ("age_s", "is_first", "by_age", "expected"),
    [
        (OLD_S + 1, True, False, True),
        (OLD_S + 1, False, False, False),  # a file server whose clock is behind: we saw it change just now
        (OLD_S - 1, True, False, False),
        (6.0, False, True, True),
        (4.0, False, True, False),
        (-3600.0, True, True, False),  # and one whose clock is ahead
    ],
)
def test_a_files_own_age_counts_only_where_nobody_could_have_watched(
    age_s: float, is_first: bool, by_age: bool, expected: bool
) -> None:
    sighting = Sighting(seen(age_s=age_s), 100.0, is_first=is_first)

    assert stands_still(sighting, 100.0, NOW_NS, 5.0, by_age=by_age) is expected


def test_a_later_step_that_was_begun_later_says_that_one_is_complete() -> None:
    mine = seen(age_s=10)

    assert is_followed(3, mine, ((4, mine.mtime_ns + 1),))
    assert not is_followed(3, mine, ((4, mine.mtime_ns),))
    assert not is_followed(3, mine, ((2, mine.mtime_ns + 1), (3, mine.mtime_ns + 1)))
    assert not is_followed(None, mine, ((4, mine.mtime_ns + 1),))


@pytest.mark.parametrize(
    ("found", "head", "before", "expected"),
    [
        (seen(10), b"head", b"before", Fate.SAME),
        (seen(11), b"head", b"before", Fate.GROWN),
        (seen(9), b"head", b"before", Fate.ANEW),
        (seen(11, inode=3), b"head", b"before", Fate.ANEW),
        (seen(11), b"Head", b"before", Fate.ANEW),
        (seen(11), b"head", b"Before", Fate.ANEW),
    ],
)
def test_a_growing_file_is_told_from_one_written_anew(found: Seen, head: bytes, before: bytes, expected: Fate) -> None:
    known = Known(seen().identity, 10, 4, digest(b"head"), digest(b"before"))

    assert known.fate(found, head, before) is expected


def test_a_time_from_the_future_or_from_nowhere_is_not_believed() -> None:
    assert time_of(seen(age_s=5), NOW_NS) == NOW_NS - 5 * 10**9
    assert time_of(seen(age_s=-3600), NOW_NS) == NOW_NS
    assert time_of(Seen(1, 2, 3, 0), NOW_NS) == NOW_NS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("12.jsonl", "generations"),
        ("grpo.jsonl", "metrics"),
        ("a.json.gz", "file"),
        ("a.pt.trace.json", "file"),
        ("m.pickle", "file"),
        ("w.nsys-rep", "file"),
        ("main_ppo.log", None),
        (".12.jsonl", None),
        ("12.jsonl.tmp", None),
        ("12.jsonl~", None),
    ],
)
def test_a_name_tells_the_kind(name: str, expected: str | None) -> None:
    assert kind_of(name, "auto", is_named=False) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("actor_train_step12_rank0-of-8_pid7.json.gz", 12),
        ("step_4/torch_memory_rank0.pickle", 4),
        ("global_step_8/x.json", 8),
        ("step4/actor_step_9.json", 9),
        ("footstep4.json", None),
        ("step" + "9" * 19 + ".json", None),
        ("step4x.json", None),
    ],
)
def test_a_path_tells_the_step(path: str, expected: int | None) -> None:
    assert step_in(path) == expected


def test_other_things_that_names_tell() -> None:
    assert [dump_step(name) for name in ("7.jsonl", "07.jsonl", "x.jsonl", f"{2**63}.jsonl")] == [7, 7, None, None]
    assert [purpose_of(name) for name in ("a.json.gz", "a.pickle", "a.txt")] == ["profile", "memory", "file"]
    assert names_in("/logs/llm/grpo.jsonl") == ("llm", "grpo")


def test_kinds_that_are_named_take_any_name_a_pattern_chose() -> None:
    wanted: list[tuple[Any, ...]] = [("x.txt", "file"), ("x.log", "metrics"), ("step_7.jsonl", "generations")]
    for name, kind in wanted:
        assert kind_of(name, kind, is_named=True) == kind
        assert kind_of(name, kind, is_named=False) is None
