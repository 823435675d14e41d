"""
A rollout engine without an engine, in the two places where verl meets one.

`ScriptedReplica` starts one `fake_server.ScriptedServer` actor for each replica, as verl's vLLM replica does;
`ScriptedAdapter` is its other end inside the training workers, which hands it the weights. The real agent loops see
what vLLM would answer: token ids, log probabilities, the step whose weights were in use.
"""

import os
from typing import Any

import ray
from fake_server import ScriptedServer
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator


class ScriptedReplica(RolloutReplica):  # type: ignore[misc]
    async def launch_servers(self) -> None:
        name = server_name(self.replica_rank)
        server = ray.remote(ScriptedServer).options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
        self._server_handle = server.remote(self.model_config.path, self.config.response_length)
        self._server_address = name
        self.servers = [self._server_handle]


class ScriptedAdapter(BaseRollout):  # type: ignore[misc]
    """Inside the workers. The weights are read, so that gathering them is part of the job, and forgotten."""

    is_leader_rank = True  # tensor parallelism of 1: each rank has a replica

    def __init__(self, *places: Any, replica_rank: int = -1, **options: Any) -> None:
        super().__init__(*places, **options)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank < 0 else replica_rank

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **options: Any) -> None:
        del options
        async for _, tensor in ensure_async_iterator(weights):
            assert tensor.numel()
        if global_steps is not None:
            await ray.get_actor(server_name(self.replica_rank)).set_global_steps.remote(global_steps)


def server_name(replica_rank: int) -> str:
    return f"scripted_server_{replica_rank}"
