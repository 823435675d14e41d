"""Spans: ids, nesting, tasks, errors. What a span measures never changes what the measured code does."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

from verl_shipper_client.span import Span, SpanValues


class Recorder:
    def __init__(self) -> None:
        self.ended: list[SpanValues] = []

    def span(self, name: str, **arguments: Any) -> Span:
        given = {"trace_id": None, "parent": None, "inputs": None, "attributes": None} | arguments
        return Span(self.ended.append, name, **given)

    def bodies(self) -> dict[str, dict[str, Any]]:
        return {values.name: values.body() for values in self.ended}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_a_span_tells_what_went_in_and_out_and_how_long(recorder: Recorder) -> None:
    with recorder.span("rollout", inputs={"prompt": "2+2"}, attributes={"step": 3}) as span:
        span.set_outputs("4")
        span.set_attribute("reward", 1.0)

    (body,) = recorder.bodies().values()
    assert body["inputs"] == {"prompt": "2+2"}
    assert body["outputs"] == "4"
    assert body["status"] == "ok"
    assert body["attributes"] == {"step": 3, "reward": 1.0}
    assert 0 < body["start_ns"] <= body["end_ns"]
    assert (len(body["trace_id"]), len(body["span_id"]), body["parent_id"]) == (16, 8, None)
    assert (body["trace_id"], body["span_id"]) == (span.trace_id, span.span_id)


def test_nested_spans_find_their_parent_and_share_its_trace(recorder: Recorder) -> None:
    with recorder.span("outer") as outer:
        with recorder.span("first") as first, recorder.span("deep"):
            pass
        with recorder.span("second"):
            pass

    bodies = recorder.bodies()
    assert bodies["first"]["parent_id"] == bodies["second"]["parent_id"] == outer.span_id
    assert bodies["deep"]["parent_id"] == first.span_id
    assert {body["trace_id"] for body in bodies.values()} == {outer.trace_id}
    assert len({body["span_id"] for body in bodies.values()}) == 4


def test_a_span_after_another_is_not_its_child(recorder: Recorder) -> None:
    with recorder.span("one"):
        pass
    with recorder.span("two"):
        pass

    assert recorder.bodies()["two"]["parent_id"] is None


def test_a_parent_may_be_given_as_a_span_or_as_bytes(recorder: Recorder) -> None:
    outer = recorder.span("outer")
    with recorder.span("by span", parent=outer), recorder.span("by bytes", parent=b"12345678", trace_id=b"t" * 16):
        pass

    bodies = recorder.bodies()
    assert bodies["by span"]["parent_id"] == outer.span_id
    assert bodies["by span"]["trace_id"] == outer.trace_id
    assert bodies["by bytes"]["parent_id"] == b"12345678"
    assert bodies["by bytes"]["trace_id"] == b"t" * 16


def test_a_span_of_another_trace_has_no_parent_here(recorder: Recorder) -> None:
    with recorder.span("outer"), recorder.span("elsewhere", trace_id=b"t" * 16):
        pass

    assert recorder.bodies()["elsewhere"]["parent_id"] is None


@pytest.mark.parametrize("wrong", [b"", b"short", b"x" * 17, b"\0" * 16, "ab" * 16, 7, object()], ids=type)
def test_a_wrong_trace_id_is_replaced_once_for_the_whole_trace(recorder: Recorder, wrong: Any) -> None:
    with recorder.span("outer", trace_id=wrong) as outer, recorder.span("inner"):
        pass

    bodies = recorder.bodies()
    assert bodies["outer"]["trace_id"] == bodies["inner"]["trace_id"] == outer.trace_id
    assert len(outer.trace_id) == 16
    assert bodies["inner"]["parent_id"] == outer.span_id


@pytest.mark.parametrize("wrong", [b"short", b"\0" * 8, b"x" * 9, "12345678", 7])
def test_a_wrong_parent_is_no_parent(recorder: Recorder, wrong: Any) -> None:
    with recorder.span("span", parent=wrong):
        pass

    assert recorder.bodies()["span"]["parent_id"] is None


def test_tasks_do_not_see_each_others_spans(recorder: Recorder) -> None:
    async def rollout(name: str) -> None:
        with recorder.span(name):
            await asyncio.sleep(0)
            with recorder.span(f"{name} inner"):
                await asyncio.sleep(0)

    async def main() -> None:
        with recorder.span("batch"):
            await asyncio.gather(*(rollout(str(index)) for index in range(5)))

    asyncio.run(main())

    bodies = recorder.bodies()
    assert len(bodies) == 11
    for index in range(5):
        assert bodies[f"{index} inner"]["parent_id"] == bodies[str(index)]["span_id"]
        assert bodies[str(index)]["parent_id"] == bodies["batch"]["span_id"]


def test_a_span_may_end_in_another_context_than_it_began_in(recorder: Recorder) -> None:
    span = recorder.span("moved")
    contextvars.copy_context().run(span.__enter__)

    span.__exit__(None, None, None)
    with recorder.span("next"):
        pass

    assert recorder.bodies()["next"]["parent_id"] is None


def test_an_exception_passes_and_makes_the_span_an_error(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="too hot"), recorder.span("rollout"):
        raise ValueError("too hot")

    body = recorder.bodies()["rollout"]
    assert body["status"] == "error"
    assert body["attributes"]["error"] == "ValueError: too hot"


def test_an_exception_without_a_text_passes_too(recorder: Recorder) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    with pytest.raises(MuteError), recorder.span("rollout"):
        raise MuteError

    assert recorder.bodies()["rollout"]["attributes"]["error"] == "MuteError"


def test_a_span_that_ends_twice_raises_nothing(recorder: Recorder) -> None:
    span = recorder.span("twice")
    with span:
        pass
    span.__exit__(None, None, None)

    assert len(recorder.ended) == 2


@pytest.mark.parametrize("attributes", [7, "text", [1], object()])
def test_attributes_of_any_kind_raise_nothing(recorder: Recorder, attributes: Any) -> None:
    with recorder.span("odd", attributes=attributes):
        pass

    assert recorder.bodies()["odd"]["attributes"] == {"attributes": attributes}


def test_a_span_that_was_only_described_is_made_whole() -> None:
    values = SpanValues(name="", start_ns="x", end_ns=2**70, status="weird", parent_id=b"?")  # type: ignore[arg-type]

    body = values.body()
    assert (body["name"], body["start_ns"], body["end_ns"]) == ("span", 0, 2**63 - 1)
    assert (body["status"], body["parent_id"]) == ("ok", None)
    assert (len(body["trace_id"]), len(body["span_id"])) == (16, 8)
