"""All knobs on one stream: which records are delivered, and as what."""

from __future__ import annotations

import math
from typing import Any

import pytest

from support.samples import (
    ODD_BODIES,
    ODD_VALUES,
    bodies,
    judged,
    kept,
    metrics,
    part,
    record,
    sampler,
    span,
    travelled,
)
from verl_shipper.policy import stream_sampler
from verl_shipper.policy.sampling import Sampling, TraceSampling
from verl_shipper.policy.stream_sampler import BY_NAME, BY_RANK, BY_STEP, BY_TRACE, StreamSampler, Writer
from verl_shipper.values import flatten_metrics
from verl_shipper_spool.record import Record, RecordKind, encode_record

START, FINISH = record(RecordKind.RUN_START, {"config": {}}), record(RecordKind.RUN_FINISH, {"exit_code": 0})


def _steps(decisions: list[stream_sampler.Decision[int]]) -> list[int | None]:
    return [decision.record.step for decision in decisions if decision.record is not None]


# Steps


def test_of_two_calls_a_step_both_arrive_or_none_and_validation_always() -> None:
    """The last step of a run, and of every ten; as a trainer logs it."""
    stream: list[Record | None] = [START]
    for step in range(96):
        if step in (0, 30, 60, 93, 95):
            stream.append(metrics(step, {"val/acc": step}))
        if step:
            stream += [metrics(step, {"train/loss": step}), metrics(step, {"timing/s": step})]
    stream.append(FINISH)

    decisions = judged(sampler(log_frequency=10), stream, end=False)

    assert [decision.tag for decision in decisions] == list(range(len(stream)))
    named: dict[str, list[int | None]] = {"train/loss": [], "timing/s": [], "val/acc": []}
    for tag in kept(decisions)[1:-1]:
        each = stream[tag]
        assert each is not None
        named[next(iter(each.body))].append(each.step)
    wanted = [*range(10, 100, 10), 95]
    assert named == {"train/loss": wanted, "timing/s": wanted, "val/acc": [0, 30, 60, 93, 95]}
    assert sum(decision.why == BY_STEP for decision in decisions) == len(stream) - 2 - 5 - 2 * len(wanted)


def test_the_newest_step_waits_and_is_the_last_when_the_run_ends() -> None:
    made = sampler(log_frequency=10)
    decisions = judged(made, [metrics(1, a=1), metrics(2, a=2), metrics(3, a=3)], end=False)
    assert [decision.tag for decision in decisions] == [0, 1]
    assert made.waits

    made.offer(3, FINISH)

    assert kept(made.decided()) == [2, 3]


def test_a_multiple_does_not_wait() -> None:
    made = sampler(log_frequency=10)

    assert kept(judged(made, [metrics(5, a=1), metrics(10, a=2)], end=False)) == [0, 1]


def test_names_with_different_frequencies_are_taken_out_one_by_one() -> None:
    stream: list[Record | None] = [metrics(step, {"a": step, "b": step, "c": step}) for step in range(13)]

    decisions = judged(sampler(log_frequency={"a": 4, "b": 6}), stream)

    assert [sorted(body) for body in bodies(decisions)] == [
        *(["a", "b", "c"], ["c"], ["c"], ["c"], ["a", "c"], ["c"], ["b", "c"], ["c"], ["a", "c"], ["c"], ["c"]),
        *(["c"], ["a", "b", "c"]),
    ]
    assert sum(decision.thinned for decision in decisions) == 2 * 13 - 4 - 3


def test_metrics_without_a_step_are_kept_and_do_not_count_as_one() -> None:
    stream: list[Record | None] = [metrics(None, a=1), *(metrics(step, a=1) for step in (3, 4, 5)), metrics(None, a=2)]

    assert kept(judged(sampler(log_frequency=10), stream)) == [0, 1, 3, 4]


def test_steps_of_names_that_are_not_sampled_do_not_count() -> None:
    stream: list[Record | None] = [metrics(1, a=1), metrics(5, a=1), metrics(7, b=1), metrics(12, a=1)]

    assert kept(judged(sampler(log_frequency={"a": 10}), stream)) == [0, 1, 2, 3]


def test_a_step_of_which_nothing_is_wanted_is_not_the_first_one() -> None:
    stream: list[Record | None] = [metrics(0, x=1), metrics(1, a=1), metrics(2, a=1), metrics(3, a=1)]

    assert kept(judged(sampler(log_frequency=10, exclude=["x"]), stream)) == [1, 3]


def test_a_step_too_large_to_wait_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_sampler, "WAITING_MAX", 5)
    stream: list[Record | None] = [metrics(1, a=1), *(metrics(2, a=number) for number in range(12)), metrics(3, a=1)]

    made = sampler(log_frequency=10)
    decisions = judged(made, stream, end=False)

    assert kept(decisions) == list(range(13))


def test_what_waits_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_sampler, "WAITING_BYTES_MAX", 100)
    made = sampler(log_frequency=10)
    made.offer(0, metrics(1, a=1), 60)
    assert len(list(made.decided())) == 1

    made.offer(1, metrics(2, a=1), 60)
    assert list(made.decided()) == []
    made.offer(2, metrics(2, b=1), 60)

    assert kept(made.decided()) == [1, 2]


def test_what_is_no_record_passes_in_its_place() -> None:
    decisions = judged(sampler(log_frequency=10), [None, metrics(1, a=1), metrics(2, a=1), None, metrics(3, a=1)])

    assert [(decision.tag, decision.record is None, decision.why) for decision in decisions] == [
        *((0, True, ""), (1, False, ""), (2, True, BY_STEP), (3, True, ""), (4, False, "")),
    ]


# Mean, minimum, maximum


def _values(mode: str, stream: list[Record | None], **values: Any) -> list[tuple[int | None, dict[Any, Any]]]:
    decisions = judged(sampler(log_mode=mode, **{"log_frequency": 4} | values), stream)
    return [(each.record.step, each.record.body) for each in decisions if each.record is not None]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("last", {1: 1, 4: 4, 8: 8, 10: 10}),
        ("mean", {1: 1, 4: 2.5, 8: 6.5, 10: 9.5}),
        ("min", {1: 1, 4: 1, 8: 5, 10: 9}),
        ("max", {1: 1, 4: 4, 8: 8, 10: 10}),
    ],
)
def test_a_kept_step_shows_its_window(mode: str, expected: dict[int, float]) -> None:
    shown = _values(mode, [metrics(step, a=step) for step in range(1, 11)])

    assert {step: body["a"] for step, body in shown} == expected


@pytest.mark.parametrize("first", [0, 4])
def test_a_first_step_that_ends_its_window_is_not_in_the_next_one(first: int) -> None:
    shown = _values("mean", [metrics(step, a=100 if step == first else step) for step in range(first, 9)])

    assert shown[0] == (first, {"a": 100})
    assert shown[-1] == (8, {"a": 6.5})


def test_a_first_step_alone_in_its_window_is_not_in_the_next_one() -> None:
    assert _values("mean", [metrics(3, a=100), metrics(5, a=1), metrics(8, a=3)]) == [
        *((3, {"a": 100}), (8, {"a": 2})),
    ]


def test_names_that_a_kept_step_lacks_are_shown_with_its_last_record() -> None:
    stream: list[Record | None] = [metrics(0, a=0), metrics(1, b=1), metrics(2, b=3), metrics(4, a=1), metrics(4, c=1)]

    assert _values("mean", stream) == [(0, {"a": 0}), (4, {"a": 1}), (4, {"c": 1, "b": 2})]


def test_a_name_in_both_calls_of_a_step_ends_with_the_mean_of_all() -> None:
    stream: list[Record | None] = [metrics(0, a=0), metrics(3, a=1), metrics(4, a=3), metrics(4, a=8)]

    assert _values("mean", stream) == [(0, {"a": 0}), (4, {"a": 2}), (4, {"a": 4})]


def test_what_comes_too_late_for_its_window_is_in_none() -> None:
    stream: list[Record | None] = [metrics(step, a=step) for step in (0, 3, 6, 2, 4, 8)]

    assert _values("mean", stream) == [(0, {"a": 0}), (3, {"a": 3}), (4, {"a": 4}), (8, {"a": 7})]


def test_what_is_no_number_and_what_is_nested_keeps_its_place() -> None:
    stream: list[Record | None] = [
        metrics(0, {"a": {"b": 1, "t": "x"}, ("k", 1): 1}),
        metrics(1, {"a": {"b": 2, "t": "y"}, ("k", 1): 2}),
        metrics(4, {"a": {"b": 4, "t": "z"}, ("k", 1): 4}),
    ]

    shown = _values("mean", stream)[-1][1]

    assert shown["a"] == {"t": "z"}
    assert flatten_metrics(shown).numbers == {"a/b": 3, "k/1": 3}


def test_names_of_another_frequency_are_left_alone() -> None:
    stream: list[Record | None] = [metrics(step, {"a": step, "val/x": step}) for step in range(5)]

    assert [body for _, body in _values("mean", stream)] == [
        *({"a": 0, "val/x": 0}, {"val/x": 1}, {"val/x": 2}, {"val/x": 3}, {"a": 2.5, "val/x": 4}),
    ]


def test_numbers_too_large_to_be_written_become_floats() -> None:
    huge = 2**64 - 1
    made = sampler(log_mode="mean", log_frequency=4)

    for decision in judged(made, [metrics(step, a=huge) for step in range(9)]):
        if decision.record is not None:
            encode_record(decision.record)
    made.offer(9, metrics(9, a=huge))
    made.offer(10, metrics(10, a=huge))
    list(made.decided())

    encode_record(record(RecordKind.METRICS, made.state()))


# Names, ranks, kinds


def test_names_that_are_not_wanted_are_taken_out() -> None:
    stream: list[Record | None] = [
        metrics(1, {"a": {"x": 1, "y": 2}, "b": 1}),
        metrics(1, {"b": 1}),
        metrics(1, {"b": {}, "a": {"x": 1}}),
    ]

    decisions = judged(sampler(include=["a/*"], exclude=["*y"]), stream)

    assert bodies(decisions) == [{"a": {"x": 1}}, {"b": {}, "a": {"x": 1}}]
    assert [(decision.why, decision.thinned) for decision in decisions] == [("", 2), (BY_NAME, 0), ("", 0)]


def test_texts_go_by_name() -> None:
    stream: list[Record | None] = [record(RecordKind.TEXT, {"a": "1", "b": "2"}), record(RecordKind.TEXT, {"b": "2"})]

    decisions = judged(sampler(exclude=["b"]), stream)

    assert bodies(decisions) == [{"a": "1"}]
    assert decisions[1].why == BY_NAME


@pytest.mark.parametrize(
    ("rank", "policy", "expected"),
    [
        (0, "rank0", {"a": 1, "b": {"c": 2}}),
        (3, "rank0", None),
        (0, "all", {"a/rank0": 1, "b": {"c/rank0": 2}}),
        (3, "all", {"a/rank3": 1, "b": {"c/rank3": 2}}),
        (3, "mean", {"a": 1, "b": {"c": 2}}),
    ],
)
def test_ranks_are_left_out_or_told_apart(rank: int, policy: str, expected: dict[str, Any] | None) -> None:
    decisions = judged(sampler(Writer(rank, 8), rank=policy), [metrics(1, {"a": 1, "b": {"c": 2}})])

    assert bodies(decisions) == ([expected] if expected else [])
    assert decisions[0].why == ("" if expected else BY_RANK)


@pytest.mark.parametrize(
    ("rank", "policy", "expected"),
    [(0, "rank0", ["k"]), (3, "rank0", []), (3, "all", ["k/rank3"]), (0, "sum", ["k"]), (3, "sum", [])],
)
def test_texts_go_by_rank(rank: int, policy: str, expected: list[str]) -> None:
    shown = bodies(judged(sampler(Writer(rank, 8), rank=policy), [record(RecordKind.TEXT, {"k": "text"})]))

    assert [key for body in shown for key in body] == expected


def test_start_finish_files_traces_and_tables_of_all_ranks_are_kept() -> None:
    stream: list[Record | None] = [START, record(RecordKind.FILE, {"path": "p"}), span(1, 1), part(1, "abc"), FINISH]

    assert kept(judged(sampler(Writer(3, 8), log_frequency=10, exclude=["*"]), stream)) == list(range(5))


def test_spans_are_chosen_and_trimmed() -> None:
    traces = {"max_samples_per_step_per_worker": 1, "max_length": 2}
    stream: list[Record | None] = [span(1, 1, inputs="long"), span(1, 2, inputs="long")]

    decisions = judged(sampler(traces=traces), stream)

    assert bodies(decisions)[0]["inputs"] == "lo… [2 characters cut]"
    assert decisions[1].why == BY_TRACE


def test_a_stream_that_is_refused_is_sampled_out_whole_and_nothing_waits() -> None:
    made: StreamSampler[int] = StreamSampler(
        Sampling.of({"log_frequency": 9, "log_val_generations": 3}), Writer(), "logger"
    )
    stream: list[Record | None] = [START, metrics(1, a=1), metrics(2, a=1), part(1, "ab", 0, 5), None, FINISH]

    decisions = judged(made, stream, end=False)

    assert [decision.why for decision in decisions] == ["logger"] * 4 + ["", "logger"]


# Everything at once


EVERYTHING: tuple[dict[str, Any], ...] = (
    {"log_frequency": {"a*": 2, "*": 3}, "log_mode": "mean", "exclude": ["x*"]},
    {"log_frequency": 2, "rank": "all"},
    {"log_frequency": 2, "log_mode": "min", "rank": "sum"},
    {
        "log_val_generations": 1,
        "include": ["*a*"],
        "traces": {"rate": 0.5, "max_samples_per_step_per_worker": 1, "max_length": 1, "include_prompt": False},
    },
)


@pytest.mark.parametrize("values", EVERYTHING)
@pytest.mark.parametrize("kind", RecordKind)
def test_bodies_may_be_anything_and_what_comes_out_can_be_written(kind: RecordKind, values: dict[str, Any]) -> None:
    made = sampler(Writer(1, 2), **values)
    odd = [*ODD_BODIES, *({"a": value, "rows": [value], "columns": value} for value in ODD_VALUES)]
    stream: list[Record | None] = [travelled(record(kind, body, step)) for step in (1, 2, 2, None, -5) for body in odd]

    decisions = judged(made, stream)

    assert [decision.tag for decision in decisions] == list(range(len(stream)))
    for decision in decisions:
        if decision.record is not None:
            travelled(decision.record)
    travelled(record(RecordKind.METRICS, made.state()))


@pytest.mark.parametrize("step", [None, 0, -1, -(2**63), 2**64 - 1])
def test_steps_may_be_any_number(step: int | None) -> None:
    made = sampler(log_frequency=7, log_mode="mean")

    assert len(judged(made, [travelled(metrics(each, a=1)) for each in (step, 5, step, -5, step)])) == 5
    travelled(record(RecordKind.METRICS, made.state()))


@pytest.mark.parametrize(
    ("values", "writer", "is_scalars", "trivial"),
    [
        ({}, Writer(), True, True),
        ({}, Writer(0, 8), True, True),
        ({}, Writer(1, 8), True, False),
        ({"rank": "all"}, Writer(0, 1), True, True),
        ({"rank": "all"}, Writer(0, 8), True, False),
        ({"rank": "mean"}, Writer(0, 1), True, False),
        ({"log_frequency": 2}, Writer(), True, False),
        ({"log_frequency": 2, "rank": "all"}, Writer(3, 8), False, True),
        ({"log_val_generations": 2}, Writer(), True, True),
        ({"log_val_generations": 2}, Writer(), False, False),
        ({"log_val_generations": "all"}, Writer(), False, True),
        ({"traces": {"rate": 0.1}}, Writer(), False, False),
        ({"traces": {"tokenizer": "/model"}}, Writer(), False, True),
        ({"traces": {"tokenizer": "/model", "token2text": True}}, Writer(), False, False),
    ],
)
def test_a_stream_that_is_delivered_as_it_is_needs_no_sampler(
    values: dict[str, Any], writer: Writer, is_scalars: bool, trivial: bool
) -> None:
    assert StreamSampler.is_trivial(Sampling.of(values), writer, is_scalars=is_scalars) is trivial


def test_what_a_section_does_not_say_has_its_default() -> None:
    assert Sampling.of({"traces": {"rate": None}, "log_frequency": None, "unknown": 1}) == Sampling()
    assert Sampling.of({"traces": {"rate": 0.5, "unknown": 1}}).traces == TraceSampling(rate=0.5)


def test_not_a_number_stays_none() -> None:
    shown = _values("min", [metrics(0, a=1), metrics(1, a=math.nan), metrics(4, a=1)])

    assert math.isnan(shown[-1][1]["a"])
