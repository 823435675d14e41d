"""An NVML and a psutil that play what a machine may do.

    FakeNvml(count)      GPUs whose facts are fixed; `refuse(question, code)`, `lose(index)`, `hang`, …
    FakePsutil()         counters that a test sets

Must not know: what our product makes of it. A question that NVML does not have is an AttributeError.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, NOT_LOADED, LIBRARY_MISSING, NO_FUNCTION, LOST = 1, 3, 4, 9, 12, 13, 15


class NvmlError(Exception):
    """As pynvml's: `value` is the code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML code {value}")
        self.value = value


class FakeNvml:
    """The functions of pynvml that are asked for. `instances` of every GPU: memory of its MIG places, None is free."""

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_VOLATILE_ECC = 0

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.init_code = 0
        self.refused: dict[str, int] = {}
        self.lost: dict[int, int] = {}
        self.reasons = 0
        self.instances: list[int | None] | None = None
        self.hang = threading.Event()  # unset: every question hangs
        self.hang.set()
        self.asked: Counter[str] = Counter()
        self._is_open = False

    def refuse(self, *questions: str, code: int = NOT_SUPPORTED) -> None:
        self.refused |= dict.fromkeys(questions, code)

    def lose(self, index: int, code: int = LOST) -> None:
        self.lost[index] = code

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own name, as all below
        self._answer("nvmlInit", needs_open=False)
        if self.init_code:
            raise NvmlError(self.init_code)
        self._is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._answer("nvmlShutdown")
        self._is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetCount")
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetHandleByIndex", index)
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        self._answer("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=90, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:  # noqa: N802
        if isinstance(handle, tuple):
            return SimpleNamespace(used=self.instances[handle[1]], total=100)  # type: ignore[index]
        self._answer("nvmlDeviceGetMemoryInfo", handle)
        return SimpleNamespace(used=60 + handle, total=120)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetPowerUsage", handle)
        return 650_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetEnforcedPowerLimit", handle)
        return 700_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetTemperature", handle)
        return 55

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetClockInfo", handle)
        return 1980 if clock == self.NVML_CLOCK_SM else 2619

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, _since: int) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetTotalEccErrors", handle)
        return (7, 2)[kind]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return self.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return self.reasons

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        self._answer("nvmlDeviceGetMigMode", handle)
        if self.instances is None:
            raise NvmlError(NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetMaxMigDeviceCount", handle)
        return len(self.instances or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, place: int) -> tuple[int, int]:  # noqa: N802
        self._answer("nvmlDeviceGetMigDeviceHandleByIndex", handle)
        if (self.instances or [])[place] is None:
            raise NvmlError(6)
        return handle, place

    def _answer(self, question: str, handle: int | None = None, *, needs_open: bool = True) -> None:
        self.asked[question] += 1
        self.hang.wait()
        if needs_open and not self._is_open:
            raise NvmlError(UNINITIALIZED)
        if question in self.refused:
            raise NvmlError(self.refused[question])
        if handle in self.lost:
            raise NvmlError(self.lost[handle])


class FakePsutil:
    """What the host sampler asks of psutil; None raises."""

    def __init__(self) -> None:
        self.times: Any = SimpleNamespace(user=100.0, nice=0.0, system=50.0, idle=800.0, iowait=50.0)
        self.disks: Any = SimpleNamespace(read_bytes=1000, write_bytes=2000)
        self.networks: Any = {
            "lo": SimpleNamespace(bytes_recv=10**9, bytes_sent=10**9),
            "net-of-nobody": SimpleNamespace(bytes_recv=100, bytes_sent=200),
        }
        self.memory: Any = SimpleNamespace(used=30, available=60, total=100)

    def cpu_times(self) -> Any:
        return self._told(self.times)

    def cpu_count(self) -> int:
        return 4

    def getloadavg(self) -> tuple[float, float, float]:
        return (1.5, 1.0, 0.5)

    def virtual_memory(self) -> Any:
        return self._told(self.memory)

    def swap_memory(self) -> Any:
        return SimpleNamespace(used=5)

    def disk_io_counters(self, *, nowrap: bool) -> Any:
        assert not nowrap
        return self.disks

    def net_io_counters(self, *, pernic: bool, nowrap: bool) -> Any:
        assert pernic
        assert not nowrap
        return self._told(self.networks)

    def _told(self, value: Any) -> Any:
        if value is None:
            raise PermissionError(13, "Permission denied")
        return value
