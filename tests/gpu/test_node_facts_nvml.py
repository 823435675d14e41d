"""The facts of real GPUs, beside what `nvidia-smi` says of them. Skipped, loudly, where there is no driver."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from verl_shipper.node_facts import WAIT_S, NodeFacts

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="NO GPU: NVML IS NOT TESTED HERE")
ALWAYS = ("utilization_percent", "memory_used_bytes", "memory_used_percent", "temperature_c", "power_w", "throttled")
SAMPLES_S = 60.0


@pytest.fixture
def facts() -> Iterator[NodeFacts]:
    made = NodeFacts()
    yield made
    made.close()


def first(facts: NodeFacts) -> dict[str, float]:
    """A driver that has to load first is late for some samples."""
    deadline_s = time.monotonic() + SAMPLES_S
    while "gpu/0/temperature_c" not in (found := facts.sample()):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.5)
    return found


def test_every_gpu_tells_what_nvidia_smi_tells(facts: NodeFacts) -> None:
    found = first(facts)
    query = ["nvidia-smi", "--query-gpu=index,temperature.gpu,memory.total", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.strip().splitlines()

    assert (found["gpu/count"], found["gpu/lost_count"]) == (len(told), 0)
    for line in told:
        index, temperature, memory_mib = (int(word) for word in line.split(","))
        mine = {name: found.get(f"gpu/{index}/{name}") for name in ALWAYS}
        print(mine)
        assert abs(found[f"gpu/{index}/temperature_c"] - temperature) < 15
        total = 100 * found[f"gpu/{index}/memory_used_bytes"] / max(found[f"gpu/{index}/memory_used_percent"], 1e-9)
        assert total == pytest.approx(memory_mib * 2**20, rel=0.05)


def test_a_sample_of_all_gpus_is_quick(facts: NodeFacts) -> None:
    first(facts)
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    for _ in range(10):
        assert "gpu/0/temperature_c" in facts.sample()
    took_s, cpu_s = (time.monotonic() - begin_s) / 10, (time.process_time() - begin_cpu_s) / 10
    print(f"{1000 * took_s:.1f} ms a sample, {1000 * cpu_s:.1f} ms of them on a processor")
    assert took_s < WAIT_S / 2
