"""Fixtures of the spool's unit tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.disk import IN_CI, small_disk


@pytest.fixture
def tight_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 1 MiB; needs root to mount it."""
    if os.geteuid() != 0:
        if IN_CI:
            pytest.fail("CI must be able to mount a tmpfs")
        pytest.skip("needs root to mount a tmpfs")
    with small_disk(tmp_path, size_mib=1) as disk:
        yield disk
