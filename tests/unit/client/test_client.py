"""The client: never raises, loses nothing without a number, and spools whatever daemon, disk and user do."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unit.client.conftest import MakeClient
from unit.client.spooled import bodies, records
from unit.client.test_values import HOSTILE, Hostile, HostileItem, HostileMapping, Unlistable
from verl_shipper_client import Client, complaints, streams
from verl_shipper_spool.header import decode_header
from verl_shipper_spool.reader import Frame, StreamReader
from verl_shipper_spool.record import RecordKind, Unsupported, decode_record

# What is logged


def test_a_run_begins_with_its_start_and_ends_with_its_finish(make: MakeClient, spool: Path) -> None:
    made = make(config={"lr": 1e-6, "api_key": "hidden"}, run_id="run-7", rank=2)
    made.log({"loss": 0.5}, step=1)
    made.finish(exit_code=0)

    start, metrics, finish = records(spool)
    assert (start.kind, start.body["project"], start.body["experiment"]) == (
        RecordKind.RUN_START,
        "project",
        "experiment",
    )
    assert start.body["config"] == {"lr": 1e-6, "api_key": "[redacted]"}
    assert (start.body["rank"], start.body["world"]) == (2, 1)
    assert (metrics.step, metrics.body) == (1, {"loss": 0.5})
    assert finish.body == {"exit_code": 0, "reason": "finish"}
    assert [record.seq for record in (start, metrics, finish)] == [0, 1, 2]


def test_names_come_from_the_environment_where_no_argument_gives_them(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_PROJECT", "rlhf")
    named, unnamed = Client(experiment="e1", spool_dir=spool), Client("own", spool_dir=spool)

    assert (named.project, named.experiment) == ("rlhf", "e1")
    assert (unnamed.project, unnamed.experiment) == ("own", "")
    for made in (named, unnamed):
        made.finish(timeout_s=0.0)


def test_a_header_tells_whose_stream_it_is(make: MakeClient, spool: Path) -> None:
    make(run_id="run-7", rank=2).log({"a": 1}, step=0)

    (folder,) = spool.iterdir()
    header = decode_header((folder / "stream").read_bytes())
    assert (header.run_id, header.project, header.experiment, header.rank) == ("run-7", "project", "experiment", 2)
    assert header.process.pid == os.getpid()
    assert header.stream_id == folder.name


def test_every_kind_of_record_goes_to_the_stream_it_belongs_to(make: MakeClient, spool: Path) -> None:
    made = make()
    made.log({"a": 1}, step=1)
    made.log_text("note", "hello", step=2)
    made.log_generations([("q", "a", 1.0)], step=3)
    with made.span("rollout", attributes={"step": 4}):
        pass
    made.log_span("late", 10, 20, attributes={"step": 5})

    by_class: dict[str, list[tuple[RecordKind, int | None]]] = {}
    for folder in spool.iterdir():
        header = decode_header((folder / "stream").read_bytes())
        found = [finding for finding in StreamReader(str(folder)).frames() if isinstance(finding, Frame)]
        decoded = [decode_record(frame.payload) for frame in found]
        by_class[header.stream_class] = [(record.kind, record.step) for record in decoded]
    assert by_class == {
        "scalars": [(RecordKind.RUN_START, None), (RecordKind.METRICS, 1), (RecordKind.TEXT, 2)],
        "bulk": [(RecordKind.GENERATIONS, 3), (RecordKind.SPAN, 4), (RecordKind.SPAN, 5)],
    }


def test_a_table_too_large_for_one_record_becomes_several_of_one_call(make: MakeClient, spool: Path) -> None:
    made = make()
    made.log_generations([("x" * 300_000, "y", number) for number in range(10)], step=5)
    made.log_generations([("x", "y", 0)], step=5)

    found = bodies(spool, RecordKind.GENERATIONS)
    assert [(body["call"], body["part"], body["parts"]) for body in found] == [
        (0, 0, 4),
        (0, 1, 4),
        (0, 2, 4),
        (0, 3, 4),
        (1, 0, 1),
    ]


@pytest.mark.parametrize(
    ("step", "whole"),
    [(np.int64(3), 3), (3.0, 3), (2**63, None), (2**70, None), (-(2**70), None), (-1, -1), (None, None), ("x", None)],
)
def test_a_step_of_any_kind_costs_no_record(make: MakeClient, spool: Path, step: Any, whole: int | None) -> None:
    made = make()
    made.log({"a": 1}, step=step)
    made.log_text("t", "x", step=step)
    made.log_generations([("q", "a", 1)], step=step)

    assert [record.step for record in records(spool)[1:]] == [whole] * 3
    assert made.errors == 0


@pytest.mark.parametrize("data", [0.5, None, "text", [1, 2], np.float32(0.5), object()], ids=type)
def test_a_lone_value_is_logged_under_a_name(make: MakeClient, spool: Path, data: Any) -> None:
    make().log(data, step=1)

    (body,) = bodies(spool)
    assert list(body) == ["value"]


def test_a_mapping_that_is_no_dict_is_logged_as_one(make: MakeClient, spool: Path) -> None:
    make().log(types.MappingProxyType({"a": 1, "b": {"c": 2}}), step=1)

    assert bodies(spool) == [{"a": 1, "b": {"c": 2}}]


# Never raises


class _Everything:
    """A class that answers every question with itself."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(st.characters()),
        st.binary(max_size=20),
        st.decimals(),
        st.complex_numbers(),
        st.dates(),
        st.builds(Hostile),
        st.builds(HostileItem),
        st.builds(HostileMapping),
        st.builds(Unlistable),
        st.builds(_Everything),
        st.builds(np.float32, st.floats(width=32)),
        st.just(np.zeros((2, 2))),
        st.just(2**80),
        st.just("\ud800"),
    ),
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.tuples(children),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(), st.none(), st.tuples(st.text())), children),
    ),
    max_leaves=12,
)


@dataclass
class _Box:
    """Keeps the tools away from a value that does not want to be looked at."""

    value: Any = field(repr=False)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(boxes=st.tuples(_values, _values).map(_Box))
def test_log_never_raises_and_never_loses_a_record(make_once: Client, boxes: _Box) -> None:
    data, step = boxes.value
    before = make_once._streams.scalars.records if make_once._streams else 0

    make_once.log({"data": data, "the neighbour": 1.5}, step=step)
    make_once.log(data, step)
    make_once.log_text(data, data, step)
    make_once.log_generations(data, step)
    make_once.log_generations([data, [data]], step, columns=["a"])
    with make_once.span(data, trace_id=data, parent=data, inputs=data, attributes=data) as span:
        span.set_outputs(data)
    make_once.log_span(data, data, step, data, data, data, data, data, data, data)

    assert make_once._streams is not None
    scalars = make_once._streams.scalars
    assert scalars.records - before >= 2
    assert scalars.lost_records == 0


@pytest.mark.parametrize("make_value", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_object_in_any_place_raises_nothing_and_costs_no_neighbour(
    make: MakeClient, spool: Path, make_value: Callable[[], Any]
) -> None:
    made, value = make(), make_value()
    made.log(value, step=1)
    made.log({"a": 1}, step=value)
    made.log_text("t", "x", step=value)
    made.log_generations(value, step=2)
    made.log_generations([value, ("q", "a", 1.0)], step=3, columns=[value])
    with made.span(value, trace_id=value, parent=value, inputs=value, attributes=value) as span:
        span.set_outputs(value)
    made.log_span("s", value, value, value, value, value, value, value, value, value)

    assert made.errors == 0
    assert len(bodies(spool)) == 2
    assert len(bodies(spool, RecordKind.SPAN)) == 2
    tables = bodies(spool, RecordKind.GENERATIONS)
    assert tables[-1]["rows"][-1] == ["q", "a", 1.0] or len(tables[-1]["rows"]) == 2


def test_an_exception_without_a_text_does_not_escape(make: MakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    made = make()
    made._complaints.failed("test", MuteError())

    assert capsys.readouterr().err == "verl-shipper: test failed: MuteError\n"


@pytest.fixture(scope="module")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One client for many examples; afterwards everything it left must be readable."""
    spool = tmp_path_factory.mktemp("spool")
    made = Client("project", "experiment", spool_dir=spool)
    yield made
    made.finish(timeout_s=0.0)
    for body in bodies(spool):
        assert body.get("the neighbour", 1.5) == 1.5


@pytest.mark.parametrize(
    "arguments",
    [
        {"project": None},
        {"project": Hostile, "experiment": 5},
        {"project": "\ud800", "experiment": "a/b\0c"},
        {"config": 5},
        {"config": types.SimpleNamespace(a=1)},
        {"config": Unlistable()},
        {"config": {"fn": len, "cycle": {}}},
        {"run_id": 17},
        {"rank": float("inf")},
        {"rank": 2**70},
        {"rank": "x"},
        {"socket": "htp://nowhere"},
        {"socket": 5},
        {"socket": "/x" * 200},
        {"socket": "tcp://host:notaport"},
    ],
    ids=lambda arguments: repr(arguments).partition(" at 0x")[0],
)
def test_a_client_of_any_arguments_records_what_is_logged(
    make: MakeClient, spool: Path, arguments: dict[str, Any]
) -> None:
    made = make(**arguments)
    made.log({"a": 1}, step=1)
    made.finish(timeout_s=0.0)

    assert [record.kind for record in records(spool)] == [
        RecordKind.RUN_START,
        RecordKind.METRICS,
        RecordKind.RUN_FINISH,
    ]
    assert isinstance(records(spool)[0].body["config"], dict)


def test_a_configuration_keeps_what_can_be_read_of_it(make: MakeClient, spool: Path) -> None:
    make(config={"fn": len, "lr": 0.1, "broken": HostileMapping(), "password": object()})

    config = records(spool)[0].body["config"]
    assert config["lr"] == 0.1
    assert isinstance(config["fn"], Unsupported)
    assert config["broken"]["good"] == 1
    assert config["password"] == "[redacted]"


@pytest.mark.parametrize("spool_dir", [5, b"bytes", object()])
def test_a_spool_that_is_no_path_is_told_and_raises_nothing(
    make: MakeClient, capsys: pytest.CaptureFixture[str], spool_dir: Any
) -> None:
    made = make(spool_dir=spool_dir)
    made.log({"a": 1}, step=1)

    assert not made.finish(timeout_s=0.0)
    assert made.errors >= 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# Disk


def test_the_quota_drops_spans_first_then_generations_and_metrics_last(
    make: MakeClient, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "QUOTA_BYTES", 450_000)
    made = make()
    for writer in made._writers():
        writer._segment_bytes_max = writer._roll_at = 50_000
    filling = "x" * 10_000
    for step in range(20):
        made.log({"n": step, "filling": filling}, step=step)
    for step in range(15):
        made.log_span("span", 1, 2, inputs=filling, attributes={"step": step})
    for step in range(25):
        made.log_generations([(filling, "a", 1)], step=step)
    assert made._streams is not None

    spans, tables = bodies(spool, RecordKind.SPAN), bodies(spool, RecordKind.GENERATIONS)
    assert len(spans) < 15
    assert len(tables) == 25
    assert len(bodies(spool)) == 20
    assert made._streams.bulk.lost_records == 15 - len(spans)
    assert made._streams.scalars.lost_records == 0

    for step in range(60):
        made.log({"n": 100 + step, "filling": filling}, step=step)

    assert bodies(spool, RecordKind.SPAN) == []
    assert len(bodies(spool)) < 80
    numbers = [body["n"] for body in bodies(spool)]
    assert numbers[-1] == 159, "the newest metrics stay"
    assert sum(path.stat().st_size for path in spool.rglob("*.seg")) < 600_000


def test_a_spool_that_cannot_be_made_costs_counted_records_and_one_warning(
    make: MakeClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    made = make(spool_dir=tmp_path / "file" / "spool")
    for step in range(50):
        made.log({"a": 1}, step=step)

    assert made._streams is not None
    assert made._streams.scalars.lost_records == 51
    assert made.errors == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "dropped and counted" in line
    assert "file" in line


def test_a_spool_that_comes_back_goes_on_and_tells_what_was_lost(
    make: MakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_shipper_spool.writer.REOPEN_PAUSE_S", 0.0)
    (tmp_path / "file").write_text("in the way")
    made = make(spool_dir=tmp_path / "file")
    made.log({"lost": 1}, step=1)
    (tmp_path / "file").unlink()
    made.log({"kept": 1}, step=2)

    (folder,) = (tmp_path / "file").iterdir()
    loss, kept = [finding for finding in StreamReader(str(folder)).frames() if isinstance(finding, Frame)]
    assert (loss.kind.value, loss.ordinal) == ("loss", 2)
    assert decode_record(kept.payload).body == {"kept": 1}


def test_a_warning_comes_once_a_minute(
    make: MakeClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("verl_shipper_client.client.time.monotonic", lambda: now_s)
    made = make()
    for _ in range(5):
        made._complaints.failed("test", ValueError("x"))
    now_s += complaints.WARN_PAUSE_S - 1
    made._complaints.failed("test", ValueError("x"))
    now_s += 2
    made._complaints.failed("test", ValueError("x"))
    monkeypatch.undo()

    assert capsys.readouterr().err == "verl-shipper: test failed: ValueError: x\n" * 2
    assert made.errors == 7


def test_a_closed_stderr_is_no_reason_to_fail(make: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    monkeypatch.setattr(sys, "stderr", None)

    made._complaints.failed("test", ValueError("x"))
