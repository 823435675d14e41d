"""`log_file`: a file's content as records, whatever becomes of the file."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from unit.client.spooled import bodies
from verl_shipper_client import Client
from verl_shipper_spool.file_parts import PART_BYTES
from verl_shipper_spool.record import RecordKind


def test_a_file_is_in_the_spool_when_log_file_has_returned(tmp_path: Path) -> None:
    source = tmp_path / "trace.json"
    source.write_bytes(b"x" * (PART_BYTES + 5))
    client = Client(spool_dir=tmp_path / "spool")

    client.log_file(source, name="profiles/trace.json", step=3)
    source.unlink()

    parts = bodies(tmp_path / "spool", RecordKind.FILE)
    assert b"".join(part["data"] for part in parts) == b"x" * (PART_BYTES + 5)
    assert {part["name"] for part in parts} == {"profiles/trace.json"}


def test_a_file_that_is_compressed_says_so_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("[]" * 1000)
    client = Client(spool_dir=tmp_path / "spool")

    client.log_file(tmp_path / "trace.json", compress=True, purpose="profile")

    (part,) = bodies(tmp_path / "spool", RecordKind.FILE)
    assert (part["name"], part["purpose"]) == ("trace.json.gz", "profile")
    assert gzip.decompress(part["data"]) == b"[]" * 1000


def test_a_file_that_is_not_there_costs_one_line_and_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Client(spool_dir=tmp_path / "spool")

    client.log_file(tmp_path / "none")

    assert client.errors == 1
    assert "log_file failed: FileNotFoundError" in capsys.readouterr().err
