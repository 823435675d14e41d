"""Uses an older verl as its trainers do: Tracking, validation generations and, where it has them, rollout traces.

    python old_verl.py          with that version first on PYTHONPATH

Prints the version, and which of the trackers' packages were imported.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any

import verl
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

CONFIG = {"trainer": {"project_name": "sums", "experiment_name": "old", "logger": ["console", "wandb", "mlflow"]}}


@dataclass
class Answer:
    """What a server gives."""

    token_ids: list[int]
    log_probs: list[float] = field(default_factory=list)


@dataclass
class Output:
    """What an agent loop gives."""

    prompt_ids: list[int]
    response_ids: list[int]
    reward_score: float | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


async def roll_out() -> None:
    from verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op

    class Server:
        @rollout_trace_op  # type: ignore[untyped-decorator]
        async def generate(self, request_id: str, *, prompt_ids: list[int]) -> Answer:
            return Answer([4, 5, 6], [-0.5] * 3)

    class Loop:
        @rollout_trace_op  # type: ignore[untyped-decorator]
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Output:
            answer = await Server().generate("r", prompt_ids=[1, 2, 3])
            return Output([1, 2, 3], answer.token_ids)

    RolloutTraceConfig.init("sums", "old", "mlflow")
    with rollout_trace_attr(step=1, sample_index=7, rollout_n=0, name="agent_loop"):
        output = await Loop().run({}, raw_prompt=[{"role": "user", "content": "2+2?"}], uid="u")
        output.reward_score = 1.0


if __name__ == "__main__":
    tracking = Tracking("sums", "old", ["console", "wandb", "mlflow"], CONFIG)
    for step in (1, 2):
        tracking.log({"actor/loss": 0.5 / step}, step=step)
    ValidationGenerationsLogger("sums", "old").log(["console", "wandb", "mlflow"], [("2+2?", "4", 1.0)], 2)
    asyncio.run(roll_out())
    del tracking
    print("version", verl.__version__, "imported", [name for name in ("wandb", "mlflow") if name in sys.modules])
