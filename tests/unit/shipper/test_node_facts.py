"""The facts of a node: what is told, what is left out, and that nothing stops who asks."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import fake_nvml
from support.fake_nvml import FakeNvml, FakePsutil
from support.processes import wait_for
from verl_shipper import node_facts
from verl_shipper.node_facts import FACTS, NodeFacts
from verl_shipper.node_gpus import RETRY_S
from verl_shipper.node_host import space_facts


class Node:
    """One sampler over fakes, and a clock that a test turns."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.now_s = 1000.0
        self.nvml = FakeNvml(0)
        self.psutil = FakePsutil()
        self.facts = NodeFacts(
            str(root),
            psutil=options.get("psutil", self.psutil),
            pynvml=options.get("pynvml", self.nvml),
            clock=lambda: self.now_s,
            wait_s=options.get("wait_s", 20.0),
            cgroup_root=str(root / "cgroup"),
        )

    def sample(self, after_s: float = 10.0) -> dict[str, float]:
        self.now_s += after_s
        found = self.facts.sample()
        assert all(type(value) is float and math.isfinite(value) for value in found.values())
        assert {re.sub(r"/\d+/", "/<i>/", name) for name in found} <= FACTS.keys()
        return found

    def gpus(self, after_s: float = 10.0) -> dict[str, float]:
        return {name: value for name, value in self.sample(after_s).items() if name.startswith("gpu/")}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(**options: Any) -> Node:
        made.append(Node(tmp_path, **options))
        return made[-1]

    yield make
    for node in made:
        node.nvml.hang.set()
        node.facts.close()


# GPUs


def test_a_gpu_tells_all_its_facts_in_the_units_of_their_names(make: Callable[..., Node]) -> None:
    node = make()
    node.nvml.count = 2
    node.nvml.reasons = 0x1 | 0x4 | 0x40  # idle is no reason to worry

    found = node.gpus()

    assert (found["gpu/count"], found["gpu/lost_count"]) == (2, 0)
    assert {name.removeprefix("gpu/1/"): value for name, value in found.items() if name.startswith("gpu/1/")} == {
        "utilization_percent": 90,
        "memory_busy_percent": 40,
        "memory_used_bytes": 61,
        "memory_used_percent": pytest.approx(100 * 61 / 120),
        "power_w": 650.5,
        "power_limit_w": 700,
        "temperature_c": 55,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "ecc_corrected_count": 7,
        "ecc_uncorrected_count": 2,
        "throttled": 1,
        "throttled_power_cap": 1,
        "throttled_hw_slowdown": 0,
        "throttled_sync_boost": 0,
        "throttled_sw_thermal": 0,
        "throttled_hw_thermal": 1,
        "throttled_power_brake": 0,
    }


def test_twenty_gpus_are_twenty(make: Callable[..., Node]) -> None:
    node = make()
    node.nvml.count = 20
    assert node.gpus()["gpu/19/power_w"] == 650.5


@pytest.mark.parametrize("code", [fake_nvml.LIBRARY_MISSING, fake_nvml.NOT_LOADED, fake_nvml.NO_PERMISSION])
def test_no_driver_is_silent_and_asked_for_once_a_minute(make: Callable[..., Node], code: int) -> None:
    node = make()
    node.nvml.init_code = code
    assert [node.gpus() for _ in range(5)] == [{}] * 5
    assert node.nvml.asked["nvmlInit"] == 1
    node.nvml.init_code, node.nvml.count = 0, 1
    assert node.gpus(after_s=RETRY_S)["gpu/count"] == 1


def test_a_machine_without_the_package_has_no_gpus(make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert make(pynvml=None).gpus() == {}


def test_a_driver_without_gpus_tells_nothing(make: Callable[..., Node]) -> None:
    assert make().gpus() == {}


def test_what_a_gpu_does_not_have_is_left_out(make: Callable[..., Node]) -> None:
    node = make()
    node.nvml.count = 1
    node.nvml.refuse("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors")
    node.nvml.refuse("nvmlDeviceGetClockInfo", code=fake_nvml.NO_PERMISSION)
    node.nvml.refuse("nvmlDeviceGetTemperature", code=999)
    found = node.gpus()
    assert not [name for name in found if name.endswith(("/power_w", "ecc_corrected_count", "clock_mhz", "_c"))]
    assert (found["gpu/0/power_limit_w"], found["gpu/lost_count"]) == (700, 0)


def test_an_older_driver_names_throttling_otherwise(make: Callable[..., Node]) -> None:
    node = make()
    node.nvml.count = 1
    node.nvml.reasons = 0x80
    node.nvml.refuse("nvmlDeviceGetCurrentClocksEventReasons", code=fake_nvml.NO_FUNCTION)
    assert node.gpus()["gpu/0/throttled_power_brake"] == 1


def test_instances_of_a_divided_gpu_tell_their_memory(make: Callable[..., Node]) -> None:
    node = make()
    node.nvml.count = 1
    node.nvml.instances = [30, None, 50]
    node.nvml.refuse("nvmlDeviceGetUtilizationRates")
    found = node.gpus()
    assert (found["gpu/0/mig/0/memory_used_bytes"], found["gpu/0/mig/2/memory_used_percent"]) == (30, 50)
    assert "gpu/0/mig/1/memory_used_bytes" not in found
    assert "gpu/0/utilization_percent" not in found


def test_a_gpu_that_falls_off_the_bus_is_counted_and_the_others_go_on(make: Callable[..., Node]) -> None:
    node = make()
    node.nvml.count = 3
    node.gpus()

    node.nvml.lose(1)
    found = node.gpus()
    assert (found["gpu/lost_count"], found["gpu/2/power_w"]) == (1, 650.5)
    assert not [name for name in found if name.startswith("gpu/1/")]

    node.nvml.lost.clear()  # after a reset the library has to be opened anew
    node.gpus(after_s=RETRY_S)
    assert node.gpus(after_s=RETRY_S)["gpu/lost_count"] == 0


def test_a_gpu_that_we_may_not_ask_is_nobodys_loss(make: Callable[..., Node]) -> None:
    node = make()
    node.nvml.count = 2
    node.nvml.lose(0, code=fake_nvml.NO_PERMISSION)
    found = node.gpus()
    assert (found["gpu/count"], found["gpu/lost_count"], found["gpu/1/power_w"]) == (1, 0, 650.5)


def test_a_driver_that_is_unloaded_and_loaded_again_is_found_again(make: Callable[..., Node]) -> None:
    node = make()
    node.nvml.count = 2
    node.gpus()

    node.nvml.refuse("nvmlDeviceGetCount", code=fake_nvml.NOT_LOADED)
    node.nvml.init_code = fake_nvml.NOT_LOADED
    assert node.gpus() == {"gpu/lost_count": 2}
    assert node.gpus(after_s=RETRY_S) == {"gpu/lost_count": 2}

    node.nvml.refused.clear()
    node.nvml.init_code = 0
    assert node.gpus(after_s=RETRY_S)["gpu/lost_count"] == 0


def test_a_call_that_hangs_costs_one_wait_and_the_rest_of_the_facts_come(make: Callable[..., Node]) -> None:
    node = make(wait_s=0.3)
    node.nvml.count = 2
    wait_for(lambda: "gpu/1/power_w" in node.gpus(), 20, "the driver answers")

    node.nvml.hang.clear()
    begin_s = time.monotonic()
    found = [node.sample() for _ in range(20)]
    assert time.monotonic() - begin_s < 5  # one wait, not twenty
    assert all(sample["gpu/lost_count"] == 2 and "memory/used_bytes" in sample for sample in found)
    asked = node.nvml.asked.total()
    node.sample()
    assert node.nvml.asked.total() == asked  # no second thread runs into the same wall

    node.nvml.hang.set()
    wait_for(lambda: "gpu/1/power_w" in node.gpus(), 20, "the driver answers again")


def test_a_driver_that_hangs_from_the_start_holds_up_neither_samples_nor_the_end(make: Callable[..., Node]) -> None:
    node = make(wait_s=0.2)
    node.nvml.hang.clear()
    assert node.gpus() == {}
    begin_s = time.monotonic()
    node.facts.close()
    assert time.monotonic() - begin_s < 5


def test_the_end_lets_go_of_the_driver_and_leaves_no_thread(make: Callable[..., Node]) -> None:
    node = make()
    node.nvml.count = 1
    node.gpus()
    node.facts.close()
    assert node.nvml.asked["nvmlShutdown"] == 1
    wait_for(lambda: not [each for each in threading.enumerate() if each.name.startswith("node-facts")], 10, "ended")


# The host


def test_rates_and_shares_come_with_the_second_sample(make: Callable[..., Node]) -> None:
    node = make()
    first = node.sample()
    node.psutil.times = SimpleNamespace(user=103.0, nice=0.0, system=51.0, idle=805.0, iowait=51.0, guest=3.0)
    node.psutil.disks = SimpleNamespace(read_bytes=1500, write_bytes=2000)
    node.psutil.networks["net-of-nobody"].bytes_recv += 1000
    second = node.sample(after_s=10.0)

    assert not {name for name in first if name.endswith("_per_s") or name == "cpu/utilization_percent"}
    assert (second["cpu/utilization_percent"], second["cpu/iowait_percent"]) == (40.0, 10.0)
    assert (second["disk/read_bytes_per_s"], second["disk/write_bytes_per_s"]) == (50.0, 0.0)
    assert (second["network/received_bytes_per_s"], second["network/sent_bytes_per_s"]) == (100.0, 0.0)
    assert (second["memory/used_percent"], second["cpu/load_1m"], second["cpu/count"]) == (40.0, 1.5, 4.0)


def test_counters_that_go_back_give_no_rate_and_the_next_ones_do(make: Callable[..., Node]) -> None:
    node = make()
    node.sample()
    node.psutil.disks = SimpleNamespace(read_bytes=10, write_bytes=2010)
    node.psutil.times = SimpleNamespace(user=1.0, nice=0.0, system=1.0, idle=1.0, iowait=0.0)
    back = node.sample()
    node.psutil.disks = SimpleNamespace(read_bytes=30, write_bytes=2010)
    again = node.sample()
    assert "disk/read_bytes_per_s" not in back
    assert "cpu/utilization_percent" not in back
    assert back["disk/write_bytes_per_s"] == 1.0
    assert again["disk/read_bytes_per_s"] == 2.0


def test_a_clock_that_stands_still_gives_no_rate(make: Callable[..., Node]) -> None:
    node = make()
    node.sample()
    assert not [name for name in node.sample(after_s=0.0) if name.endswith("_per_s")]


def test_what_the_host_does_not_tell_is_left_out(make: Callable[..., Node]) -> None:
    node = make()
    node.psutil.times = node.psutil.memory = node.psutil.networks = node.psutil.disks = None
    node.sample()
    assert set(node.sample()) == {
        *("cpu/load_1m", "cpu/count", "memory/swap_used_bytes"),
        *("disk/used_bytes", "disk/free_bytes", "disk/used_percent", "shm/used_bytes", "shm/used_percent"),
    }


def test_no_psutil_at_all_leaves_the_rest(make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    node = make(psutil=None)
    node.nvml.count = 1
    found = node.sample()
    assert (found["gpu/0/power_w"], "disk/free_bytes" in found, "cpu/count" in found) == (650.5, True, False)


def test_a_file_system_that_hangs_costs_one_wait(make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    away = threading.Event()
    monkeypatch.setattr(node_facts, "space_facts", lambda folder: away.wait() and space_facts(folder))
    node = make(wait_s=0.2)
    begin_s = time.monotonic()
    found = [node.sample() for _ in range(20)]
    assert time.monotonic() - begin_s < 5
    assert all("memory/used_bytes" in each and "disk/free_bytes" not in each for each in found)
    away.set()
    wait_for(lambda: "disk/free_bytes" in node.sample(), 20, "the file system is back")


def test_a_spool_that_nobody_has_made_yet_will_be_on_the_file_system_above_it(tmp_path: Path) -> None:
    facts = NodeFacts(str(tmp_path / "not" / "yet"), pynvml=FakeNvml(0))
    assert facts.sample()["disk/free_bytes"] > 0
    facts.close()


def test_without_a_folder_it_is_that_of_the_clients_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setenv("VERL_SHIPPER_SPOOL_DIR", str(tmp_path))
    monkeypatch.setattr(node_facts, "space_facts", asked.append)
    facts = NodeFacts(pynvml=FakeNvml(0))
    facts.sample()
    facts.close()
    assert asked == [str(tmp_path)]


def test_a_folder_that_is_not_there_has_no_space(tmp_path: Path) -> None:
    assert set(space_facts(str(tmp_path / "none"))) == {"shm/used_bytes", "shm/used_percent"}


# Containers

V2 = {
    "memory.max": "80\n",
    "memory.current": "50",
    "memory.stat": "anon 30\ninactive_file 10\n",
    "cpu.max": "150000 100000\n",
    "cpu.stat": "usage_usec 1000000\nuser_usec 1\n",
}
V1 = {
    "memory/memory.limit_in_bytes": "80\n",
    "memory/memory.usage_in_bytes": "50\n",
    "memory/memory.stat": "cache 1\ntotal_inactive_file 10\n",
    "cpu/cpu.cfs_quota_us": "150000\n",
    "cpu/cpu.cfs_period_us": "100000\n",
    "cpuacct/cpuacct.usage": "1000000000\n",
}
V2_UNLIMITED = V2 | {"memory.max": "max", "cpu.max": "max 100000"}
V1_UNLIMITED = V1 | {"memory/memory.limit_in_bytes": "9223372036854771712", "cpu/cpu.cfs_quota_us": "-1"}


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize(
    ("files", "usage", "later"),
    [(V2, "cpu.stat", "usage_usec 7000000"), (V1, "cpuacct/cpuacct.usage", "7000000000")],
    ids=["v2", "v1"],
)
def test_a_container_tells_what_it_may_use_beside_the_hosts_facts(
    make: Callable[..., Node], tmp_path: Path, files: dict[str, str], usage: str, later: str
) -> None:
    write(tmp_path, files)
    node = make()
    node.sample()
    write(tmp_path, {usage: later})
    found = node.sample(after_s=10.0)
    assert {name.partition("/")[2]: value for name, value in found.items() if name.startswith("container/")} == {
        "memory_used_bytes": 40,
        "memory_limit_bytes": 80,
        "memory_used_percent": 50,
        "cpu_limit_count": 1.5,
        "cpu_utilization_percent": pytest.approx(40),
    }
    assert found["memory/used_bytes"] == 30


@pytest.mark.parametrize("files", [V2_UNLIMITED, V1_UNLIMITED, {}, {"memory.max": "x", "cpu.max": "\xff"}])
def test_without_limits_there_is_no_container(make: Callable[..., Node], tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, files)
    node = make()
    node.sample()
    assert not [name for name in node.sample() if name.startswith("container/")]


# The manual


def test_the_manual_lists_every_fact_with_its_meaning() -> None:
    text = (Path(__file__).parents[3] / "docs" / "node-facts.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    listed = {row[0].strip("`"): row[2] for row in rows if len(row) == 3 and row[0].startswith("`")}
    assert listed == FACTS


# Cost


@pytest.mark.alone
def test_a_sample_without_gpus_costs_less_than_five_milliseconds(tmp_path: Path) -> None:
    node = NodeFacts(str(tmp_path), pynvml=FakeNvml(0))
    node.sample()
    begin_s = time.process_time()
    for _ in range(50):
        node.sample()
    cost_s = (time.process_time() - begin_s) / 50
    node.close()
    print(f"{1000 * cost_s:.2f} ms a sample")
    assert cost_s < 0.005
