"""Records and losses: MessagePack both ways, strange values, and payloads that are none."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.record import (
    KIND_NAME,
    Loss,
    Record,
    RecordKind,
    Unsupported,
    decode_loss,
    decode_record,
    encode_loss,
    encode_record,
)


def _metrics(body: Any) -> Record:
    return Record(RecordKind.METRICS, 3, 4, 5, body)


def _round(body: Any) -> Any:
    return decode_record(encode_record(_metrics(body))).body


@pytest.mark.parametrize("kind", list(RecordKind))
def test_a_record_of_every_kind_comes_back_as_it_was(kind: RecordKind) -> None:
    record = Record(kind, 1, None, 1_700_000_000_000_000_000, {"key": [1, 2.5, "text", None, True, b"\0"]})

    assert decode_record(encode_record(record)) == record


def test_the_numbers_of_the_kinds_are_the_format() -> None:
    assert {int(kind): name for kind, name in KIND_NAME.items()} == {
        1: "run_start",
        2: "metrics",
        3: "generations",
        4: "span",
        5: "text",
        6: "file",
        7: "run_finish",
        8: "system",
    }


def test_numbers_at_the_edges_stay_what_they_are() -> None:
    body = {"low": -(2**63), "high": 2**64 - 1, "inf": math.inf, "minus": -math.inf, "tiny": 5e-324, "zero": -0.0}

    assert _round(body) == body
    assert math.copysign(1, _round(body)["zero"]) == -1
    assert math.isnan(_round({"nan": math.nan})["nan"])


@pytest.mark.parametrize("key", [1, -1, 2.5, True, None, b"bytes", (1, "a"), ((1, 2), "b"), "", Unsupported("type")])
def test_whatever_key_a_writer_can_pack_a_reader_can_hold(key: object) -> None:
    assert _round({key: 1, "neighbour": 2}) == {key: 1, "neighbour": 2}


def test_an_unsupported_value_is_a_marker_and_costs_no_neighbour() -> None:
    body = {"good": 1, "bad": Unsupported("torch.Tensor (3, 4)"), "list": [Unsupported("x"), 2]}

    assert _round(body) == body


def test_an_unknown_extension_is_unsupported_too() -> None:
    payload = msgpack.packb([1, 2, 0, 0, 0, {"a": msgpack.ExtType(77, b"??"), "b": 1}])

    assert decode_record(payload).body == {"a": Unsupported("extension type 77"), "b": 1}


def test_a_timestamp_is_read_as_seconds() -> None:
    payload = msgpack.packb([1, 2, 0, 0, 0, {"when": msgpack.Timestamp(12, 500_000_000)}])

    assert decode_record(payload).body == {"when": 12.5}


def test_text_that_is_not_utf8_is_visibly_replaced() -> None:
    payload = msgpack.packb([1, 2, 0, 0, 0, {"a": "?"}]).replace(b"?", b"\xff")

    assert decode_record(payload).body == {"a": "\N{REPLACEMENT CHARACTER}"}


def test_the_deepest_nesting_that_can_be_written_can_be_read() -> None:
    value: list[Any] = []
    for _ in range(500):
        value = [value]

    assert _round({"deep": value}) == {"deep": value}


def test_nesting_beyond_that_is_corruption_not_a_crash() -> None:
    with pytest.raises(CorruptionError):
        decode_record(b"\x96\x01\x02\x00\x00\x00\x81\xa1a" + b"\x91" * 100_000 + b"\xc0")


def test_fields_that_a_later_writer_adds_are_ignored() -> None:
    payload = msgpack.packb([1, 2, 3, 4, 5, {"a": 1}, "later"])

    assert decode_record(payload) == _metrics({"a": 1})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([2, 2, 0, 0, 0, {}], "not a version 1 record"),
        ([0, 2, 0, 0, 0, {}], "not a version 1 record"),
        (["1", 2, 0, 0, 0, {}], "not a version 1 record"),
        ([1, 2, 0, 0, 0], "not a version 1 record"),
        ([], "not a version 1 record"),
        ({"version": 1}, "not a version 1 record"),
        (7, "not a version 1 record"),
        ([1, 99, 0, 0, 0, {}], "unknown record kind 99"),
        ([1, 0, 0, 0, 0, {}], "unknown record kind 0"),
        ([1, [2], 0, 0, 0, {}], r"unknown record kind \[2\]"),
        ([1, 2, "0", 0, 0, {}], "wrong types"),
        ([1, 2, 0, 0, None, {}], "wrong types"),
        ([1, 2, 0, 0, 0, []], "wrong types"),
        ([1, 2, 0, "7", 0, {}], "step is str, not int"),
    ],
)
def test_a_payload_of_another_version_kind_or_shape_is_corruption(fields: object, words: str) -> None:
    with pytest.raises(CorruptionError, match=words):
        decode_record(msgpack.packb(fields))


def test_a_record_cut_at_any_byte_is_corruption() -> None:
    payload = encode_record(_metrics({"a": 1.5, "b": ["x", None], ("c", 1): Unsupported("y")}))

    for cut in range(len(payload)):
        with pytest.raises(CorruptionError):
            decode_record(payload[:cut])


@given(st.binary(max_size=200))
@settings(print_blob=True, deadline=None)
def test_random_bytes_are_a_record_a_loss_or_corruption_never_another_error(payload: bytes) -> None:
    for decode in (decode_record, decode_loss):
        with contextlib.suppress(CorruptionError):
            decode(payload)


_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.builds(Unsupported, st.text(st.characters(exclude_categories=["Cs"]))),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), _plain, max_size=5))
@settings(print_blob=True, deadline=None)
def test_any_plain_body_comes_back_as_it_was(body: dict[str, Any]) -> None:
    assert _round(body) == body


def test_a_loss_comes_back_as_it_was_and_counts_its_records() -> None:
    loss = Loss(10, 25, "span", "quota")

    assert decode_loss(encode_loss(loss)) == loss
    assert loss.count == 15


@pytest.mark.parametrize(
    "fields",
    [[2, 0, 1, "a", "b"], [1, 1, 1, "a", "b"], [1, -1, 1, "a", "b"], [1, 0, "1", "a", "b"], [1, 0, 1, "a"], [1], None],
)
def test_what_is_no_loss_is_corruption(fields: object) -> None:
    with pytest.raises(CorruptionError, match="not a"):
        decode_loss(msgpack.packb(fields))
