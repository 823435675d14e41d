"""Dead letters as an operator sees them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.shipper.scripted import BACKEND, Bench, Tracker
from verl_shipper.backends.base import Reject
from verl_shipper.errors import ShipperError
from verl_shipper.letters import letters, want


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Two runs with three dead letters each."""
    made = Bench(tmp_path / "state", Tracker(lambda _batch: Reject("400 no such metric")))
    for run_id in ("a", "b"):
        made.log(made.stream(run_id=run_id), 3)
    made.until_quiet()
    yield made
    made.close()


def _wanted(state: str) -> dict[tuple[str, int | None], str | None]:
    return {(letter.run_id, letter.step): letter.wanted for letter in letters(state)}


def test_letters_tell_whose_they_are_and_why(bench: Bench) -> None:
    found = letters(str(bench.root))

    assert len(found) == 6
    assert {(letter.backend, letter.kind, letter.reason) for letter in found} == {
        (BACKEND, "metrics", "400 no such metric")
    }
    assert [letter.time_ns for letter in found] == sorted(letter.time_ns for letter in found)


def test_one_letter_one_run_or_all_can_be_wanted(bench: Bench) -> None:
    state = str(bench.root)
    first = letters(state)[0]

    assert want(state, "discard", BACKEND, [first.letter_id], None) == 1
    assert [letter.letter_id for letter in letters(state) if letter.wanted] == [first.letter_id]
    assert want(state, "retry", None, (), "b") == 3
    assert {key: value for key, value in _wanted(state).items() if key[0] == "b"} == {
        ("b", n): "retry" for n in range(3)
    }
    assert want(state, "retry", BACKEND, (), None) == 6
    assert set(_wanted(state).values()) == {"retry"}


@pytest.mark.parametrize(("backend", "ids", "run_id"), [("other", (), None), (BACKEND, (99,), None), (None, (), "c")])
def test_what_is_not_there_marks_nothing(
    bench: Bench, backend: str | None, ids: tuple[int, ...], run_id: str | None
) -> None:
    assert want(str(bench.root), "retry", backend, ids, run_id) == 0


def test_ids_of_another_run_are_left_alone(bench: Bench) -> None:
    state = str(bench.root)
    of_a = [letter.letter_id for letter in letters(state) if letter.run_id == "a"]

    assert want(state, "discard", BACKEND, of_a, "b") == 0


def test_a_letter_that_cannot_be_read_is_listed_all_the_same(bench: Bench) -> None:
    db = sqlite3.connect(bench.store_path, isolation_level=None)
    db.execute("UPDATE dead_letters SET item = x'c1' WHERE letter_id = 1")
    db.close()

    assert [letter.kind for letter in letters(str(bench.root))].count("unreadable") == 1


def test_no_state_has_no_letters(tmp_path: Path) -> None:
    assert letters(str(tmp_path)) == []
    assert want(str(tmp_path), "retry", None, (), None) == 0


def test_a_damaged_state_is_one_line_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "lanes").mkdir()
    (tmp_path / "lanes" / "file.sqlite3").write_bytes(b"text" * 1000)

    with pytest.raises(ShipperError) as raised:
        letters(str(tmp_path))

    assert raised.value.hint
    assert "file.sqlite3" in raised.value.line()
