"""A device that is as far as a test says, behind the names of torch that the client touches.

    device = FakeTorch()            put into sys.modules["torch"]
    device.tensor(1.5)              a number on it: to read it at once is an AssertionError, unless `may_wait`
    device.run()                    all that was asked of it so far is done, and its events fire

Must not know: the client. On failure: AssertionError.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FakeType:
    name: str
    is_floating_point: bool = True
    is_complex: bool = False

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class FakeDevice:
    type: str


class FakeTorch(types.ModuleType):
    """The module, and the device behind it."""

    float64, float32, bfloat16 = FakeType("float64"), FakeType("float32"), FakeType("bfloat16")
    float8_e4m3fn = FakeType("float8_e4m3fn")
    int64, int32, uint64 = (FakeType(name, is_floating_point=False) for name in ("int64", "int32", "uint64"))
    complex64 = FakeType("complex64", is_floating_point=False, is_complex=True)

    def __init__(self) -> None:
        super().__init__("torch")
        self.__dict__["bool"] = FakeType("bool", is_floating_point=False)
        self.queue: list[Callable[[], None]] = []
        self.stacks: list[tuple[str, int]] = []  # type and size of every copy that was started
        self.may_wait = False
        self.queries = 0
        self.allocated = 0  # pieces of pinned memory
        self.is_capturing = False
        self.has_pinned_memory = True
        self.failure: Exception | None = None
        self.cuda = types.SimpleNamespace(
            Event=lambda: _Event(self),
            current_stream=lambda device: ("stream of", device),
            is_current_stream_capturing=lambda: self.is_capturing,
            is_initialized=lambda: True,
        )
        self.abacus = types.SimpleNamespace()  # a kind of device without events

    def tensor(self, number: Any, dtype: FakeType | None = None, device: str = "cuda") -> FakeTensor:
        return FakeTensor(self, [number], dtype or self.float32, device)

    def run(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def stack(self, tensors: list[FakeTensor]) -> FakeTensor:
        assert len({tensor.dtype for tensor in tensors}) == 1
        self.stacks.append((tensors[0].dtype.name, len(tensors)))
        numbers = [number for tensor in tensors for number in tensor.numbers]
        return FakeTensor(self, numbers, tensors[0].dtype, tensors[0].device.type)

    def empty(self, count: int, dtype: FakeType, pin_memory: bool) -> HostMemory:
        assert pin_memory
        if not self.has_pinned_memory:
            raise RuntimeError("no pinned memory")
        self.allocated += 1
        return HostMemory(self, count, dtype)

    @contextlib.contextmanager
    def no_grad(self) -> Iterator[None]:
        yield


class FakeTensor:
    """One number, or several, on the device."""

    is_cpu = False
    is_meta = False

    def __init__(self, torch: FakeTorch, numbers: list[Any], dtype: FakeType, device: str) -> None:
        self.torch = torch
        self.numbers = numbers
        self.dtype = dtype
        self.device = FakeDevice(device)
        self.shape = (len(numbers),)

    def numel(self) -> int:
        return len(self.numbers)

    def detach(self) -> FakeTensor:
        return FakeTensor(self.torch, self.numbers, self.dtype, self.device.type)

    def reshape(self, shape: tuple[int, ...]) -> FakeTensor:
        assert shape == ()
        return self

    def to(self, dtype: FakeType) -> FakeTensor:
        return FakeTensor(self.torch, self.numbers, dtype, self.device.type)

    def item(self) -> Any:
        assert self.torch.may_wait, "this waits for the device"
        self.torch.run()
        return self.numbers[0]


class HostMemory:
    """Pinned memory; a slice or another view of it is the same memory."""

    def __init__(self, torch: FakeTorch, count: int, dtype: FakeType) -> None:
        self.torch = torch
        self.slots: list[Any] = ["garbage"] * count
        self.count = count
        self.dtype = dtype

    def view(self, dtype: FakeType) -> HostMemory:
        return self._same(self.count, dtype)

    def __getitem__(self, part: slice) -> HostMemory:
        assert part.start is None
        return self._same(min(part.stop, self.count), self.dtype)

    def fill_(self, number: Any) -> None:
        self.slots[: self.count] = [number] * self.count

    def copy_(self, source: FakeTensor, non_blocking: bool) -> None:
        assert non_blocking
        assert source.dtype == self.dtype
        assert len(source.numbers) == self.count
        numbers = source.numbers
        self.torch.queue.append(lambda: self.slots.__setitem__(slice(0, self.count), numbers))

    def tolist(self) -> list[Any]:
        return self.slots[: self.count]

    def _same(self, count: int, dtype: FakeType) -> HostMemory:
        other = HostMemory(self.torch, 0, dtype)
        other.slots, other.count = self.slots, count
        return other


class _Event:
    def __init__(self, torch: FakeTorch) -> None:
        self.torch = torch
        self.has_fired = False

    def record(self, stream: Any) -> None:
        self.has_fired = False
        assert stream[0] == "stream of"
        self.torch.queue.append(lambda: setattr(self, "has_fired", True))

    def query(self) -> bool:
        assert threading.current_thread() is threading.main_thread(), "another thread may be capturing a graph"
        self.torch.queries += 1
        if self.torch.failure is not None:
            raise self.torch.failure
        return self.has_fired
