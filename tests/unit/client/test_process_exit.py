"""A run that nobody finished by hand ends with the exit code of its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl_shipper_spool.reader import Frame, StreamReader
from verl_shipper_spool.record import RecordKind, decode_record

ENDINGS = {
    "falling off the end": ("", 0),
    "sys.exit with a code": ("import sys; sys.exit(3)", 3),
    "sys.exit without one": ("import sys; sys.exit()", 0),
    "sys.exit with a text": ("import sys; sys.exit('no such model')", 1),
    "an uncaught exception": ("raise ValueError('diverged')", 1),
    "sys.exit in a thread, then the end": (
        "import sys, threading; t = threading.Thread(target=sys.exit, args=(9,)); t.start(); t.join()",
        0,
    ),
    "a caught sys.exit, then another": (
        "import sys\ntry: sys.exit(5)\nexcept SystemExit: pass\nsys.exit(6)",
        6,
    ),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_the_recorded_exit_code_is_that_of_the_process(how: str, tmp_path: Path) -> None:
    ending, code = ENDINGS[how]
    script = f"from verl_shipper_client import Client\nClient('p', 'e', spool_dir={str(tmp_path)!r})\n{ending}\n"

    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, timeout=60)

    assert ended.returncode == code
    assert _recorded_code(tmp_path) == code


def test_a_with_block_records_the_code_of_a_system_exit(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom verl_shipper_client import Client\n"
        f"with Client('p', 'e', spool_dir={str(tmp_path)!r}):\n    raise SystemExit(4)\n"
    )

    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, timeout=60)

    assert ended.returncode == 4
    assert _recorded_code(tmp_path) == 4


def _recorded_code(spool: Path) -> object:
    codes = []
    for folder in spool.iterdir():
        for finding in StreamReader(str(folder)).frames():
            record = decode_record(finding.payload) if isinstance(finding, Frame) else None
            if record is not None and record.kind is RecordKind.RUN_FINISH:
                codes.append(record.body["exit_code"])
    assert len(codes) == 1, codes
    return codes[0]
