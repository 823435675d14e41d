"""
What a verl job needs in place of a GPU: VERL_USE_EXTERNAL_MODULES names it, the command line stays an ordinary one.

Everything hangs on verl's own points of extension: a platform (the CPU), the registry of rollout replicas, the table of
rollout engines. "vllm" is answered by `fake_rollout`, whose model is a script; verl's own FSDP engine trains a model
of one layer with gloo. Two things are patched: torch refuses "cpu:gloo,cpu:gloo", and torch.cpu knows of no memory.

Must not load verl's tracking of rollouts: whoever patches it has to find it unbound, as in a job without this module.
"""

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_base import PlatformBase


class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """A node whose accelerators are pretended: Ray counts "GPU"s (`ray_init.num_gpus`), torch works on the CPU."""

    device_name = "cpu"
    vendor_name = "nobody"
    device_module: ModuleType = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # verl only moves tensors to it

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


def _give_the_cpu_a_memory() -> None:
    answers: dict[str, Any] = {
        "empty_cache": None,
        "ipc_collect": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "manual_seed": None,
        "manual_seed_all": None,
    }
    for name, answer in answers.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, functools.partial(lambda answer, *_: answer, answer))


def _name_gloo_once() -> None:
    init = torch.distributed.init_process_group

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "cpu:gloo,cpu:gloo":
            kwargs["backend"] = "cpu:gloo"
        return init(*args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def _answer_for_vllm() -> None:
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("vllm", lambda: importlib.import_module("fake_rollout").ScriptedReplica)
    base._ROLLOUT_REGISTRY["vllm", "async"] = "fake_rollout.ScriptedAdapter"


# transformers loads scikit-learn where it finds it (mlflow brings it): two seconds in each of ten processes.
sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]
# verl's FSDP engines are registered for "cuda" and "npu"; they are at home on the CPU, too.
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
set_platform(CpuPlatform())
_give_the_cpu_a_memory()
_name_gloo_once()
_answer_for_vllm()
