"""An agent as verl has them, without its machinery, and a trajectory driven as verl's worker drives one.

Must not know: what a test expects.
"""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from unit.client.spooled import records
from unit.client.verl.stand_in import trace_module
from verl_shipper_client.verl import rollout
from verl_shipper_spool.record import RecordKind


@dataclass
class Turn:
    """What a server answers."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None


@dataclass
class Output:
    """What an agent loop returns."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    reward_score: float | None = None
    num_turns: int = 2
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class Call:
    name: str
    arguments: str


class Batch:
    """Like a tensor with the step of every sample of a batch."""

    def tolist(self) -> list[int]:
        return [5, 5]


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = trace_module()
    rollout.patch_trace(module)
    monkeypatch.setitem(sys.modules, "verl.utils.rollout_trace", module)
    module.RolloutTraceConfig.init("p", "e", "shipper")
    return module


def agent(module: types.ModuleType) -> Any:
    """An agent that asks a calculator and then answers: what ToolAgentLoop does, without its machinery."""
    op: Callable[[Any], Any] = module.rollout_trace_op

    class Server:
        answers = ([100, 101], [102])

        @op
        async def generate(self, request_id: str, *, prompt_ids: list[int], image_data: Any = None) -> Turn:
            await asyncio.sleep(0)
            turn = len(prompt_ids) > 3
            return Turn(list(self.answers[turn]), [-0.5] * len(self.answers[turn]))

    class Parser:
        @op
        async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[Call]]:
            if 102 in responses_ids:
                return "It is 4.", []
            return "", [Call("calculator", '{"expression": "2+2"}')]

    class Loop:
        @op
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Output:
            server, parser, tokens = Server(), Parser(), [1, 2, 3]
            turn = await server.generate("r1", prompt_ids=tokens)
            _, calls = await parser.extract_tool_calls(turn.token_ids, [])
            await self._call_tool(calls[0], {}, None)
            turn = await server.generate("r1", prompt_ids=[*tokens, 100, 101, 50])
            await parser.extract_tool_calls(turn.token_ids, [])
            return Output(tokens, [100, 101, 50, 102], [1, 1, 0, 1], [-0.5, -0.5, 0.0, -0.5], num_turns=4)

        async def _call_tool(self, tool_call: Call, *_: Any) -> tuple[str, float, dict[str, Any]]:
            if tool_call.arguments == "broken":
                raise ValueError("no such expression")
            return "4", 0.25, {}

    tools = types.ModuleType("verl.experimental.agent_loop.tool_agent_loop")
    tools.ToolAgentLoop = Loop  # type: ignore[attr-defined]
    rollout.patch_tools(tools)
    return Loop()


def spans(spool: Path) -> list[dict[str, Any]]:
    found = records(spool) if spool.exists() else []
    return [record.body for record in found if record.kind is RecordKind.SPAN]


def tell(module: types.ModuleType, loop: Any = None, **attributes: Any) -> Output:
    """One trajectory as verl's worker drives it: the reward comes when the loop has returned."""

    async def drive() -> Output:
        given = {"step": 3, "sample_index": 9, "rollout_n": 1, "name": "agent_loop", **attributes}
        with module.rollout_trace_attr(**given):
            question = [{"role": "user", "content": "2+2?"}]
            output = await (loop or agent(module)).run({"temperature": 1.0}, raw_prompt=question, uid="u7", index=9)
            output.reward_score = 1.0
            output.extra_fields["reward_extra_info"] = {"acc": 1.0}
            return output  # type: ignore[no-any-return]

    return asyncio.run(drive())
