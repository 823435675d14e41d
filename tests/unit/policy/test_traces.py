"""Which traces are kept, and how much of each."""

from __future__ import annotations

from typing import Any

import pytest

from support.samples import ODD_BODIES, ODD_VALUES, span
from verl_shipper.policy.answers import Answers
from verl_shipper.policy.sampling import TraceSampling
from verl_shipper.policy.traces import LEFT_OUT, STEPS_MAX, Traces, cut, trimmed
from verl_shipper_spool.record import Record


def _kept(spans: list[Record], **values: Any) -> list[bool]:
    traces = Traces(TraceSampling(**values))
    return [traces.wants(each.step, each.body) for each in spans]


def test_all_are_kept_unless_something_else_is_wanted() -> None:
    spans = [span(step, trace) for step in (None, 1, 2) for trace in range(50)]

    assert all(_kept(spans))
    assert not any(_kept(spans, enabled=False))


def test_a_share_of_the_traces_is_kept_and_all_spans_of_a_trace_agree() -> None:
    kept = _kept([span(1, trace) for trace in range(2000)] * 2, rate=0.25)

    assert kept[:2000] == kept[2000:]
    assert 400 < sum(kept[:2000]) < 600


def test_a_larger_share_holds_the_smaller_one() -> None:
    spans = [span(1, trace) for trace in range(500)]

    assert all(more or not less for less, more in zip(_kept(spans, rate=0.2), _kept(spans, rate=0.6), strict=True))
    assert not any(_kept(spans, rate=0.0))


def test_so_many_samples_of_a_step_are_kept_with_all_their_spans() -> None:
    spans = [span(step, trace, sample) for step in (1, 2) for trace, sample in ((1, 7), (2, 8), (3, 7), (4, 9), (1, 7))]

    kept = _kept(spans, max_samples_per_step_per_worker=2)

    assert kept == [True, True, True, False, True] * 2


def test_without_an_index_a_trace_is_a_sample() -> None:
    assert _kept([span(1, trace) for trace in (1, 2, 1, 3)], max_samples_per_step_per_worker=2) == [
        *(True, True, True, False)
    ]


def test_without_a_step_there_is_no_number_of_samples() -> None:
    assert all(_kept([span(None, trace) for trace in range(9)], max_samples_per_step_per_worker=1))


def test_what_is_not_drawn_takes_no_place() -> None:
    spans = [span(1, trace) for trace in range(200)]

    assert sum(_kept(spans, max_samples_per_step_per_worker=5, rate=0.5)) == 5


def test_a_later_process_goes_on_from_the_state() -> None:
    sampling = TraceSampling(max_samples_per_step_per_worker=2)
    first, second = Traces(sampling), Traces(sampling)
    assert first.wants(1, span(1, 1).body)
    assert first.wants(1, span(1, 2).body)

    second.restore(first.state())

    assert second.wants(1, span(1, 2).body)
    assert not second.wants(1, span(1, 3).body)


def test_only_some_steps_are_remembered() -> None:
    traces = Traces(TraceSampling(max_samples_per_step_per_worker=1))
    for step in range(500):
        traces.wants(step, span(step, 1).body)

    assert len(traces.state()) == STEPS_MAX


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("abcdef", "abc… [3 characters cut]"),
        ("abc", "abc"),
        (["abcd", 1, {"k": "ab", "n": None}], ["abc… [1 characters cut]", 1, {"k": "ab", "n": None}]),
        (b"abcdef", b"abcdef"),
    ],
)
def test_longer_texts_are_cut_visibly(value: Any, expected: Any) -> None:
    assert cut(value, 3) == expected


def test_prompts_are_left_out_visibly_and_the_rest_stays() -> None:
    body = {
        "name": "turn",
        "inputs": {"prompt_ids": [1, 2], "config": {"messages": [{"role": "user"}], "n": 1}, "temperature": 0.5},
        "outputs": [{"prompt": "secret", "response": "4"}],
    }

    shown = trimmed(body, TraceSampling(include_prompt=False))

    assert shown["inputs"] == {"prompt_ids": LEFT_OUT, "config": {"messages": LEFT_OUT, "n": 1}, "temperature": 0.5}
    assert shown["outputs"] == [{"prompt": LEFT_OUT, "response": "4"}]
    assert shown["name"] == "turn"


@pytest.mark.parametrize("inputs", ["secret", [{"role": "user", "content": "secret"}], [1, 2], b"secret"])
def test_inputs_without_names_are_a_prompt(inputs: Any) -> None:
    assert trimmed({"inputs": inputs}, TraceSampling(include_prompt=False))["inputs"] == LEFT_OUT


def test_a_span_of_which_all_is_wanted_is_the_same_object() -> None:
    body = span(1, 1, inputs={"prompt": "p"}).body

    assert trimmed(body, TraceSampling(rate=0.5, max_samples_per_step_per_worker=1)) is body


ALL_KNOBS = TraceSampling(rate=0.5, max_samples_per_step_per_worker=1, max_length=2, include_prompt=False)


@pytest.mark.parametrize("value", ODD_VALUES)
@pytest.mark.parametrize("name", ["trace_id", "attributes", "inputs", "outputs", "name"])
def test_fields_may_be_anything(name: str, value: Any) -> None:
    body = span(1, 1).body | {name: value}

    Traces(ALL_KNOBS).wants(1, body)
    assert trimmed(body, ALL_KNOBS, Answers(lambda _ids: "text")).keys() >= body.keys()


@pytest.mark.parametrize("value", ODD_VALUES)
def test_a_samples_index_may_be_anything_and_counts_as_one(value: Any) -> None:
    traces = Traces(TraceSampling(max_samples_per_step_per_worker=1))
    body = span(1, 1, value).body

    assert [traces.wants(1, body), traces.wants(1, body)] == [True, True]


@pytest.mark.parametrize("body", ODD_BODIES)
def test_a_body_may_be_anything(body: dict[Any, Any]) -> None:
    Traces(ALL_KNOBS).wants(None, body)
    trimmed(body, ALL_KNOBS, Answers(lambda _ids: None))
