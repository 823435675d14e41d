"""Errors of the spool layer."""

from __future__ import annotations

import pytest

from verl_shipper_spool.errors import CorruptionError, SpoolError, UsageError


def test_an_errors_line_says_what_where_and_what_next() -> None:
    error = SpoolError("no room", where="/spool", hint="free some")

    assert str(error) == "no room [/spool]; free some"
    assert (error.what, error.where, error.hint) == ("no room", "/spool", "free some")


def test_place_and_advice_may_be_missing() -> None:
    assert str(SpoolError("no room")) == "no room"


@pytest.mark.parametrize("kind", [UsageError, CorruptionError])
def test_callers_choose_by_type(kind: type[SpoolError]) -> None:
    with pytest.raises(SpoolError):
        raise kind("x")
