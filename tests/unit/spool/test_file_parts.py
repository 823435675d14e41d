"""A file as parts: they are the file again, and their last one says so."""

from __future__ import annotations

import gzip
import hashlib
import io

import pytest

from verl_shipper_spool import file_parts
from verl_shipper_spool.file_parts import PART_BYTES, FileTooLargeError, clean_name, is_last, parts_of


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 7])
def test_parts_in_order_are_the_file_and_only_the_last_one_says_what_it_has_to_be(size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    content = content[:size]

    parts = list(parts_of(io.BytesIO(content), "trace.bin"))

    assert b"".join(part["data"] for part in parts) == content
    assert [part["offset"] for part in parts] == [sum(len(p["data"]) for p in parts[:i]) for i in range(len(parts))]
    assert [is_last(part) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["size"] == size
    assert parts[-1]["sha256"] == hashlib.sha256(content).digest()
    assert len({part["file_id"] for part in parts}) == 1


def test_a_compressed_file_is_gzip_and_the_same_bytes_every_time() -> None:
    content = b'{"traceEvents": []}' * 100_000

    one, two = (b"".join(p["data"] for p in parts_of(io.BytesIO(content), "t.json", compress=True)) for _ in "ab")

    assert one == two
    assert gzip.decompress(one) == content
    assert next(parts_of(io.BytesIO(content), "t.json", compress=True))["name"] == "t.json.gz"


def test_a_file_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts, "FILE_BYTES_MAX", PART_BYTES)

    with pytest.raises(FileTooLargeError, match="is larger than"):
        list(parts_of(io.BytesIO(bytes(PART_BYTES + 1)), "large.bin"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("trace.json", "trace.json"),
        ("/etc/passwd", "etc/passwd"),
        ("../../x", "x"),
        ("a/./b//c/..", "a/b"),
        ("a\\b", "a/b"),
        ("", "file"),
        ("..", "file"),
        ("nul\0", "nul"),
        ("bad\udcff", "bad?"),
    ],
)
def test_a_name_leads_nowhere_else(given: str, expected: str) -> None:
    assert clean_name(given) == expected
