"""
A checkpoint engine that sends the weights nowhere: for jobs whose rollouts have GPUs of their own (fully async).

`actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module` names this module, `…backend=forgetful` the
engine. Both ends go through the steps of verl's NCCL engine; the sender reads all its weights, the receiver gets none.
"""

from collections.abc import AsyncIterator, Iterable
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry


class ForgetfulCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    def __init__(self, bucket_size: int, *, is_master: bool = False) -> None: ...

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self) -> None: ...

    def finalize(self) -> None: ...

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> None:
        assert all(tensor.numel() for _, tensor in weights)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        nothing: list[tuple[str, Any]] = []
        for pair in nothing:
            yield pair


CheckpointEngineRegistry.register("forgetful")(ForgetfulCheckpointEngine)
