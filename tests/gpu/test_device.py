"""P03 on a real GPU: `log` does not wait for the stream, its values are right, and nothing is kept alive for it.

Skipped, loudly, where PyTorch finds no CUDA device. Marked `torch`: run by `make test-verl`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from unit.client.spooled import bodies
from verl_shipper_client import Client

pytestmark = pytest.mark.torch

BUSY_MS = 300.0


@pytest.fixture
def torch() -> Any:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("NO GPU: what a real device does is not tested here")
    return torch


@pytest.fixture
def client(torch: Any, tmp_path: Path) -> Client:
    torch.cuda.init()
    made = Client(spool_dir=tmp_path / "spool")
    made.log({"warm": torch.ones((), device="cuda")}, step=0)
    torch.cuda.synchronize()
    return made


def keep_busy(torch: Any, at_least_ms: float) -> None:
    """Enqueue matrix products worth `at_least_ms` on the current stream, without a wait behind them."""
    matrix = torch.randn(4096, 4096, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    matrix @ matrix
    end.record()
    end.synchronize()
    for _ in range(int(at_least_ms / max(begin.elapsed_time(end), 0.05)) + 1):
        matrix @ matrix


def test_log_returns_while_the_stream_is_busy_and_the_value_is_right(
    torch: Any, client: Client, tmp_path: Path
) -> None:
    keep_busy(torch, BUSY_MS)
    loss = torch.full((), 0.25, device="cuda") * 2
    is_done = torch.cuda.Event()
    is_done.record()

    began_s = time.perf_counter()
    client.log({"loss": loss, "lr": 0.1}, step=1)
    took_s = time.perf_counter() - began_s
    was_busy = not is_done.query()

    assert was_busy, "the stream was idle: nothing is shown"
    assert took_s < 0.001, f"log took {took_s * 1e3:.2f} ms of a stream that is busy for {BUSY_MS} ms"
    assert len(bodies(tmp_path / "spool")) == 1, "what is not known yet is not written"
    client.finish()
    assert bodies(tmp_path / "spool")[1] == {"loss": 0.5, "lr": 0.1}


def test_values_are_those_of_their_step_though_the_memory_is_used_again(
    torch: Any, client: Client, tmp_path: Path
) -> None:
    loss = torch.zeros((), device="cuda")
    for step in range(1, 501):
        loss += 1
        client.log({"loss": loss}, step=step)
    client.finish()

    assert [body["loss"] for body in bodies(tmp_path / "spool")[1:]] == [float(step) for step in range(1, 501)]


def test_a_side_stream_is_waited_for_and_not_the_others(torch: Any, client: Client, tmp_path: Path) -> None:
    side = torch.cuda.Stream()
    keep_busy(torch, BUSY_MS)
    with torch.cuda.stream(side):
        client.log({"loss": torch.full((), 3.0, device="cuda")}, step=1)
    side.synchronize()
    deadline_s = time.monotonic() + 20
    while len(bodies(tmp_path / "spool")) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)

    assert bodies(tmp_path / "spool")[1] == {"loss": 3.0}


def test_a_thousand_calls_keep_neither_graphs_nor_buffers(torch: Any, client: Client) -> None:
    weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)

    def once(step: int) -> None:
        client.log({"loss": (weight @ weight).square().mean()}, step=step)

    for step in range(20):
        once(step)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for step in range(1000):
        once(step)
    torch.cuda.synchronize()

    assert torch.cuda.memory_allocated() <= before + 1024 * 1024


@pytest.mark.parametrize(
    "kind", ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "uint8", "bool"]
)
def test_numbers_of_every_type_are_what_they_were(torch: Any, client: Client, tmp_path: Path, kind: str) -> None:
    client.log({"value": torch.tensor(1.0, device="cuda").to(getattr(torch, kind))}, step=1)
    client.finish()

    assert bodies(tmp_path / "spool")[1]["value"] == 1


def test_a_captured_graph_stays_whole(torch: Any, client: Client, tmp_path: Path) -> None:
    value = torch.ones((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = value * 2
        client.log({"loss": doubled, "ok": 1}, step=1)
    graph.replay()
    torch.cuda.synchronize()
    client.finish()

    assert doubled.item() == 2.0
    assert bodies(tmp_path / "spool")[1]["ok"] == 1


def test_a_record_that_waits_breaks_no_capture_in_another_thread(torch: Any, client: Client, tmp_path: Path) -> None:
    value = torch.ones((), device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        keep_busy(torch, BUSY_MS)
        client.log({"loss": value * 3}, step=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = value * 2
        time.sleep(1.0)  # the sender looks every few milliseconds meanwhile
    graph.replay()
    torch.cuda.synchronize()
    client.finish()

    assert doubled.item() == 2.0
    assert bodies(tmp_path / "spool")[1] == {"loss": 3.0}
