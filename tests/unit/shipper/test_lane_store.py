"""The lane's durable state: one transaction per change of hands, and positions that keep an outbox in order."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.batches import STREAM
from verl_shipper.backends.base import Item
from verl_shipper.lane_store import Cursor, LaneStore, Sealed, Taken
from verl_shipper_spool.record import Record, RecordKind, decode_record, encode_record

RUN = "run1"


def _item(ordinal: int) -> Item:
    payload = encode_record(Record(RecordKind.METRICS, ordinal, ordinal, 1, {"n": ordinal}))
    return Item(STREAM, ordinal, 0, decode_record(payload), payload)


def _items(first: int, count: int) -> list[Item]:
    return [_item(ordinal) for ordinal in range(first, first + count)]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lanes" / "x.sqlite3")


@pytest.fixture
def store(path: str) -> Iterator[LaneStore]:
    made = LaneStore(path)
    yield made
    made.close()


def _row(path: str, columns: str, table: str = "tallies") -> tuple[object, ...]:
    db = sqlite3.connect(path)
    row: tuple[object, ...] = db.execute(f"SELECT {columns} FROM {table}").fetchone()
    db.close()
    return row


def _drain(store: LaneStore) -> list[list[int]]:
    """Ordinals of all batches of the outbox, in the order in which a lane would send them."""
    batches = []
    while (sealed := store.first_sealed(RUN)) is not None:
        batches.append([item.ordinal for item in sealed.items])
        store.delivered(sealed, len(sealed.items), {}, {})
    return batches


def _sealed(store: LaneStore) -> Sealed:
    found = store.first_sealed(RUN)
    assert found is not None
    return found


def test_a_sealed_batch_comes_back_byte_for_byte(path: str, store: LaneStore) -> None:
    items = _items(0, 3)
    store.seal(RUN, "batch", Taken(items=items))
    store.close()

    again = LaneStore(path)
    found = again.first_sealed(RUN)
    again.close()

    assert found == Sealed(RUN, found.position if found else 0, "batch", tuple(items))


def test_cursors_survive_with_their_ledger(path: str, store: LaneStore) -> None:
    cursor = Cursor(STREAM, RUN, offset=77)
    cursor.ledger.ordinal, cursor.ledger.seen, cursor.ledger.damaged = 9, 6, True
    cursor.ledger.add("disk_full", 3)
    store.seal(RUN, "batch", Taken(items=_items(0, 6), cursors=[cursor]))
    store.close()

    again = LaneStore(path)
    assert again.cursors() == {STREAM: cursor}
    again.close()


def test_nothing_is_safe_while_a_batch_is_on_its_way_and_all_is_when_none_is(store: LaneStore) -> None:
    store.seal(RUN, "batch", Taken(items=_items(0, 2), cursors=[Cursor(STREAM, RUN, offset=50)]))
    assert store.cursors()[STREAM].safe_offset == 0

    store.delivered(_sealed(store), 2, {}, {})
    assert store.cursors()[STREAM].safe_offset == 50


def test_a_split_keeps_every_item_in_order(store: LaneStore) -> None:
    store.seal(RUN, "batch", Taken(items=_items(0, 8)))
    sealed = _sealed(store)

    store.split(sealed, [list(sealed.items[:4]), list(sealed.items[4:])])

    assert _drain(store) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_batch_can_be_halved_down_to_its_last_items_before_others(store: LaneStore) -> None:
    store.seal(RUN, "first", Taken(items=_items(0, 1024)))
    store.seal(RUN, "second", Taken(items=_items(1024, 3)))
    for _ in range(10):
        sealed = _sealed(store)
        half = len(sealed.items) // 2
        store.split(sealed, [list(sealed.items[:half]), list(sealed.items[half:])])

    batches = _drain(store)

    assert [ordinal for batch in batches for ordinal in batch] == list(range(1027))
    assert [len(batch) for batch in batches] == [1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 3]


def test_the_last_of_several_batches_can_be_halved_too(store: LaneStore) -> None:
    store.seal(RUN, "batch", Taken(items=_items(0, 1024)))
    taken = 0
    for _ in range(10):
        sealed = _sealed(store)
        half = len(sealed.items) // 2
        store.split(sealed, [list(sealed.items[:half]), list(sealed.items[half:])])
        front = _sealed(store)
        store.delivered(front, half, {}, {})
        taken += half

    assert taken == 1023
    assert _drain(store) == [[1023]]


def test_buried_items_leave_the_rest_of_the_batch_in_its_place(path: str, store: LaneStore) -> None:
    store.seal(RUN, "batch", Taken(items=_items(0, 5)))
    store.seal(RUN, "next", Taken(items=_items(5, 1)))

    store.bury(_sealed(store), {1: "too odd", 3: "too odd"})

    assert _sealed(store).batch_id == "batch.r"
    assert _drain(store) == [[0, 2, 4], [5]]
    assert _row(path, "dead_lettered, delivered") == (2, 4)
    assert _row(path, "ordinal, reason", "dead_letters") == (1, "too odd")


def test_letters_asked_back_are_sent_after_what_waits(path: str, store: LaneStore) -> None:
    store.seal(RUN, "batch", Taken(items=_items(0, 2)))
    store.bury(_sealed(store), {0: "odd", 1: "odd"})
    store.seal(RUN, "next", Taken(items=_items(2, 2)))
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("UPDATE dead_letters SET wanted = 'retry'")
    db.close()

    assert store.answer_operator() == {RUN}
    assert store.answer_operator() == set()
    assert _drain(store) == [[2, 3], [0], [1]]
    assert _row(path, "dead_lettered, delivered, discarded") == (0, 4, 0)


def test_discarded_letters_are_gone_and_counted(path: str, store: LaneStore) -> None:
    store.seal(RUN, "batch", Taken(items=_items(0, 1)))
    store.bury(_sealed(store), {0: "odd"})
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("UPDATE dead_letters SET wanted = 'discard'")
    db.close()

    assert store.answer_operator() == set()
    assert _row(path, "dead_lettered, delivered, discarded") == (0, 0, 1)
    assert _row(path, "count(*)", "dead_letters") == (0,)


def test_dead_letters_are_bounded_and_the_oldest_go_first(
    path: str, store: LaneStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_shipper.lane_store.LETTERS_BYTES_MAX", 3000)
    for index in range(10):
        store.seal(RUN, f"b{index}", Taken(items=_items(10 * index, 10)))
        store.bury(_sealed(store), dict.fromkeys(range(10), "odd"))

    left, first, size = _row(path, "count(*), min(ordinal), sum(length(item))", "dead_letters")
    assert isinstance(size, int)
    assert 1000 < size <= 3000
    assert first == 100 - left  # type: ignore[operator]
    assert _row(path, "dead_lettered, letters_full") == (left, first)
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("UPDATE dead_letters SET wanted = 'discard'")
    db.close()
    store.answer_operator()
    assert store._letters_bytes == 0


def test_positions_do_not_depend_on_a_clock_that_goes_back(store: LaneStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.seal(RUN, "first", Taken(items=_items(0, 1)))
    monkeypatch.setattr("verl_shipper.lane_store.time.time_ns", lambda: 5)
    store.seal(RUN, "second", Taken(items=_items(1, 1)))
    store.seal(RUN, "third", Taken(items=_items(2, 1)))

    assert _drain(store) == [[0], [1], [2]]


def test_what_a_backend_remembers_is_committed_with_the_delivery(store: LaneStore) -> None:
    store.seal(RUN, "batch", Taken(items=_items(0, 1)))
    store.delivered(_sealed(store), 1, {"offset": 12, "ids": ["a"]}, {})

    assert store.get_note(RUN, "offset") == 12
    assert store.get_note(RUN, "ids") == ["a"]
    assert store.get_note("other", "offset") is None


def test_values_that_a_tracker_cannot_show_add_up(path: str, store: LaneStore) -> None:
    for text in ("a", "b"):
        store.seal(RUN, text, Taken(items=_items(0, 1)))
        store.delivered(_sealed(store), 1, {}, {"text": 2, text: 1, "nothing": 0})

    packed = _row(path, "ignored")[0]
    assert packed == b"\x83\xa4text\x04\xa1a\x01\xa1b\x01"


def test_a_delivery_ends_a_park_and_keeps_the_last_error(path: str, store: LaneStore) -> None:
    store.seal(RUN, "batch", Taken(items=_items(0, 1)))
    store.trouble(RUN, "key refused", parked=True)
    assert _row(path, "parked, last_error, retries") == ("key refused", "key refused", 1)

    store.delivered(_sealed(store), 1, {}, {})
    assert _row(path, "parked, last_error") == ("", "key refused")


def test_a_transaction_that_fails_leaves_nothing_behind(store: LaneStore) -> None:
    store.seal(RUN, "batch", Taken(items=_items(0, 3)))
    sealed = _sealed(store)

    with pytest.raises(IndexError):
        store.bury(sealed, {0: "odd", 9: "odd"})

    assert store.first_sealed(RUN) == sealed
    store.put_note(RUN, "key", 1)
    assert store.get_note(RUN, "key") == 1


def test_notes_from_upload_threads_never_meet_a_transaction_of_the_lane(store: LaneStore) -> None:
    failures: list[Exception] = []
    stop = threading.Event()

    def note() -> None:
        count = 0
        while not stop.is_set():
            try:
                store.put_note("other", "count", count)
                assert store.get_note("other", "count") == count
            except (sqlite3.Error, AssertionError) as error:
                failures.append(error)
                return
            count += 1

    thread = threading.Thread(target=note)
    thread.start()
    try:
        for index in range(60):
            store.seal(RUN, f"b{index}", Taken(items=_items(index, 2), cursors=[Cursor(STREAM, RUN, offset=index + 1)]))
            store.delivered(_sealed(store), 2, {"last": index}, {})
    finally:
        stop.set()
        thread.join()

    assert not failures
