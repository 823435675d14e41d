"""Frames: the byte table, damage, and the walker's count."""

from __future__ import annotations

import struct
import zlib

import pytest

from support.streams import frame, loss_frame, payload
from verl_shipper_spool.frame import (
    HEADER_BYTES,
    LOSS_TAG,
    MAGIC,
    PAYLOAD_BYTES_MAX,
    RECORD_TAG,
    Found,
    Kind,
    Walker,
    encode,
    scan,
)
from verl_shipper_spool.record import Loss


def _record(start: int, number: int) -> Found:
    content = payload(number)
    return Found(Kind.RECORD, start, start + HEADER_BYTES + len(content), number, content)


def test_a_frame_is_laid_out_as_the_table_says() -> None:
    made = encode(b"abc", 7)

    crc = zlib.crc32(struct.pack("<IQ", 3, 7) + b"abc", 0x5EED_0001)
    assert made == b"\xf5vs\x01" + struct.pack("<IIQ", crc, 3, 7) + b"abc"
    assert HEADER_BYTES == 20


def test_frames_come_back_in_order_with_their_places() -> None:
    one, two = frame(0), frame(1)

    found, end = scan(one + two)

    assert found == [_record(0, 0), _record(len(one), 1)]
    assert end == len(one + two)


def test_a_scan_may_begin_behind_the_buffers_start() -> None:
    one, two = frame(0), frame(1)

    assert scan(one + two, at=len(one)) == ([_record(len(one), 1)], len(one + two))


def test_bytes_and_views_of_bytes_scan_alike() -> None:
    buffer = b"??" + frame(0) + b"\xf5vs" + frame(1) + b"tail"

    assert scan(memoryview(buffer)) == scan(buffer)


@pytest.mark.parametrize("final", [False, True])
def test_a_record_cut_at_any_byte_is_not_found(final: bool) -> None:
    whole, last = frame(0), frame(1)

    for cut in range(len(last)):
        found, end = scan(whole + last[:cut], final=final)

        damage = [Found(Kind.DAMAGE, len(whole), len(whole) + cut, -1, b"")] if final and cut else []
        assert found == [_record(0, 0), *damage]
        assert end == len(whole) + (cut if final else 0)


def test_any_flipped_bit_makes_a_frame_damage() -> None:
    broken, good = frame(0), frame(1)

    for place in range(len(broken)):
        for bit in range(8):
            flipped = bytearray(broken)
            flipped[place] ^= 1 << bit
            found, end = scan(bytes(flipped) + good)

            assert found == [Found(Kind.DAMAGE, 0, len(broken), -1, b""), _record(len(broken), 1)], (place, bit)
            assert end == len(broken + good)


def test_a_zero_filled_tail_is_no_record() -> None:
    found, end = scan(frame(0) + bytes(5000))

    assert [item.kind for item in found] == [Kind.RECORD]
    assert end == len(frame(0))


def test_zeros_between_frames_are_one_damage() -> None:
    one, two = frame(0), frame(1)

    found, _ = scan(one + bytes(5000) + two)

    assert [(item.kind, item.start, item.end) for item in found] == [
        (Kind.RECORD, 0, len(one)),
        (Kind.DAMAGE, len(one), len(one) + 5000),
        (Kind.RECORD, len(one) + 5000, len(one) + 5000 + len(two)),
    ]


def test_a_loss_frame_with_the_type_of_a_record_is_damage() -> None:
    made = encode(b"abc", 7, LOSS_TAG)

    assert scan(RECORD_TAG + made[4:], final=True)[0][0].kind is Kind.DAMAGE


def test_the_magic_inside_a_payload_confuses_nobody() -> None:
    content = MAGIC * 5 + RECORD_TAG + bytes(40)

    found, _ = scan(b"x" + encode(content, 0) + encode(content, 1))

    assert [(item.kind, item.payload) for item in found] == [
        (Kind.DAMAGE, b""),
        (Kind.RECORD, content),
        (Kind.RECORD, content),
    ]


def test_lengths_of_zero_and_beyond_the_limit_are_no_frames() -> None:
    for length in (0, PAYLOAD_BYTES_MAX + 1, 0xFFFF_FFFF):
        crc = zlib.crc32(struct.pack("<IQ", length, 0), 0x5EED_0001)
        assert scan(RECORD_TAG + struct.pack("<IIQ", crc, length, 0)) == ([], 0)


@pytest.mark.parametrize("size_bytes", [0, PAYLOAD_BYTES_MAX + 1])
def test_a_payload_outside_the_limits_is_a_callers_bug(size_bytes: int) -> None:
    with pytest.raises(AssertionError):
        encode(bytes(size_bytes), 0)


def test_the_largest_frame_fits() -> None:
    found, end = scan(encode(bytes(PAYLOAD_BYTES_MAX), 3))

    assert (found[0].ordinal, len(found[0].payload), end) == (3, PAYLOAD_BYTES_MAX, PAYLOAD_BYTES_MAX + HEADER_BYTES)


def test_a_walker_counts_ordinals_across_any_cut() -> None:
    stream = frame(0) + frame(1) + loss_frame(4, Loss(2, 4, "metrics", "disk_full")) + frame(4)

    for cut in range(len(stream)):
        walker = Walker()
        walker.feed(stream[:cut])
        boundary = walker.at_boundary
        walker.feed(stream[cut:])

        assert (walker.ordinal_next, walker.at_boundary, walker.pending) == (5, True, 0)
        assert boundary == (scan(stream[:cut])[1] == cut)


def test_a_walker_says_how_many_bytes_wait_for_the_rest_of_their_frame() -> None:
    stream = frame(0) + frame(1)

    for cut in range(len(frame(0)) + 1, len(stream)):
        walker = Walker()
        for byte in range(cut):
            walker.feed(stream[byte : byte + 1])

        assert walker.pending == cut - len(frame(0))


def test_a_walker_believes_no_jump_that_a_flipped_bit_made_up() -> None:
    lying = bytearray(frame(1))
    lying[18] ^= 0x40  # ordinal 2**54 + 1
    walker = Walker()

    walker.feed(frame(0) + bytes(lying) + frame(2))

    assert walker.ordinal_next == 3


def test_a_walker_is_not_led_astray_by_an_impossible_length() -> None:
    lying = bytearray(frame(1))
    lying[11] ^= 0x80
    walker = Walker()

    walker.feed(frame(0) + bytes(lying) + frame(2) + frame(3))

    assert (walker.ordinal_next, walker.at_boundary) == (4, True)


def test_a_walker_sees_a_jump_to_a_frame_larger_than_what_it_is_fed_at_once() -> None:
    stream = frame(5, 5000) + frame(6, 5000)
    walker = Walker()

    for start in range(0, len(stream), 700):
        walker.feed(stream[start : start + 700])

    assert (walker.ordinal_next, walker.at_boundary) == (7, True)


def test_a_walker_starts_where_it_is_told() -> None:
    walker = Walker(ordinal_next=7)

    walker.feed(frame(7))

    assert walker.ordinal_next == 8
