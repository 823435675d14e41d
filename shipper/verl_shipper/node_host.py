"""Facts of the machine itself: processors, memory, disks, network (psutil), space on file systems.

psutil tells of the host, also in a container; what a container may use is node_cgroup.py's. `space_facts` may hang, on
a network file system whose server is gone; everything else reads what the kernel holds in memory.

Network counters are those of real devices where there are any: bridges, bonds and the ends of containers would count
the same bytes again. What goes over InfiniBand is not among them.

Must not know: threads. A group that cannot be read is left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

from verl_shipper.node_cgroup import CONTAINER_FACTS, Cgroup

LOG = logging.getLogger(__name__)

SHM = "/dev/shm"  # noqa: S108 - its size is a fact; nothing is put there
NETWORK_DEVICES = "/sys/class/net"
HOST_FACTS = {
    "cpu/utilization_percent": "of all processors, since the last sample",
    "cpu/iowait_percent": "of them, idle because a disk was waited for",
    "cpu/load_1m": "tasks that ran or wanted to, over the last minute",
    "cpu/count": "processors",
    "memory/used_bytes": "without caches",
    "memory/available_bytes": "what can be had without swapping",
    "memory/used_percent": "what cannot be had, of all",
    "memory/swap_used_bytes": "swapped out",
    "disk/read_bytes_per_s": "all disks together",
    "disk/write_bytes_per_s": "all disks together",
    "network/received_bytes_per_s": "all network devices together, without loopback and InfiniBand",
    "network/sent_bytes_per_s": "the same",
    **CONTAINER_FACTS,
}
SPACE_FACTS = {
    "disk/used_bytes": "on the file system of the spool",
    "disk/free_bytes": "there, for everybody but root",
    "disk/used_percent": "there, as `df` says it",
    "shm/used_bytes": "in /dev/shm, where Ray and data loaders keep what they share",
    "shm/used_percent": "the same, of all",
}
Facts = dict[str, float]


class Rates:
    """How much counters grew per second, between a sample and the one before."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}

    def per_s(self, name: str, counter: float, now_s: float) -> Facts:
        """The rate by its name; nothing at first, and nothing when the counter went back: it began anew."""
        before = self._before.get(name)
        self._before[name] = (counter, now_s)
        if before is None or counter < before[0] or now_s <= before[1]:
            return {}
        return {name: (counter - before[0]) / (now_s - before[1])}


class Host:
    """The machine. `psutil`: in place of the package."""

    def __init__(self, psutil: Any = None, cgroup_root: str | None = None) -> None:
        self._psutil = psutil
        self._rates = Rates()
        self._cgroup = Cgroup() if cgroup_root is None else Cgroup(cgroup_root)
        self._times: tuple[float, float, float] | None = None  # of processors: all, idle, waiting for a disk

    def read(self, now_s: float) -> Facts:
        if self._psutil is None:
            import psutil

            self._psutil = psutil
        facts: Facts = {}
        groups: Iterable[Callable[[float], Facts]] = (
            self._cpu,
            self._load,
            self._memory,
            self._swap,
            self._disks,
            self._network,
            self._container,
        )
        for group in groups:
            try:
                facts |= group(now_s)
            except Exception as error:  # noqa: BLE001 - a kernel, or a container, that does not have it
                LOG.debug("no facts, %s: %s: %s", group.__name__, type(error).__name__, error)
        return facts

    def _cpu(self, _now_s: float) -> Facts:
        times = self._psutil.cpu_times()
        waiting = getattr(times, "iowait", 0.0)
        idle = times.idle + waiting
        # A guest's time is in the user's already.
        total = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")) + idle
        before, self._times = self._times, (total, idle, waiting)
        if before is None or total <= before[0]:
            return {}
        passed = total - before[0]
        return {
            "cpu/utilization_percent": _percent(passed - (idle - before[1]), passed),
            "cpu/iowait_percent": _percent(waiting - before[2], passed),
        }

    def _load(self, _now_s: float) -> Facts:
        return {"cpu/load_1m": self._psutil.getloadavg()[0], "cpu/count": self._psutil.cpu_count()}

    def _memory(self, _now_s: float) -> Facts:
        known = self._psutil.virtual_memory()
        return {
            "memory/used_bytes": known.used,
            "memory/available_bytes": known.available,
            "memory/used_percent": _percent(known.total - known.available, known.total),
        }

    def _swap(self, _now_s: float) -> Facts:
        return {"memory/swap_used_bytes": self._psutil.swap_memory().used}

    def _disks(self, now_s: float) -> Facts:
        # Without psutil's own care for counters that wrap, which remembers across all its callers; see Rates.
        known = self._psutil.disk_io_counters(nowrap=False)
        if known is None:
            return {}
        return self._rates.per_s("disk/read_bytes_per_s", known.read_bytes, now_s) | self._rates.per_s(
            "disk/write_bytes_per_s", known.write_bytes, now_s
        )

    def _network(self, now_s: float) -> Facts:
        known = self._psutil.net_io_counters(pernic=True, nowrap=False)
        names = [name for name in known if name != "lo"]
        real = [name for name in names if os.path.exists(f"{NETWORK_DEVICES}/{name}/device")]
        chosen = [known[name] for name in real or names]
        if not chosen:
            return {}
        received = sum(each.bytes_recv for each in chosen)
        sent = sum(each.bytes_sent for each in chosen)
        return self._rates.per_s("network/received_bytes_per_s", received, now_s) | self._rates.per_s(
            "network/sent_bytes_per_s", sent, now_s
        )

    def _container(self, now_s: float) -> Facts:
        facts, cpu_s = self._cgroup.read(self._psutil.virtual_memory().total)
        limit = facts.get("container/cpu_limit_count")
        if limit and cpu_s is not None:
            for used in self._rates.per_s("container/cpu", cpu_s, now_s).values():
                facts["container/cpu_utilization_percent"] = 100 * used / limit
        return facts


def space_facts(folder: str) -> Facts:
    """Space where `folder` is, and in shared memory. May hang."""
    facts: Facts = {}
    for prefix, path in (("disk", folder), ("shm", SHM)):
        try:
            known = os.statvfs(path)
        except OSError as error:
            LOG.debug("no space of %s: %s", path, error)
            continue
        used = (known.f_blocks - known.f_bfree) * known.f_frsize
        free = known.f_bavail * known.f_frsize
        facts |= {f"{prefix}/used_bytes": used, f"{prefix}/free_bytes": free}
        if used + free:
            facts[f"{prefix}/used_percent"] = _percent(used, used + free)
    facts.pop("shm/free_bytes", None)
    return facts


def _percent(part: float, whole: float) -> float:
    return min(max(100 * part / whole, 0.0), 100.0)
