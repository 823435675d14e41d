"""The public surface as users write it. Nothing here runs: that the type checker accepts all of it is the test.

What must be refused stands with `type: ignore` and its code; a checker that accepts it would call the comment unused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from verl_shipper.backends.base import (
    Backend,
    Batch,
    Delivered,
    Item,
    Limits,
    Memory,
    Outcome,
    Park,
    Reject,
    Retry,
    RunInfo,
)
from verl_shipper_client import Client, Span


def every_way_to_make_a_client(folder: os.PathLike[str], config: Mapping[str, Any]) -> list[Client]:
    return [
        Client("project", "experiment"),
        Client(project="project", experiment="experiment"),
        Client("p", "e", {"lr": 1e-6, "nested": {"a": [1, "x", None]}}),
        Client("p", "e", config=config, run_id="run", rank=0, spool_dir=folder, socket="tcp://127.0.0.1:5555"),
        Client("p", "e", spool_dir="/some/place"),
        Client("p", "e", spool_dir=Path("/some/place"), socket=None, run_id=None, rank=None, config=None),
    ]


def every_call(client: Client) -> None:
    run_id: str = client.run_id
    client.log({"loss": 0.5, "nested": {"a": 1}, "any": object()}, step=3)
    client.log({"loss": 0.5}, 3)
    client.log({"without": "a step"})
    client.log_generations([("q", "a", 1.0), ("q", "a", 0.0)], step=3)
    client.log_generations([{"input": "q", "output": "a", "gts": "4"}], step=3)
    client.log_generations((("q", "a") for _ in range(3)), step=3, columns=["question", "answer"])
    client.log_text("note", run_id, step=3)
    client.log_text("note", "text")
    client.log_span("rollout", 1, 2)
    client.log_span(
        "rollout",
        start_ns=1,
        end_ns=2,
        trace_id=b"t" * 16,
        span_id=b"s" * 8,
        parent_id=b"p" * 8,
        inputs={"prompt": "2+2"},
        outputs=["4"],
        status="error",
        attributes={"step": 3},
    )
    done: bool = client.finish()
    done = client.finish(0)
    done = client.finish(exit_code=None, timeout_s=1.5)
    assert done


def a_client_as_a_context_manager() -> str:
    with Client("p", "e") as client:
        same: Client = client
    return same.run_id


def spans(client: Client) -> tuple[bytes, bytes]:
    with client.span("outer", inputs={"a": 1}, attributes={"step": 3}) as outer:
        one: Span = outer
        with client.span("inner", parent=outer) as inner:
            inner.set_outputs(["x"])
            inner.set_attribute("reward", 1.0)
        with client.span("elsewhere", trace_id=b"t" * 16, parent=b"p" * 8):
            pass
    return one.trace_id, one.span_id


def what_must_be_refused(client: Client) -> None:
    Client(experiment=3)  # type: ignore[arg-type]
    Client("p", "e", rank="0")  # type: ignore[arg-type]
    Client("p", "e", nonsense=1)  # type: ignore[call-arg]
    client.log({"a": 1}, step="3")  # type: ignore[arg-type]
    client.log(3)  # type: ignore[arg-type]
    client.log_span("name", start_ns=1)  # type: ignore[call-arg]
    client.span("name", trace_id="text")  # type: ignore[arg-type]
    client.finish(exit_code="1")  # type: ignore[arg-type]


class ThirdPartyBackend(Backend):
    """What the author of a backend writes."""

    name: ClassVar[str] = "third"
    limits: ClassVar[Limits] = Limits(items_max=10, bytes_max=1000, age_s_max=1.0, runs_at_once_max=1, upload_s_max=5.0)

    def __init__(self, run: RunInfo, settings: Mapping[str, Any], memory: Memory) -> None:
        super().__init__(run, settings, memory)
        self.remembered: Any = memory.get("offset")

    def open(self) -> Outcome | None:
        self.memory.put("id", self.run.run_id)
        return Retry("no route") if self.settings.get("sick") else None

    def upload(self, batch: Batch) -> Outcome:
        first: Item = batch.items[0]
        if first.record.step is None:
            return Reject("no step", items=[0])
        if first.rank:
            return Park("only rank 0 may write here")
        if len(batch.items) > 5:
            return Retry("429", after_s=2.5)
        return Delivered(remember={"offset": first.ordinal}, ignored={"text": 1})

    def watermark(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        self.remembered = None


def a_backend_that_forgets_a_method(run: RunInfo, memory: Memory) -> None:
    class Incomplete(Backend):
        name: ClassVar[str] = "incomplete"

    Incomplete(run, {}, memory)  # type: ignore[abstract]
