"""Frames under random bytes: scanning never raises, misses no frame, and cuts change nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from verl_shipper_spool.frame import HEADER, LOSS_TAG, MAGIC, RECORD_TAG, Found, Kind, Walker, encode, scan

_frames = st.builds(
    encode,
    st.binary(min_size=1, max_size=60),
    st.integers(0, 2**63),
    st.sampled_from([RECORD_TAG, LOSS_TAG]),
)
# Bytes that look like frames for a while: magics, headers with plausible fields.
_lies = st.one_of(
    st.binary(max_size=40),
    st.just(MAGIC),
    st.builds(
        HEADER.pack,
        st.sampled_from([RECORD_TAG, LOSS_TAG, MAGIC + b"\x03"]),
        st.integers(0, 2**32 - 1),
        st.integers(0, 200),
        st.integers(0, 100),
    ),
    st.builds(bytes, st.integers(0, 60)),
)
_cuts = st.lists(st.integers(1, 90), max_size=30)


def _chunks(buffer: bytes, sizes: list[int]) -> list[bytes]:
    chunks = []
    for size in sizes:
        chunks.append(buffer[:size])
        buffer = buffer[size:]
    return [*chunks, buffer]


@given(st.lists(st.one_of(_lies, _frames), max_size=12).map(b"".join), st.booleans())
@settings(print_blob=True, deadline=None)
def test_a_scan_never_raises_and_tiles_what_it_understood(buffer: bytes, final: bool) -> None:
    found, end = scan(buffer, final=final)

    position = 0
    for item in found:
        assert (item.start, item.end > item.start) == (position, True)
        position = item.end
    assert position == end <= len(buffer)
    assert not final or end == len(buffer)


@given(st.lists(st.tuples(_lies, _frames), max_size=8), _lies)
@settings(print_blob=True, deadline=None)
def test_no_lie_hides_a_frame_behind_it(parts: list[tuple[bytes, bytes]], tail: bytes) -> None:
    buffer = b"".join(lie + frame for lie, frame in parts) + tail

    found, _ = scan(buffer)

    whole = [buffer[item.start : item.end] for item in found if item.kind is not Kind.DAMAGE]
    assert whole == [frame for _, frame in parts]


@given(st.lists(st.one_of(_lies, _frames), max_size=10).map(b"".join), _cuts)
@settings(print_blob=True, deadline=None)
def test_bytes_that_come_in_pieces_give_the_same_frames(buffer: bytes, cuts: list[int]) -> None:
    at_once = [item for item in scan(buffer)[0] if item.kind is not Kind.DAMAGE]

    seen = b""
    end = 0
    in_pieces: list[Found] = []
    for chunk in _chunks(buffer, cuts):
        seen += chunk
        found, end = scan(seen, at=end)
        in_pieces += [item for item in found if item.kind is not Kind.DAMAGE]

    assert in_pieces == at_once


@st.composite
def _streams(draw: st.DrawFn) -> bytes:
    """What a writer may leave: ordinals that jump, losses, now and then two records in the wrong order."""
    ordinal = 0
    parts: list[bytes] = []
    for _ in range(draw(st.integers(0, 12))):
        ordinal += draw(st.sampled_from([0, 0, 0, 1, 70]))
        content = draw(st.binary(min_size=1, max_size=40))
        match draw(st.sampled_from(["record", "record", "swapped", "loss"])):
            case "record":
                parts.append(encode(content, ordinal))
                ordinal += 1
            case "swapped":
                parts += [encode(content, ordinal + 1), encode(content, ordinal)]
                ordinal += 2
            case _:
                parts.append(encode(content, ordinal, LOSS_TAG))
    return b"".join(parts)


@given(_streams(), _cuts)
@settings(print_blob=True, deadline=None)
def test_a_walker_knows_what_a_scan_knows(stream: bytes, cuts: list[int]) -> None:
    walker = Walker()
    fed = 0

    for chunk in _chunks(stream, cuts):
        walker.feed(chunk)
        fed += len(chunk)

        found, end = scan(stream[:fed])
        assert (walker.at_boundary, walker.pending) == (end == fed, fed - end)
    behind = [item.ordinal + (item.kind is Kind.RECORD) for item in found]
    assert walker.ordinal_next == max(behind, default=0)


@given(st.lists(st.one_of(_lies, _frames), max_size=10).map(b"".join), _cuts)
@settings(print_blob=True, deadline=None)
def test_a_walker_takes_any_bytes(buffer: bytes, cuts: list[int]) -> None:
    walker = Walker()

    for chunk in _chunks(buffer, cuts):
        walker.feed(memoryview(chunk))

    assert 0 <= walker.pending <= len(buffer)
