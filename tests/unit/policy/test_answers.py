"""Texts of ids, and texts that one span has for another."""

from __future__ import annotations

from typing import Any

import pytest

from support.samples import ODD_VALUES
from verl_shipper.policy import answers
from verl_shipper.policy.answers import Answers
from verl_shipper_spool.arrays import Ints, packed

ONE, TWO = b"1" * 8, b"2" * 8


def words(ids: list[int]) -> str | None:
    return " ".join(map(str, ids)) if max(ids) < 100 else None


def turn(span_id: Any, *ids: int) -> dict[str, Any]:
    return {"span_id": span_id, "inputs": {}, "outputs": {"token_ids": packed(list(ids))}}


def root(of: Any) -> dict[str, Any]:
    return {"span_id": TWO, "inputs": {}, "outputs": {"response_of": [of], "reward": 1.0}}


def test_a_root_gets_the_text_of_the_turn_that_has_it() -> None:
    told = Answers(words)
    assert told.told(turn(ONE, 1, 2, 3))[1] == {"text": "1 2 3"}
    assert told.told(root(ONE))[1] == {"response_text": "1 2 3", "reward": 1.0}


def test_a_turn_that_was_delivered_before_a_restart_is_remembered_from_the_stream() -> None:
    told = Answers(words)
    told.remember(turn(ONE, 4, 5))
    assert told.told(root(ONE))[1]["response_text"] == "4 5"


def test_an_answer_in_several_pieces_is_put_together_or_not_told() -> None:
    told = Answers(words)
    told.told(turn(ONE, 1, 2))
    told.remember(turn(TWO, 3))
    both = {"span_id": b"3" * 8, "outputs": {"response_of": [ONE, TWO]}}
    assert told.told(both)[1] == {"response_text": "1 23"}
    assert told.told({"outputs": {"response_of": [ONE, b"9" * 8]}})[1] == {"response_of": [ONE, b"9" * 8]}


def test_an_answer_that_nobody_remembers_stays_the_id_of_its_span() -> None:
    assert Answers(words).told(root(ONE))[1] == {"response_of": [ONE], "reward": 1.0}


def test_ids_that_cannot_be_decoded_stay_ids_and_so_does_their_reference() -> None:
    told = Answers(words)
    inputs, outputs = told.told({"inputs": {"prompt_ids": [500, 501]}, "outputs": turn(ONE, 500)["outputs"]})
    assert inputs == {"prompt_ids": [500, 501]}
    assert isinstance(outputs["token_ids"], Ints)
    assert told.told(root(ONE))[1]["response_of"] == [ONE]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "REMEMBERED_MAX", 2)
    told = Answers(words)
    for number in range(4):
        told.told(turn(bytes([number]) * 8, number))
    assert "response_text" not in told.told(root(b"\1" * 8))[1]
    assert told.told(root(b"\3" * 8))[1]["response_text"] == "3"
    monkeypatch.setattr(answers, "REMEMBERED_CHARS_MAX", 5)
    told.told(turn(ONE, *range(10, 20)))
    assert "response_text" not in told.told(root(b"\3" * 8))[1]


@pytest.mark.parametrize("odd", ODD_VALUES, ids=range(len(ODD_VALUES)))
def test_nothing_that_a_span_may_hold_is_too_odd(odd: Any) -> None:
    told = Answers(words)
    for body in (
        turn(odd, 1),
        root(odd),
        {"span_id": ONE, "inputs": odd, "outputs": odd},
        {"outputs": {"token_ids": odd}},
    ):
        told.remember(body)
        told.told(body)
