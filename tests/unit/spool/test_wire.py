"""The wire: every message both ways, and everything that is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_shipper_spool.wire import (
    HEADER_BYTES_MAX,
    Ack,
    Data,
    FromClient,
    FromDaemon,
    Greet,
    Hello,
    Refuse,
    Welcome,
    pack,
    unpack_from_client,
    unpack_from_daemon,
)

ID = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    "message",
    [Hello(ID, b"header"), Data(ID, 0, False, b"bytes"), Data(ID, 2**64 - 1, True, b"\0")],
)
def test_what_a_client_says_arrives_as_it_was(message: FromClient) -> None:
    assert unpack_from_client(pack(message)) == message
    assert unpack_from_daemon(pack(message)) is None


@pytest.mark.parametrize("message", [Welcome(ID, 0), Ack(ID, 2**64 - 1), Greet(ID), Refuse(ID, "no room …")])
def test_what_a_daemon_says_arrives_as_it_was(message: FromDaemon) -> None:
    assert unpack_from_daemon(pack(message)) == message
    assert unpack_from_client(pack(message)) is None


def test_the_bytes_of_a_message_are_fixed() -> None:
    assert pack(Data(ID, 258, True, b"x")) == [b"D1", ID.encode(), b"\x02\x01\0\0\0\0\0\0\x01", b"x"]
    assert pack(Welcome(ID, 1)) == [b"W1", ID.encode(), b"\x01\0\0\0\0\0\0\0"]


@pytest.mark.parametrize("identity", [b"", b"a" * 31, b"A" * 32, b"../" * 10 + b"aa", b"g" * 32, b"\xff" * 32])
def test_an_id_that_could_be_another_folder_is_no_message(identity: bytes) -> None:
    for parts in ([b"H1", identity, b"h"], [b"D1", identity, bytes(9), b"x"]):
        assert unpack_from_client(parts) is None
    for parts in ([b"W1", identity, bytes(8)], [b"A1", identity, bytes(8)], [b"G1", identity], [b"R1", identity, b"r"]):
        assert unpack_from_daemon(parts) is None


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"D1"],
        [b"D1", ID.encode(), bytes(9)],
        [b"D1", ID.encode(), bytes(8), b"x"],
        [b"D1", ID.encode(), bytes(9), b""],
        [b"D2", ID.encode(), bytes(9), b"x"],
        [b"H1", ID.encode(), bytes(HEADER_BYTES_MAX + 1)],
        [b"H1", ID.encode(), b"h", b"more"],
    ],
)
def test_parts_of_the_wrong_number_or_size_are_no_message(parts: list[bytes]) -> None:
    assert unpack_from_client(parts) is None


def test_a_reason_that_is_not_utf8_is_visibly_replaced() -> None:
    assert unpack_from_daemon([b"R1", ID.encode(), b"\xff"]) == Refuse(ID, "\N{REPLACEMENT CHARACTER}")


@given(st.lists(st.sampled_from([b"H1", b"D1", b"W1", b"A1", b"G1", b"R1", ID.encode()]) | st.binary(max_size=20)))
@settings(print_blob=True, deadline=None)
def test_any_parts_are_a_message_or_none_never_an_error(parts: list[bytes]) -> None:
    unpack_from_client(parts)
    unpack_from_daemon(parts)
