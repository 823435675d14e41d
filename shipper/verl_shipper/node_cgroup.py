"""What a container may use, and does: memory and processor time by its control group, version 2 or 1.

Only the group at the root of what we see: in a container that is the container's own, on a host the whole machine,
which has no limits, and then there are no facts. A limit that is no limit (v1 writes a huge number) is none either.

    v2   memory.max  memory.current  memory.stat   cpu.max  cpu.stat
    v1   memory/memory.limit_in_bytes  …usage_in_bytes  …stat   cpu/cpu.cfs_quota_us  …   cpuacct/cpuacct.usage

Must not know: psutil. A file that is missing or odd takes only its own facts with it.
"""

from __future__ import annotations

import os

ROOT = "/sys/fs/cgroup"
CONTAINER_FACTS = {
    "container/memory_used_bytes": "of the container, without file caches that can be dropped at once",
    "container/memory_limit_bytes": "what it may have",
    "container/memory_used_percent": "used, of the limit",
    "container/cpu_limit_count": "processors that it may use",
    "container/cpu_utilization_percent": "of these, since the last sample",
}
Facts = dict[str, float]


class Cgroup:
    """The control group at `root`."""

    def __init__(self, root: str = ROOT) -> None:
        self._root = root

    def read(self, host_memory_bytes: float) -> tuple[Facts, float | None]:
        """Facts, and the seconds of processor time that were used so far."""
        facts = self._memory(host_memory_bytes)
        limit, cpu_s = self._cpu()
        if limit is not None:
            facts["container/cpu_limit_count"] = limit
        return facts, cpu_s

    def _memory(self, host_memory_bytes: float) -> Facts:
        limit = self._number("memory.max")
        used, stat, cache = self._number("memory.current"), "memory.stat", "inactive_file"
        if limit is None:
            limit = self._number("memory/memory.limit_in_bytes")
            used, stat, cache = (
                self._number("memory/memory.usage_in_bytes"),
                "memory/memory.stat",
                "total_inactive_file",
            )
        if limit is None or used is None or not 0 < limit < host_memory_bytes:
            return {}
        used = max(used - (self._field(stat, cache) or 0.0), 0.0)
        return {
            "container/memory_used_bytes": used,
            "container/memory_limit_bytes": limit,
            "container/memory_used_percent": min(100 * used / limit, 100.0),
        }

    def _cpu(self) -> tuple[float | None, float | None]:
        quota, _, period = self._text("cpu.max").partition(" ")
        used, unit = self._field("cpu.stat", "usage_usec"), 1e6
        if not quota:
            quota, period = self._text("cpu/cpu.cfs_quota_us"), self._text("cpu/cpu.cfs_period_us")
            used, unit = self._number("cpuacct/cpuacct.usage"), 1e9
        limits = _number(quota), _number(period)
        if limits[0] is None or limits[1] is None or limits[0] <= 0 or limits[1] <= 0:
            return None, None
        return limits[0] / limits[1], None if used is None else used / unit

    def _text(self, name: str) -> str:
        try:
            with open(os.path.join(self._root, name), encoding="ascii", errors="replace") as file:
                return file.read(1 << 16).strip()
        except OSError:
            return ""

    def _number(self, name: str) -> float | None:
        return _number(self._text(name))

    def _field(self, name: str, key: str) -> float | None:
        """A line `key number` of a file."""
        for line in self._text(name).splitlines():
            found, _, number = line.partition(" ")
            if found == key:
                return _number(number)
        return None


def _number(text: str) -> float | None:
    return float(text) if text.isdecimal() else None  # "max" and "-1" are no limits
