"""Tokens of a trajectory are written once, and every turn can be put together again from what is written."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_shipper_client.span import Span
from verl_shipper_client.verl.trajectory import Trajectory, runs_of, shared_prefix

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def span() -> Span:
    return Span(lambda _values: None, "generate", None, None, None, None)


def put_together(told: list[tuple[int, dict[str, Any], dict[str, Any]]]) -> list[list[int]]:
    """What a reader makes of spans in the order they ended: all tokens of every turn."""
    turns: list[list[int]] = []
    before: list[int] = []
    for known, inputs, outputs in told:
        tokens = before[:known] + list(inputs.get("prompt_ids", [])) + list(outputs.get("token_ids", []))
        turns.append(tokens)
        before = tokens
    return turns


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6))
def test_every_turn_can_be_put_together_again(turns: list[tuple[list[int], list[int]]]) -> None:
    trajectory = Trajectory(None)
    told = []
    for prompt, response in turns:
        each = span()
        inputs: dict[str, Any] = {"prompt_ids": prompt}
        outputs: dict[str, Any] = {"token_ids": response}
        trajectory.take_turn(each, inputs, outputs)
        told.append((each.attributes.get("known_tokens", 0), inputs, outputs))
        assert (each.attributes["prompt_tokens"], each.attributes["response_tokens"]) == (len(prompt), len(response))
    assert put_together(told) == [prompt + response for prompt, response in turns]


@given(TOKENS, TOKENS)
def test_a_shared_prefix_is_the_longest(left: list[int], right: list[int]) -> None:
    shared = shared_prefix(left, right)
    assert left[:shared] == right[:shared]
    assert left[shared : shared + 1] != right[shared : shared + 1] or not left[shared:] or not right[shared:]


@given(st.lists(st.integers(0, 1), max_size=50))
def test_runs_tell_the_whole_mask(mask: list[int]) -> None:
    runs = runs_of(mask)
    assert [value for value, count in runs for _ in range(count)] == mask
    assert all(left[0] != right[0] for left, right in itertools.pairwise(runs))


def test_a_mask_of_something_else_stays_as_it_is() -> None:
    assert runs_of([0, 2]) == [0, 2]
    assert runs_of(None) is None


def test_tokens_that_end_otherwise_than_the_turns_are_written() -> None:
    trajectory = Trajectory(None)
    trajectory.take_turn(span(), {"prompt_ids": [1, 2]}, {"token_ids": [3, 4]})
    outputs: dict[str, Any] = {"prompt_ids": [1, 2], "response_ids": [3, 9, 9], "response_logprobs": [0.0] * 3}
    trajectory.take_end(span(), outputs)
    assert outputs["response_ids"] == [3, 9, 9]  # whole, or not at all
    assert "prompt_ids" not in outputs
    assert len(outputs["response_logprobs"]) == 3
    assert "response_of" not in outputs


def turn(trajectory: Trajectory, prompt: list[int], response: Any, **outputs: Any) -> tuple[Span, dict[str, Any]]:
    each, told = span(), {"token_ids": response, **outputs}
    trajectory.take_turn(each, {"prompt_ids": prompt}, told)
    return each, told


def test_an_answer_in_pieces_is_told_by_the_spans_of_its_pieces() -> None:
    """A rollout that is interrupted goes on with what it has: the outer call returns what two inner ones have made."""
    trajectory = Trajectory(None)
    first, _ = turn(trajectory, [1, 2], [3, 4])
    second, _ = turn(trajectory, [1, 2, 3, 4], [5, 6])
    _, outer = turn(trajectory, [1, 2], [3, 4, 5, 6])
    assert outer == {"response_of": [first.span_id, second.span_id]}
    assert trajectory.result() == outer


def test_an_answer_that_comes_back_is_told_by_its_own_span() -> None:
    trajectory = Trajectory(None)
    first, _ = turn(trajectory, [1], [6, 7])
    turn(trajectory, [1, 6, 7, 20], [21, 22])
    _, again = turn(trajectory, [1], [6, 7])
    assert again == {"response_of": [first.span_id]}
    assert trajectory.result() == again


def test_a_response_that_begins_like_another_is_written_whole() -> None:
    trajectory = Trajectory(None)
    turn(trajectory, [1], [6, 7, 8])
    other, told = turn(trajectory, [1], [6, 7, 9])
    assert told == {"token_ids": [6, 7, 9]}
    assert trajectory.result() == {"response_of": [other.span_id]}


def test_a_loop_that_cuts_back_to_an_earlier_turn_has_that_turns_answer() -> None:
    trajectory = Trajectory(None)
    first, _ = turn(trajectory, [1], [2, 3])
    turn(trajectory, [1, 2, 3, 4], [5])
    trajectory.take_end(span(), {"prompt_ids": [1], "response_ids": [2, 3]})
    assert trajectory.result() == {"response_of": [first.span_id]}


def test_log_probabilities_are_left_out_only_where_they_are_told_already() -> None:
    trajectory = Trajectory(None)
    turn(trajectory, [1], [2, 3])
    _, told = turn(trajectory, [1], [2, 3], log_probs=[-0.5, -0.5])
    assert told["log_probs"] == [-0.5, -0.5]
    _, again = turn(Trajectory(None), [1], [2, 3], log_probs=np.ones(2))
    assert again["token_ids"] == [2, 3]


def test_an_empty_response_leaves_the_prompt_told_once() -> None:
    trajectory = Trajectory(None)
    each = span()
    trajectory.take_turn(each, {"prompt_ids": [1, 2]}, {})
    outputs: dict[str, Any] = {"prompt_ids": [1, 2]}
    trajectory.take_end(span(), outputs)
    assert each.attributes == {"prompt_tokens": 2, "response_tokens": 0}
    assert outputs == {}


def test_ids_may_come_as_arrays() -> None:
    trajectory = Trajectory(None)
    inputs: dict[str, Any] = {"prompt_ids": np.array([1, 2])}
    outputs: dict[str, Any] = {"token_ids": np.array([3])}
    trajectory.take_turn(span(), inputs, outputs)
    assert (inputs["prompt_ids"], outputs["token_ids"]) == ([1, 2], [3])


def test_what_is_cut_at_its_end_is_known() -> None:
    trajectory = Trajectory(None)
    turn = span()
    trajectory.take_turn(turn, {"prompt_ids": [1]}, {"token_ids": [2, 3, 4], "log_probs": [0.0] * 3})
    outputs: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2, 3], "response_logprobs": [0.0] * 2}
    trajectory.take_end(span(), outputs)
    assert outputs == {}
    assert trajectory.result() == {"response_of": [turn.span_id]}
