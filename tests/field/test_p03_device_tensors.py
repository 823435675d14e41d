"""P03: tensors on a device must not stop the stream, nor keep graphs and buffers alive.

Here with PyTorch's own tensors and events; of a device there is only what a CPU can play: its events fire when a test
says so. tests/gpu has the real thing. Marked `torch`: run by `make test-verl`.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.processes import wait_for
from unit.client.spooled import bodies
from verl_shipper_client import Client, device

pytestmark = pytest.mark.torch

KINDS = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
]


Make = Callable[[Any], Any]


@pytest.fixture
def torch() -> Any:
    return importlib.import_module("torch")


class Queue(list[Callable[[], None]]):
    """What the device has still to do."""

    def run(self) -> None:
        while self:
            self.pop(0)()


class Event:
    """Of the CPU's own kind: fires when the queue has come so far."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._has_fired = False

    def record(self, stream: Any) -> None:
        assert stream is not None
        self._has_fired = False
        self._queue.append(lambda: setattr(self, "_has_fired", True))

    def query(self) -> bool:
        return self._has_fired


@pytest.fixture
def queue(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """The queue of a device, which is the CPU."""
    queue = Queue()
    monkeypatch.setattr(torch.cpu, "Event", lambda: Event(queue))
    monkeypatch.setattr(device, "host_memory", lambda torch, count, dtype: torch.empty(count, dtype=dtype))
    monkeypatch.setattr(device, "_idle", {})
    return queue


@pytest.fixture
def on_device(torch: Any, queue: Queue) -> Make:
    """Makes a tensor one that says it is on a device, and must not be read at once."""

    class OnDevice(torch.Tensor):  # type: ignore[misc]
        @property
        def is_cpu(self) -> bool:
            return False

        def item(self) -> Any:
            raise AssertionError("this waits for the device")

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
                target, source = args
                values = source.as_subclass(torch.Tensor)
                queue.append(lambda: target.copy_(values))
                return target
            return super().__torch_function__(func, types, args, kwargs or {})

    return lambda value: value.as_subclass(OnDevice)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_every_type_arrive_as_they_are(
    torch: Any, on_device: Make, queue: Queue, tmp_path: Path, kind: str
) -> None:
    client = Client(spool_dir=tmp_path)
    given = torch.tensor(1.0).to(getattr(torch, kind))

    client.log({"a": on_device(given), "b": on_device(given.reshape(1, 1)), "lr": 0.5}, step=1)

    assert client.errors == 0
    assert bodies(tmp_path) == []
    queue.run()
    wait_for(lambda: bodies(tmp_path), 20, "the record")
    assert bodies(tmp_path) == [{"a": 1, "b": 1, "lr": 0.5}]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (lambda torch: torch.tensor(float("nan")), "nan"),
        (lambda torch: torch.tensor(float("inf"), dtype=torch.bfloat16), "inf"),
        (lambda torch: torch.tensor(2**63 - 1), str(2**63 - 1)),
        (lambda torch: torch.tensor(2**63, dtype=torch.uint64), str(float(2**63))),
        (lambda torch: torch.tensor(0.1, dtype=torch.float64), "0.1"),
        (lambda torch: torch.tensor(1.5, requires_grad=True) * 1, "1.5"),
        (lambda torch: torch.arange(6.0).reshape(2, 3).t()[2, 1], "5.0"),
    ],
)
def test_edges_arrive_as_they_are(
    torch: Any, on_device: Make, queue: Queue, tmp_path: Path, given: Make, expected: str
) -> None:
    client = Client(spool_dir=tmp_path)
    client.log({"value": on_device(given(torch))}, step=1)
    queue.run()
    client.finish()

    assert str(bodies(tmp_path)[0]["value"]) == expected


def test_the_value_is_that_of_the_call_whatever_becomes_of_the_tensor(
    torch: Any, on_device: Make, queue: Queue, tmp_path: Path
) -> None:
    client = Client(spool_dir=tmp_path)
    loss = torch.zeros(())
    for step in range(1, 101):
        loss += 1
        client.log({"loss": on_device(loss)}, step=step)
    queue.run()
    client.finish()

    assert [body["loss"] for body in bodies(tmp_path)] == [float(step) for step in range(1, 101)]


@pytest.mark.parametrize("is_on_device", [False, True], ids=["cpu", "device"])
def test_a_logged_value_keeps_no_graph_and_no_buffer_alive(
    torch: Any, on_device: Make, queue: Queue, tmp_path: Path, is_on_device: bool
) -> None:
    client = Client(spool_dir=tmp_path)
    buffer = torch.ones(50 * 1024 * 1024 // 4, requires_grad=True) * 1
    loss = (buffer * buffer).sum()
    seen = [weakref.ref(buffer), weakref.ref(loss)]

    client.log({"loss": on_device(loss) if is_on_device else loss}, step=1)
    del buffer, loss
    gc.collect()

    assert [ref() for ref in seen] == [None, None]


def test_a_view_of_a_large_tensor_does_not_keep_it(torch: Any, on_device: Make, queue: Queue, tmp_path: Path) -> None:
    client = Client(spool_dir=tmp_path)
    large = torch.ones(1024, 1024)
    storage = weakref.ref(large.untyped_storage())

    client.log({"corner": on_device(large[3, 4])}, step=1)
    del large
    gc.collect()

    assert storage() is None


def test_no_autograd_history_is_made(torch: Any, on_device: Make, queue: Queue, tmp_path: Path) -> None:
    client = Client(spool_dir=tmp_path)
    weight = torch.tensor(2.0, requires_grad=True)
    loss = weight * 3
    client.log({"loss": on_device(loss)}, step=1)
    loss.backward()
    queue.run()
    client.finish()

    assert weight.grad.item() == 3.0
    assert bodies(tmp_path) == [{"loss": 6.0}]


def test_a_distributed_scalar_is_its_local_value_and_asks_no_other_rank(torch: Any, tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        partial = DTensor.from_local(torch.tensor(1.5), mesh, [Partial()])
        client = Client(spool_dir=tmp_path / "spool")
        client.log({"loss": partial, "many": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, step=1)
    finally:
        dist.destroy_process_group()

    (body,) = bodies(tmp_path / "spool")
    assert body["loss"] == 1.5
    assert not isinstance(body["many"], float)
