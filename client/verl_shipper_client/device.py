"""Numbers that are still on a device, read without waiting for it.

    reading = Reading()
    body = plain(data, reading.take)      every one-element tensor on a device becomes an `Awaited`
    reading.start()                       per device and type: stack, copy to pinned memory, record an event
    …
    reading.is_ready()                    have the events fired?
    reading.values()                      the numbers, by the index of their `Awaited`

All of it goes into the device's own queue (its current stream), behind the kernels that compute the values: the caller
launches four of them and goes on. The stacked copy owns its memory, so that neither a graph nor the buffer that a
value is a view of lives longer for it.

Works by duck typing on PyTorch's tensors of any device that has events and pinned memory (CUDA, ROCm, XPU, NPU); of
another one a value is read at once. Never imports torch: whoever holds a tensor has done so. Must not know: records,
clients. Raises nothing: what goes wrong makes a value `Unsupported` and costs its neighbours nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_shipper_client.values import plain, unsupported
from verl_shipper_spool.record import Unsupported

NOT_READY = "not ready"  # told of a value that was given up
# Stacked as they are. Of others, eight-bit floats among them, not every device can stack: converted one by one.
_STACKABLE = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


class CapturedError(Exception):
    """A graph is being captured on the stream: what is launched now runs later, and again and again."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """Stands in a body for a number that is on its way."""

    index: int


@dataclass(slots=True)
class _Copy:
    """Values of one device and type on their way: `target` holds them once `event` has fired."""

    indices: list[int]
    target: Any
    event: Any


@dataclass(slots=True)
class Reading:
    """The numbers of one record. `take` them all, then `start`."""

    _tensors: dict[tuple[Any, Any], list[tuple[int, Any]]] = field(default_factory=dict)
    _copies: list[_Copy] = field(default_factory=list)
    _values: list[Any] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on a device."""
        return not self._values

    def take(self, tensor: Any) -> Any:
        """What stands for a tensor in the body: an `Awaited`, or a marker when it cannot be read."""
        try:
            if hasattr(tensor, "to_local"):
                tensor = tensor.to_local()  # of a distributed tensor: to ask for its whole would take all ranks
            scalar = tensor.detach().reshape(())
            key = (scalar.device, scalar.dtype)
        except Exception as error:  # noqa: BLE001 - see the header
            return unsupported(tensor, type(error).__name__)
        index = len(self._values)
        self._values.append(unsupported(tensor, NOT_READY))
        self._tensors.setdefault(key, []).append((index, scalar))
        return Awaited(index)

    def start(self) -> None:
        """Send the copies on their way."""
        tensors, self._tensors = self._tensors, {}
        for (device, dtype), members in tensors.items():
            indices = [index for index, _ in members]
            scalars = [scalar for _, scalar in members]
            try:
                copy = _start_copy(sys.modules["torch"], device, dtype, scalars)
            except CapturedError:
                self._fill(indices, [unsupported(scalar, "while a graph is captured") for scalar in scalars])
                continue
            except Exception:  # noqa: BLE001 - no pinned memory for this device, a type it cannot stack, its death
                copy = None
            if copy is None:
                self._fill(indices, [plain(scalar) for scalar in scalars])
            else:
                self._copies.append(_Copy(indices, *copy))

    def is_ready(self) -> bool:
        """Whether every value has arrived, or failed. Never waits."""
        while self._copies:
            copy = self._copies[0]
            try:
                if not copy.event.query():
                    return False
                numbers = [plain(number) for number in copy.target.tolist()]
            except Exception as error:  # noqa: BLE001 - a device that failed says so here
                numbers = [_failed(self._values[index], error) for index in copy.indices]
            self._fill(copy.indices, numbers)
            del self._copies[0]
        return True

    def values(self) -> list[Any]:
        """The numbers by index; a marker in place of what is not there."""
        return self._values

    def _fill(self, indices: Sequence[int], numbers: Sequence[Any]) -> None:
        for index, number in zip(indices, numbers, strict=True):
            self._values[index] = number


def prepare() -> None:
    """Let the first reading find pinned memory: to get it from the system may wait for the device."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            host_memory(torch, 1, torch.float32)
    except Exception:  # noqa: BLE001 - then the first reading gets it itself
        return


def host_memory(torch: Any, count: int, dtype: Any) -> Any:
    """Pinned memory, from PyTorch's own pool: a block is given out again when the copy into it is over."""
    return torch.empty(count, dtype=dtype, pin_memory=True)


def _start_copy(torch: Any, device: Any, dtype: Any, scalars: list[Any]) -> tuple[Any, Any] | None:
    """Memory that will hold the values, and the event that says so; None for a device without events."""
    module = getattr(torch, device.type, None)
    make_event: Callable[[], Any] | None = getattr(module, "Event", None)
    if make_event is None:
        return None
    is_capturing = getattr(module, "is_current_stream_capturing", None)
    if is_capturing is not None and is_capturing():
        raise CapturedError
    with torch.no_grad():
        carrier = _carrier(torch, dtype)
        if str(dtype).removeprefix("torch.") not in _STACKABLE:
            scalars = [scalar.to(carrier) for scalar in scalars]
        stacked = torch.stack(scalars).to(carrier)
        target = host_memory(torch, len(scalars), carrier)
        target.copy_(stacked, non_blocking=True)
    event = make_event()
    stream = getattr(module, "current_stream", None)
    event.record(*([stream(device)] if stream is not None else []))
    return target, event


def _carrier(torch: Any, dtype: Any) -> Any:
    """A type that holds every value of `dtype`, and that every host can read."""
    if dtype.is_complex:
        raise TypeError(dtype)
    if dtype.is_floating_point:
        return dtype if dtype == torch.float64 else torch.float32
    if dtype == torch.bool:
        return dtype
    return torch.float64 if str(dtype) == "torch.uint64" else torch.int64


def _failed(marker: Unsupported, error: Exception) -> Unsupported:
    return Unsupported(marker.text.removesuffix(NOT_READY) + type(error).__name__)
