"""Sampling gives the same answers however a stream is cut: by restarts, by interleaving, by whoever reads it.

    one stream      a verdict depends on the content in front of it; a step is kept whole or not at all; first, last
                    and validation arrive; mean, minimum and maximum are those of whole windows
    several ranks   the result of a step is that of all ranks, in any interleaving; no record is lost or comes twice
    a lane          what arrives is what an oracle keeps, through crashes, lost state, reclaim and seal

A step is known to be split only when it comes back after a later one. Examples are hypothesis' choice; a failure prints
the example and a blob that repeats it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from support.samples import metrics, part, record, span, travelled
from verl_shipper.policy import stream_sampler
from verl_shipper.policy.patterns import VALIDATION, Names
from verl_shipper.policy.reduce import ENDED, Reducer
from verl_shipper.policy.sampling import LOG_MODES, RANK_MODES, Sampling
from verl_shipper.policy.stream_sampler import BY_RANK, BY_STEP, Decision, StreamSampler, Writer
from verl_shipper.values import flatten_metrics
from verl_shipper_spool.record import Record, RecordKind

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAMES = st.sampled_from(["a/x", "a/y", "b", "c", "val/acc", "test/acc"])
NUMBERS = st.integers(-5, 5) | st.floats(-10, 10, width=16) | st.sampled_from([float("nan"), 2**64 - 1, "text"])
BODIES = st.dictionaries(NAMES, NUMBERS, min_size=1, max_size=4)
ANY_STEP = st.none() | st.integers(-3, 25) | st.sampled_from([-(2**63), 10**6, 2**64 - 1])
METRICS = st.builds(metrics, ANY_STEP, BODIES)
PARTS = st.builds(
    part, st.integers(0, 2), st.lists(st.sampled_from("pqrst"), max_size=4), st.integers(0, 2), st.just(3)
)
SPANS = st.builds(span, st.integers(0, 2), st.integers(0, 5))
OTHERS = st.sampled_from([None, *(record(kind, {"a/x": "text"}) for kind in (RecordKind.TEXT, RecordKind.RUN_FINISH))])
# As writers do it: tables and spans in one stream, all else in another.
STREAMS = st.lists(METRICS | OTHERS, max_size=25) | st.lists(PARTS | SPANS | OTHERS, max_size=25)
FREQUENCIES = st.integers(1, 12) | st.dictionaries(st.sampled_from(["*", "a*", "b", "val*"]), st.integers(1, 9))
SAMPLINGS = st.fixed_dictionaries(
    {"log_frequency": FREQUENCIES, "log_mode": st.sampled_from(LOG_MODES), "rank": st.sampled_from(RANK_MODES)},
    optional={
        "log_val_generations": st.integers(0, 4),
        "exclude": st.just(["c"]),
        "traces": st.fixed_dictionaries({"max_samples_per_step_per_worker": st.integers(1, 2)}),
    },
)
WRITERS = st.sampled_from([Writer(), Writer(0, 2), Writer(1, 2)])


def in_order(least: int = 0, names: st.SearchStrategy[str] = NAMES) -> st.SearchStrategy[list[Record]]:
    """Metrics whose steps never go back; several calls of a step are common."""
    bodies = st.dictionaries(names, NUMBERS, min_size=1, max_size=4)
    jumps = st.lists(st.tuples(st.sampled_from([0, 0, 1, 1, 1, 2, 7]), bodies), max_size=40)

    def made(first: int, drawn: list[tuple[int, dict[str, Any]]]) -> list[Record]:
        steps = itertools.accumulate((jump for jump, _ in drawn), initial=first)
        return [metrics(step, body) for step, (_, body) in zip(steps, drawn, strict=False)]

    return st.builds(made, st.integers(least, 25), jumps)


def _new(values: dict[str, Any], writer: Writer | None = None) -> StreamSampler[int]:
    return StreamSampler(Sampling.of(values), writer or Writer())


def _reloaded(values: dict[str, Any], writer: Writer, state: Any) -> StreamSampler[int]:
    """A sampler in a later process, with a state that was on disk."""
    made = _new(values, writer)
    made.restore(travelled(record(RecordKind.METRICS, state)).body)
    return made


def _all(made: StreamSampler[int], stream: list[Record | None], start: int = 0) -> list[Decision[int]]:
    decisions: list[Decision[int]] = []
    for tag in range(start, len(stream)):
        made.offer(tag, stream[tag], 10)
        decisions += made.decided()
    made.end()
    return decisions + list(made.decided())


def _told(decisions: Iterable[Decision[int]]) -> list[str]:
    """Decisions as texts: NaN is not equal to itself."""
    return [repr(replace(decision, before=None)) for decision in decisions]


# One stream


@quick
@given(SAMPLINGS, WRITERS, STREAMS, st.sets(st.integers(0, 40)), st.sampled_from([3, 10_000]))
def test_verdicts_are_the_same_after_any_restarts(
    values: dict[str, Any], writer: Writer, stream: list[Record | None], cuts: set[int], waiting_max: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_sampler, "WAITING_MAX", waiting_max)
        expected = _all(_new(values, writer), stream)

        made = _new(values, writer)
        decisions: list[Decision[int]] = []
        place = 0
        while place < len(stream):
            made.offer(place, stream[place], 10)
            decisions += made.decided()
            place += 1
            if place in cuts:
                cuts.remove(place)
                made = _reloaded(values, writer, made.state())
                place = len(decisions)  # the first that waits
        made.end()
        decisions += made.decided()

    assert _told(decisions) == _told(expected)
    assert [decision.tag for decision in expected] == list(range(len(stream)))


@quick
@given(SAMPLINGS, STREAMS)
def test_verdicts_are_the_same_from_every_record_that_waits_for_other_ranks(
    values: dict[str, Any], stream: list[Record | None]
) -> None:
    values = values | {"rank": "mean"}
    expected = _all(_new(values), stream)

    for decision in expected:
        if decision.before is not None:
            again = _all(_reloaded(values, Writer(), decision.before), stream, decision.tag)
            assert _told(again) == _told(expected[decision.tag :])


@quick
@given(STREAMS, FREQUENCIES)
def test_calls_of_a_step_agree_unless_it_comes_back_after_a_later_one(
    stream: list[Record | None], frequency: dict[str, int] | int
) -> None:
    names = Names(Sampling.of({"log_frequency": frequency}))
    decisions = _all(_new({"log_frequency": frequency}), stream)

    newest = None
    fates: dict[tuple[int, int], set[bool]] = {}
    for each, decision in zip(stream, decisions, strict=True):
        if each is None or each.kind is not RecordKind.METRICS or each.step is None:
            continue
        left = flatten_metrics(decision.record.body).numbers.keys() if decision.record else set()
        groups = names.groups(each.body) & names.intervals
        newest = each.step if newest is None else max(newest, each.step)
        for name in flatten_metrics(each.body).numbers:
            every = names.every(name)
            if every in groups and each.step == newest:
                fates.setdefault((each.step, every), set()).add(name in left)
            elif every == 1:
                assert name in left

    finish = next((at for at, each in enumerate(stream) if each and each.kind is RecordKind.RUN_FINISH), None)
    assume(finish is None or finish == len(stream) - 1)  # a run that goes on behind its end was released there
    assert all(len(fate) == 1 for fate in fates.values()), fates


@quick
@given(in_order(), st.integers(2, 12), st.sampled_from(LOG_MODES))
def test_first_and_last_step_and_all_of_validation_arrive(stream: list[Record], every: int, mode: str) -> None:
    decisions = _all(_new({"log_frequency": every, "log_mode": mode}), [*stream])

    for each, decision in zip(stream, decisions, strict=True):
        if each.step in (stream[0].step, stream[-1].step):
            assert decision.record is not None
            assert decision.record.body.keys() >= each.body.keys()
        exempt = [name for name in each.body if VALIDATION.match(name)]
        assert not exempt or (decision.record is not None and all(name in decision.record.body for name in exempt))
        assert decision.why in ("", BY_STEP)


@quick
@given(in_order(names=st.sampled_from(["x", "y", "z"])), st.integers(2, 12), st.sampled_from(["mean", "min", "max"]))
def test_a_windows_last_step_shows_the_value_of_the_whole_window(stream: list[Record], every: int, mode: str) -> None:
    windows: dict[int, dict[str, list[Any]]] = {}
    last: dict[int, int] = {}
    for each in stream:
        assert each.step is not None
        window = -(-each.step // every)
        last[window] = each.step
        for name, number in flatten_metrics(each.body).numbers.items():
            windows.setdefault(window, {}).setdefault(name, []).append(number)

    shown: dict[int, dict[str, Any]] = {}
    for decision in _all(_new({"log_frequency": every, "log_mode": mode}), [*stream]):
        if decision.record is not None and decision.record.step is not None:
            shown.setdefault(decision.record.step, {}).update(flatten_metrics(decision.record.body).numbers)

    for window, names in windows.items():
        expected = {name: _oracle(mode, numbers) for name, numbers in names.items()}
        assert shown[last[window]] == pytest.approx(expected, nan_ok=True)


def _oracle(mode: str, numbers: list[Any]) -> float:
    if any(number != number for number in numbers):  # noqa: PLR0124 - NaN
        return float("nan")
    if mode == "sum":
        return float(sum(numbers))
    return float(min(numbers) if mode == "min" else max(numbers) if mode == "max" else sum(numbers) / len(numbers))


# Several ranks


@quick
@given(st.lists(in_order(), min_size=1, max_size=4), st.sampled_from(["mean", "min", "max", "sum"]), st.data())
def test_the_value_of_a_step_is_that_of_all_ranks_in_any_interleaving(
    ranks: list[list[Record]], mode: str, data: st.DataObject
) -> None:
    order = data.draw(st.permutations([rank for rank, stream in enumerate(ranks) for _ in stream]))
    reducer: Reducer[tuple[int, int]] = Reducer(mode, 30.0)
    progress: dict[str, float | None] = {str(rank): None for rank in range(len(ranks))}
    for rank in range(len(ranks)):
        reducer.add(str(rank), rank, 0, len(ranks))
    decided: list[Decision[tuple[int, int]]] = []
    places = [0] * len(ranks)
    for rank in order:
        each = ranks[rank][places[rank]]
        reducer.offer(str(rank), Decision((rank, places[rank]), each))
        places[rank] += 1
        progress[str(rank)] = each.step
        decided += [decision for _, decision in reducer.decided(progress, 0.0, 1)]
    decided += [decision for _, decision in reducer.decided(dict.fromkeys(progress, ENDED), 0.0, 1)]

    numbers: dict[int, list[dict[str, Any]]] = {}
    for stream in ranks:
        of_rank: dict[int, dict[str, Any]] = {}
        for each in stream:
            assert each.step is not None
            of_rank.setdefault(each.step, {}).update(flatten_metrics(each.body).numbers)
        for step, values in of_rank.items():
            numbers.setdefault(step, []).append(values)
    shown: dict[int, dict[str, Any]] = {}
    for decision in decided:
        if decision.record is not None and decision.record.step is not None:
            shown.setdefault(decision.record.step, {}).update(flatten_metrics(decision.record.body).numbers)
    for rank, stream in enumerate(ranks):
        assert [tag[1] for tag in (each.tag for each in decided) if tag[0] == rank] == list(range(len(stream)))
    assert shown.keys() == numbers.keys()
    for step, of_ranks in numbers.items():
        names = {name for values in of_ranks for name in values}
        expected = {name: _oracle(mode, [values[name] for values in of_ranks if name in values]) for name in names}
        assert shown[step] == pytest.approx(expected, nan_ok=True)


@quick
@given(st.data())
def test_no_record_of_a_rank_is_lost_or_comes_twice(data: st.DataObject) -> None:
    """With ranks that are late, end, vanish and begin anew, and a process that goes on from what it had decided."""
    values = st.builds(metrics, st.none() | st.integers(-2, 8), st.fixed_dictionaries({"x": st.integers(0, 9)}))
    things = st.one_of(values, st.sampled_from([None, record(RecordKind.TEXT, {})]))
    reducer: Reducer[int] = Reducer("sum", 30.0)
    logged: dict[str, list[Record | None]] = {}
    done: dict[str, list[int]] = {}
    ended: set[str] = set()
    now_s = 0.0

    def progress(name: str) -> float | None:
        steps = [each.step for each in logged[name] if each is not None and each.step is not None]
        return ENDED if name in ended else max(steps, default=None)

    def turn() -> None:
        for name, decision in reducer.decided({name: progress(name) for name in logged}, now_s, int(now_s)):
            done[name].append(decision.tag)
            assert decision.record is None or decision.why == ""
            assert decision.why in ("", BY_RANK)

    for _ in range(data.draw(st.integers(1, 40))):
        names = sorted(logged)
        what = data.draw(st.sampled_from(["new", "log", "log", "log", "log", "end", "gone", "time", "again"]))
        if what == "new" and len(logged) < 5:
            name = f"s{len(logged)}"
            logged[name], done[name] = [], []
            reducer.add(name, data.draw(st.integers(0, 2)), int(now_s), 3)
        elif what == "log" and set(names) - ended:
            name = data.draw(st.sampled_from(sorted(set(names) - ended)))
            logged[name].append(data.draw(things))
            reducer.offer(name, Decision(len(logged[name]) - 1, logged[name][-1]))
        elif what in ("end", "gone") and names:
            name = data.draw(st.sampled_from(names))
            ended.add(name)
            if what == "gone":
                reducer.forget(name)
                del logged[name][len(done[name]) :]  # nobody will ever ask for these
                logged[name + " gone"], done[name + " gone"] = logged.pop(name), done.pop(name)
                ended.add(name + " gone")
        elif what == "time":
            now_s += data.draw(st.sampled_from([1.0, 31.0]))
        elif what == "again":
            state = travelled(record(RecordKind.METRICS, {"state": reducer.state()})).body["state"]
            reducer = Reducer("sum", 30.0)
            reducer.restore(state)
            for name in names:
                if not name.endswith("gone"):
                    reducer.add(name, int(name[1]) % 3, 0, 3)
                    for tag in range(len(done[name]), len(logged[name])):
                        reducer.offer(name, Decision(tag, logged[name][tag]))
        turn()
    ended.update(logged)
    now_s += 31.0
    turn()

    assert done == {name: list(range(len(stream))) for name, stream in logged.items()}
    assert not reducer.waits
