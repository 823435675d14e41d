"""The header of a stream: both ways, and everything that is none."""

from __future__ import annotations

import os
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.streams import make_header
from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.header import (
    BULK,
    SCALARS,
    decode_header,
    encode_header,
    new_id,
    sibling,
    start_ticks,
    this_process,
)


def _fields(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgpack.unpackb(encode_header(make_header()))
    return {**fields, **changes}


def test_a_header_comes_back_as_it_was() -> None:
    header = make_header(stream_class=BULK, project="pröject/…", rank=7, forked=True)

    assert decode_header(encode_header(header)) == header


def test_fields_that_a_later_writer_adds_are_ignored() -> None:
    assert decode_header(msgpack.packb(_fields(later=1))).project == "project"


def test_a_header_cut_at_any_byte_is_corruption() -> None:
    content = encode_header(make_header())

    for cut in range(len(content)):
        with pytest.raises(CorruptionError):
            decode_header(content[:cut])


@pytest.mark.parametrize("content", [b"", bytes(300), b"\xc1", msgpack.packb(None), msgpack.packb({1: 2})])
def test_an_empty_or_zero_filled_header_is_corruption(content: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_header(content)


@pytest.mark.parametrize("name", ["stream_id", "writer_id"])
@pytest.mark.parametrize("value", ["", "a" * 31, "a" * 33, "A" * 32, "../../../../../../../../../etc/pw", "g" * 32, 7])
def test_an_id_that_is_not_32_hexadecimal_digits_is_refused(name: str, value: object) -> None:
    with pytest.raises(CorruptionError, match="is not 32 hexadecimal digits"):
        decode_header(msgpack.packb(_fields(**{name: value})))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 2),
        ("version", None),
        ("stream_class", "metrics"),
        ("stream_class", []),
        ("run_id", None),
        ("project", 3),
        ("experiment", b"x"),
        ("rank", "0"),
        ("world", None),
        ("created_ns", 1.5),
        ("process", None),
        ("process", {"pid": 1}),
        ("process", [1, 2]),
    ],
)
def test_a_field_of_the_wrong_kind_is_corruption(name: str, value: object) -> None:
    with pytest.raises(CorruptionError):
        decode_header(msgpack.packb(_fields(**{name: value})))


@pytest.mark.parametrize("name", ["node", "boot_id", "pid", "pid_namespace", "start_ticks", "uid"])
def test_a_process_field_of_the_wrong_kind_is_corruption(name: str) -> None:
    process = {**_fields()["process"], name: [1]}

    with pytest.raises(CorruptionError):
        decode_header(msgpack.packb(_fields(process=process)))


@pytest.mark.parametrize("name", [name for name in _fields() if name != "version"])
def test_a_missing_field_is_corruption(name: str) -> None:
    fields = _fields()
    del fields[name]

    with pytest.raises(CorruptionError, match="lacks a field"):
        decode_header(msgpack.packb(fields))


@given(st.binary(max_size=200))
@settings(print_blob=True, deadline=None)
def test_random_bytes_are_corruption_never_another_error(content: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_header(content)


def test_siblings_differ_in_id_and_class_alone() -> None:
    header = make_header()

    other = sibling(header, BULK)

    assert (other.stream_class, header.stream_class) == (BULK, SCALARS)
    assert other.stream_id != header.stream_id
    assert make_header(stream_id=header.stream_id, writer_id=header.writer_id) == make_header(
        stream_id=header.stream_id, writer_id=other.writer_id
    )


def test_ids_are_32_hexadecimal_digits_and_never_the_same() -> None:
    ids = {new_id() for _ in range(1000)}

    assert len(ids) == 1000
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)


def test_a_process_can_be_recognised_again() -> None:
    process = this_process()

    assert process == this_process()
    assert (process.pid, process.uid) == (os.getpid(), os.getuid())
    assert process.start_ticks == start_ticks(os.getpid()) > 0
    assert process.boot_id
    assert process.pid_namespace.startswith("pid:")


def test_a_process_that_is_not_there_has_no_start_time() -> None:
    assert start_ticks(2**22 + 1) == 0
