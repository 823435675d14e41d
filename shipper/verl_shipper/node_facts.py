"""What a node does: processors, memory, disks, network, GPUs. One sample is a dict of numbers by flat name.

    cpu/utilization_percent   memory/used_bytes   disk/write_bytes_per_s   gpu/0/power_w   …   all: FACTS

One sampler per node, in a process that is not the trainer's. `sample` never raises and returns in bounded time: what
may hang (the GPU's driver, a network file system) is asked in a thread of its own, and who does not answer within
WAIT_S has no facts this time, and is not asked again before it has answered. A fact that a machine does not have is
left out; no GPU, no driver, no permission are ordinary. Rates need two samples, and a counter that went back has none.

    node_facts.py ── node_host.py ── node_cgroup.py      psutil, files of the kernel
         └────────── node_gpus.py                        pynvml

Must not know: records, runs, trackers. On failure: fewer facts.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from verl_shipper.folders import existing
from verl_shipper.node_gpus import GPU_FACTS, Gpus
from verl_shipper.node_host import HOST_FACTS, SPACE_FACTS, Host, space_facts
from verl_shipper_spool.location import spool_dir

LOG = logging.getLogger(__name__)

WAIT_S = 2.0  # eight GPUs answer within some milliseconds; a driver that loads first takes seconds, once
CLOSE_S = 0.5
FACTS = {**HOST_FACTS, **SPACE_FACTS, **GPU_FACTS}  # what each name means; `<i>` stands for a number
Facts = dict[str, float]


class Aside:
    """Asks a question that may hang, in a thread of its own."""

    def __init__(self, name: str, ask: Callable[[], Facts], end: Callable[[], None], wait_s: float) -> None:
        self._name = name
        self._ask = ask
        self._end = end
        self._wait_s = wait_s
        self._questions: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Facts] = queue.SimpleQueue()
        self._is_late = False
        self._thread: threading.Thread | None = None

    def answer(self) -> Facts | None:
        """The answer of now; None when there is none in time."""
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        try:
            if self._is_late:
                self._answers.get_nowait()  # to an earlier question: too old by now
                self._is_late = False
            self._questions.put(True)
            return self._answers.get(timeout=self._wait_s)
        except queue.Empty:
            if not self._is_late:
                LOG.info("%s: no answer within %g s; its facts are left out until it answers", self._name, self._wait_s)
            self._is_late = True
            return None

    def close(self) -> None:
        """End the thread, unless it hangs: then it ends with the process."""
        if self._thread is not None:
            self._questions.put(False)
            self._thread.join(0.0 if self._is_late else CLOSE_S)
            self._thread = None

    def _serve(self) -> None:
        while self._questions.get():
            self._answers.put(_tried(self._name, self._ask) or {})
        _tried(self._name, self._end)


class NodeFacts:
    """The one sampler of a node. `folder`: whose file system is measured, the clients' spool by default. `psutil`,
    `pynvml`: in place of the real packages. Used by one thread."""

    def __init__(
        self,
        folder: str | None = None,
        *,
        psutil: Any = None,
        pynvml: Any = None,
        clock: Callable[[], float] = time.monotonic,
        wait_s: float = WAIT_S,
        cgroup_root: str | None = None,
    ) -> None:
        self._clock = clock
        self._gpus = Gpus(pynvml, clock)
        self._host = Host(psutil, cgroup_root)
        place = folder or spool_dir()
        self._space = Aside("node-facts-disk", lambda: space_facts(existing(place)), _nothing, wait_s)
        self._driver = Aside("node-facts-gpu", self._gpus.read, self._gpus.close, wait_s)

    def sample(self) -> Facts:
        """What is known now; empty in the worst case."""
        facts: Facts = {}
        facts |= _tried("host", lambda: self._host.read(self._clock())) or {}
        facts |= _tried("disk", self._space.answer) or {}
        gpus = _tried("gpu", self._driver.answer)
        facts |= self._gpus.silent() if gpus is None else gpus
        return {name: float(value) for name, value in facts.items() if math.isfinite(value)}

    def close(self) -> None:
        """End threads and let go of the driver."""
        self._space.close()
        self._driver.close()


def _tried(what: str, ask: Callable[[], Facts | None]) -> Facts | None:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - facts are an extra: nothing about them may stop their reader
        LOG.debug("no facts of %s: %s: %s", what, type(error).__name__, error)
        return None


def _nothing() -> None:
    """A thread that has nothing to let go of."""
