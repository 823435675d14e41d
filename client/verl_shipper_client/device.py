"""Numbers that are still on a device, read without waiting for it.

    reading = Reading()
    body = plain(data, reading.take)      every one-element tensor on a device becomes an `Awaited`
    reading.start()                       per device and type: stack, copy to pinned memory, record an event
    …
    reading.has_arrived()                 is there anything in that memory by now?
    reading.is_done()                     have the events fired?
    reading.values()                      the numbers, by the index of their `Awaited`

All of it goes into the device's own queue (its current stream), behind the kernels that compute the values: the caller
launches four of them and goes on. The stacked copy owns its memory, so that neither a graph nor the buffer that a
value is a view of lives longer for it.

`has_arrived` may be asked in any thread: it reads memory and calls nothing of the device, because to query an event
while another thread captures a graph breaks that capture (pytorch/pytorch #104487, #148594). So a slot of pinned memory
begins as a word that no value has, every slot is its own witness, and memory and events are used again rather than
freed in another thread. `is_done` is for the thread that logs, when memory has said nothing for long: it knows of a
device that failed, and of a value that is that word.

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
SLOTS_MIN = 64  # of one piece of pinned memory; larger ones are powers of two
# Stacked as they are. Of others, eight-bit floats among them, not every device can stack: converted one by one.
_STACKABLE = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
# What a slot holds before its value: as integers of the slot's own width. The first two are NaNs that nobody computes.
_EMPTY = {"float32": 0x7FA5C3E1, "float64": 0x7FF45A3C7E91D2B6, "int64": -0x5A3C7E91D2B64F17}
_WIDTH = {"float32": "int32", "float64": "int64", "int64": "int64"}

_Kind = tuple[str, str, int]  # of pinned memory: kind of device, type of number, slots
_idle: dict[_Kind, list[_Pinned]] = {}
_given_up: list[_Pinned] = []  # a device may still write there


class CapturedError(Exception):
    """A graph is being captured on the stream: what is launched now runs later, and again and again."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """Stands in a body for a number that is on its way."""

    index: int


@dataclass(slots=True, eq=False)
class _Pinned:
    """Memory that a device writes to, and the event that says when. `bits`: the same memory as integers."""

    kind: _Kind
    memory: Any
    bits: Any
    event: Any


@dataclass(slots=True, eq=False)
class _Copy:
    """Values of one device and type on their way into the first slots of `pinned`."""

    indices: list[int]
    pinned: _Pinned

    def has_arrived(self) -> bool:
        return _EMPTY[self.pinned.kind[1]] not in self.pinned.bits[: len(self.indices)].tolist()


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
                pinned = _start_copy(sys.modules["torch"], device, dtype, scalars)
            except CapturedError:
                self._fill(indices, [unsupported(scalar, "while a graph is captured") for scalar in scalars])
                continue
            except Exception:  # noqa: BLE001 - no pinned memory for this device, a type it cannot stack, its death
                pinned = None
            if pinned is None:
                self._fill(indices, [plain(scalar) for scalar in scalars])
            else:
                self._copies.append(_Copy(indices, pinned))

    def has_arrived(self) -> bool:
        """Whether every value is in memory. Calls nothing of a device."""
        while self._copies:
            if not self._copies[0].has_arrived():
                return False
            self._land(self._copies[0])
        return True

    def is_done(self) -> bool:
        """Whether every value has arrived, or failed; asks the device. For the thread that logs. Never waits."""
        while self._copies:
            copy = self._copies[0]
            try:
                if _is_capturing(getattr(sys.modules["torch"], copy.pinned.kind[0])) or not copy.pinned.event.query():
                    return False
            except Exception as error:  # noqa: BLE001 - a device that failed says so here
                self._fill(copy.indices, [_failed(self._values[index], error) for index in copy.indices])
                self._leave(copy)
                continue
            self._land(copy)
        return True

    def values(self) -> list[Any]:
        """The numbers by index; a marker in place of what is not there. What has not come by now never will."""
        while self._copies:
            self._leave(self._copies[0])
        return self._values

    def _land(self, copy: _Copy) -> None:
        """Take the values of the first copy; its memory may be used again."""
        self._fill(copy.indices, [plain(number) for number in copy.pinned.memory[: len(copy.indices)].tolist()])
        del self._copies[0]
        _idle.setdefault(copy.pinned.kind, []).append(copy.pinned)

    def _leave(self, copy: _Copy) -> None:
        """Give up the first copy. A device that comes later still writes there."""
        del self._copies[0]
        _given_up.append(copy.pinned)

    def _fill(self, indices: Sequence[int], numbers: Sequence[Any]) -> None:
        for index, number in zip(indices, numbers, strict=True):
            self._values[index] = number


def prepare() -> None:
    """Get pinned memory before the first reading needs it: the system may wait for the device before it gives any."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized() and not _idle:
            pinned = _pinned(torch, "cuda", "float32", SLOTS_MIN)
            _idle.setdefault(pinned.kind, []).append(pinned)
    except Exception:  # noqa: BLE001 - then the first reading gets it itself
        return


def host_memory(torch: Any, count: int, dtype: Any) -> Any:
    """Pinned memory."""
    return torch.empty(count, dtype=dtype, pin_memory=True)


def _start_copy(torch: Any, device: Any, dtype: Any, scalars: list[Any]) -> _Pinned | None:
    """Memory that will hold the values; None for a device without events."""
    module = getattr(torch, device.type, None)
    if getattr(module, "Event", None) is None:
        return None
    if _is_capturing(module):
        raise CapturedError
    name = _carrier(dtype)
    carrier = getattr(torch, name)
    with torch.no_grad():
        if str(dtype).removeprefix("torch.") not in _STACKABLE:
            scalars = [scalar.to(carrier) for scalar in scalars]
        stacked = torch.stack(scalars).to(carrier)
        pinned = _pinned(torch, device.type, name, len(scalars))
        pinned.bits[: len(scalars)].fill_(_EMPTY[name])
        pinned.memory[: len(scalars)].copy_(stacked, non_blocking=True)
    current: Callable[[Any], Any] | None = getattr(module, "current_stream", None)
    pinned.event.record(*([current(device)] if current is not None else []))
    return pinned


def _pinned(torch: Any, device_type: str, name: str, count: int) -> _Pinned:
    """Memory for `count` numbers: used before, or fresh."""
    kind = (device_type, name, max(SLOTS_MIN, 1 << (count - 1).bit_length()))
    try:
        return _idle[kind].pop()
    except (KeyError, IndexError):
        memory = host_memory(torch, kind[2], getattr(torch, name))
        bits = memory.view(getattr(torch, _WIDTH[name]))
        return _Pinned(kind, memory, bits, getattr(torch, device_type).Event())


def _is_capturing(module: Any) -> bool:
    ask = getattr(module, "is_current_stream_capturing", None)
    return bool(ask is not None and ask())


def _carrier(dtype: Any) -> str:
    """A type that holds every value of `dtype`, as closely as a record does, and that every host can read."""
    name = str(dtype).removeprefix("torch.")
    if dtype.is_complex:
        raise TypeError(name)
    if dtype.is_floating_point:
        return "float64" if name == "float64" else "float32"
    return "float64" if name == "uint64" else "int64"


def _failed(marker: Unsupported, error: Exception) -> Unsupported:
    return Unsupported(marker.text.removesuffix(NOT_READY) + type(error).__name__)
