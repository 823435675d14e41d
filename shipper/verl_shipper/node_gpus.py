"""Facts of NVIDIA GPUs, asked of the driver through NVML (package nvidia-ml-py, module `pynvml`). May hang.

Each fact is asked for by itself, and one that a GPU does not have (power on a virtual GPU, utilization under MIG) is
left out, as is a GPU that we may not ask. One that has fallen off the bus gives none and is counted in
`gpu/lost_count`, as all are when the driver does not answer; every RETRY_S the library is closed and opened again then,
which is what finds a GPU that was reset, or a driver that was loaded again. Without a driver one attempt in RETRY_S is
all that it costs.

Must not know: threads, time limits. Never raises on purpose; what does is its caller's to catch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

LOG = logging.getLogger(__name__)

GPUS_MAX = 64  # the largest machines have 16; a limit all the same
RETRY_S = 60.0
# Codes of NVML: uninitialized, driver not loaded, GPU is lost, reset required. Nothing more comes of such a GPU.
GONE = frozenset({1, 9, 15, 16})
REASONS = {
    "power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
}
GPU_FACTS = {
    "gpu/count": "GPUs that the driver shows",
    "gpu/lost_count": "of those that were seen since the start, how many do not answer",
    "gpu/<i>/utilization_percent": "of the time since the driver's last look, in which a kernel ran",
    "gpu/<i>/memory_busy_percent": "of that time, in which device memory was read or written",
    "gpu/<i>/memory_used_bytes": "device memory, with what the driver keeps for itself",
    "gpu/<i>/memory_used_percent": "the same, of all",
    "gpu/<i>/power_w": "power drawn",
    "gpu/<i>/power_limit_w": "the limit that is in force",
    "gpu/<i>/temperature_c": "the GPU's own sensor",
    "gpu/<i>/sm_clock_mhz": "clock of the processors",
    "gpu/<i>/memory_clock_mhz": "clock of the memory",
    "gpu/<i>/ecc_corrected_count": "memory errors that were corrected since the driver was loaded",
    "gpu/<i>/ecc_uncorrected_count": "those that were not",
    "gpu/<i>/throttled": "1 when clocks are held down for any of the reasons below, else 0",
    "gpu/<i>/throttled_power_cap": "the power limit; ordinary under full load",
    "gpu/<i>/throttled_hw_slowdown": "the hardware itself: heat, or power supply",
    "gpu/<i>/throttled_sync_boost": "another GPU of the same group",
    "gpu/<i>/throttled_sw_thermal": "heat, by the driver",
    "gpu/<i>/throttled_hw_thermal": "heat, by the hardware",
    "gpu/<i>/throttled_power_brake": "the machine's power supply says so",
    "gpu/<i>/mig/<i>/memory_used_bytes": "of one MIG instance",
    "gpu/<i>/mig/<i>/memory_used_percent": "the same, of all that it has",
}
Facts = dict[str, float]


class Gpus:
    """All GPUs of the machine. `nvml`: in place of pynvml."""

    def __init__(self, nvml: Any, clock: Callable[[], float]) -> None:
        self._nvml = nvml
        self._clock = clock
        self._is_open = False
        self._tried_s = -math.inf  # when the library was opened, or not, the last time
        self._known = 0  # the most GPUs that were ever there

    def read(self) -> Facts:
        """Facts of every GPU that answers."""
        if not self._open():
            return self.silent()
        try:
            count = int(self._nvml.nvmlDeviceGetCount())
        except Exception as error:  # noqa: BLE001 - the driver may have gone, and come back some day
            LOG.debug("GPUs cannot be counted: %s", error)
            self._shut()
            return self.silent()
        facts: Facts = {}
        answered = lost = 0
        for index in range(min(count, GPUS_MAX)):
            try:
                found = self._gpu(index)
            except Exception as error:  # noqa: BLE001 - the others may well answer
                LOG.debug("GPU %d: %s", index, error)
                lost += _is_gone(error)
                continue
            answered += 1
            facts |= {f"gpu/{index}/{name}": value for name, value in found.items()}
        self._known = max(self._known, answered + lost)
        if answered < self._known and self._clock() - self._tried_s >= RETRY_S:
            self._shut()
        return {"gpu/count": answered + lost, **facts, **self._lost(answered)} if self._known else {}

    def silent(self) -> Facts:
        """What is known of GPUs that do not answer; nothing where there never were any."""
        return self._lost(0)

    def close(self) -> None:
        self._shut()

    def _lost(self, answered: int) -> Facts:
        return {"gpu/lost_count": self._known - answered} if self._known else {}

    def _open(self) -> bool:
        if self._is_open:
            return True
        if self._clock() - self._tried_s < RETRY_S:
            return False
        self._tried_s = self._clock()
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
        except Exception as error:  # noqa: BLE001 - no package, no driver, no permission: no GPUs
            LOG.debug("no GPUs: %s", error)
            return False
        self._is_open = True
        return True

    def _shut(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                self._nvml.nvmlShutdown()
            except Exception as error:  # noqa: BLE001 - it is gone either way
                LOG.debug("NVML does not shut down: %s", error)

    def _gpu(self, index: int) -> Facts:
        """Facts of one GPU. Raises what NVML raises when it is lost, or not ours to ask."""
        facts: Facts = {}
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        for ask in QUESTIONS:
            try:
                facts.update(ask(self._nvml, handle))
            except Exception as error:
                if _is_gone(error):
                    raise
                LOG.debug("GPU %d, %s: %s", index, ask.__name__, error)
        return facts


def _is_gone(error: Exception) -> bool:
    return getattr(error, "value", None) in GONE


def utilization(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    yield "utilization_percent", rates.gpu
    yield "memory_busy_percent", rates.memory


def memory(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    known = nvml.nvmlDeviceGetMemoryInfo(handle)
    yield "memory_used_bytes", known.used
    if known.total:
        yield "memory_used_percent", 100 * known.used / known.total


def power(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    yield "power_w", nvml.nvmlDeviceGetPowerUsage(handle) / 1000


def power_limit(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    yield "power_limit_w", nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000


def temperature(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    yield "temperature_c", nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)


def sm_clock(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    yield "sm_clock_mhz", nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)


def memory_clock(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    yield "memory_clock_mhz", nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)


def ecc_corrected(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    kind = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
    yield "ecc_corrected_count", nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC)


def ecc_uncorrected(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    yield "ecc_uncorrected_count", nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC)


def throttling(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    """Older packages and drivers know it by another name only."""
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except Exception as error:
        if _is_gone(error):
            raise
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    found = {name: float(bool(bits & bit)) for name, bit in REASONS.items()}
    yield "throttled", max(found.values())
    for name, is_so in found.items():
        yield f"throttled_{name}", is_so


def mig(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    """Instances of a GPU that is divided. There is no utilization of them here, and none of the whole either."""
    if not nvml.nvmlDeviceGetMigMode(handle)[0]:
        return
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            for name, value in memory(nvml, instance):
                yield f"mig/{place}/{name}", value
        except Exception as error:
            if _is_gone(error):
                raise
            LOG.debug("MIG instance %d: %s", place, error)  # a place that nobody has taken


QUESTIONS: tuple[Callable[[Any, Any], Iterator[tuple[str, float]]], ...] = (
    utilization,
    memory,
    power,
    power_limit,
    temperature,
    sm_clock,
    memory_clock,
    ecc_corrected,
    ecc_uncorrected,
    throttling,
    mig,
)
