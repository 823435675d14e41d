"""Identity: arguments, then our variable, then the launchers' variables, in that order; garbage is no answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verl_shipper_client import identity


def test_a_fresh_run_id_is_16_hexadecimal_digits_and_never_the_same() -> None:
    first, second = identity.run_id_or_new(None), identity.run_id_or_new("")

    assert len(first) == len(second) == 16
    assert not set(first) - set("0123456789abcdef")
    assert first != second


def test_an_argument_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SHIPPER_RUN_ID", " from-env ")

    assert identity.run_id_or_new("given") == "given"
    assert identity.run_id_or_new(None) == "from-env"
    assert identity.run_id_or_new(17) == "17"


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_every_launchers_rank_is_found(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "5")

    assert identity.rank_or_detect(None) == 5
    assert identity.rank_or_detect(2) == 2


def test_torchrun_goes_before_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("WORLD_SIZE", "16")

    assert identity.rank_or_detect(None) == 3
    assert identity.world_or_detect(None) == 16


def test_without_a_launcher_there_is_one_process() -> None:
    assert identity.rank_or_detect(None) == 0
    assert identity.world_or_detect(None) == 1


@pytest.mark.parametrize("garbage", ["", "none", "-1", "1.5", "0x3", "9" * 30])
def test_a_variable_that_is_no_rank_is_passed_over(monkeypatch: pytest.MonkeyPatch, garbage: str) -> None:
    monkeypatch.setenv("RANK", garbage)
    monkeypatch.setenv("SLURM_PROCID", "4")

    assert identity.rank_or_detect(None) == 4


class _Hostile:
    def __int__(self) -> int:
        raise RuntimeError("no number")

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("given", [float("inf"), float("nan"), -1, 2**40, "x", [], _Hostile(), b"x", 1j], ids=type)
def test_a_rank_that_is_none_is_detected_instead(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    monkeypatch.setenv("RANK", "6")

    assert identity.rank_or_detect(given) == 6


@pytest.mark.parametrize(("given", "rank"), [(np.int64(3), 3), ("3", 3), (3.0, 3), (True, 1), (0, 0)])
def test_a_rank_may_come_as_any_number(given: Any, rank: int) -> None:
    assert identity.rank_or_detect(given) == rank
    assert type(identity.rank_or_detect(given)) is int


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, ""),
        ("  qwen  ", "qwen"),
        ("a\ud800b", "a�b"),
        (7, "7"),
        ("x" * 900, "x" * 500),
        (_Hostile(), ""),
    ],
    ids=["none", "blanks", "surrogate", "number", "long", "hostile"],
)
def test_a_name_is_text_that_every_tracker_takes(given: Any, name: str) -> None:
    assert identity.name(given) == name
