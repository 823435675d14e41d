"""Rollouts as one of verl's agent-loop workers makes them, without model and without Ray: what is traced, and a clock.

    rollout_trace_attr ── SingleTurnAgentLoop.run ── LLMServerClient.generate ── tokens that were drawn beforehand
                       └─ reward into the loop's output

The shape is that of verl 0.9.1 (agent_loop.py `_run_agent_loop`, single_turn_agent_loop.py, llm_server.py): pydantic
models, a dozen arguments of which most are None, all trajectories of a worker in flight at once. The server answers
without delay: a burst. Every number is random and no trajectory is like another, so nothing is small by accident.

Must not know: who traces. On failure: the exception of whoever does.
"""

# ruff: noqa: ARG002 - arguments are there to be seen by whoever traces
from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

VOCABULARY = 150_000
PROMPT_TOKENS = 230
PROMPT_WORDS = 140  # about 1,000 characters, as English prose of so many tokens has
STEP = 7
WORDS = [first + second for first in ("num", "tri", "cal", "sum", "pro") for second in ("ber", "angle", "c", "duct")]

Attr = Callable[..., AbstractContextManager[Any]]
Op = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory before it begins: question, and what the model will say."""

    index: int
    uid: str
    messages: list[dict[str, str]]
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    reward: float


class TokenOutput(BaseModel):
    """What a server answers."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = {}


class AgentLoopMetrics(BaseModel):
    """Seconds."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """What an agent loop returns."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = {}
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_output: list[dict[str, Any]] | None = None


class LLMServerClient:
    """Answers what the sample says."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        await asyncio.sleep(0)
        sample = self._sample
        fields = {"global_steps": STEP, "min_global_steps": STEP, "max_global_steps": STEP}
        return TokenOutput.model_construct(
            token_ids=sample.token_ids, log_probs=sample.log_probs, stop_reason="completed", extra_fields=fields
        )


class SingleTurnAgentLoop:
    """A question, an answer."""

    def __init__(self, sample: Sample, server: LLMServerClient) -> None:
        self._sample = sample
        self._server = server

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        begun_s = time.perf_counter()
        output = await self._server.generate(
            request_id=uuid4().hex,
            prompt_ids=self._sample.prompt_ids,
            sampling_params=sampling_params,
            image_data=None,
            audio_data=None,
            video_data=None,
            mm_processor_output=None,
            mm_processor_kwargs={},
            priority=priority,
        )
        output.extra_fields.update({"turn_scores": [], "tool_rewards": []})
        return AgentLoopOutput(
            prompt_ids=self._sample.prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            multi_modal_data={},
            mm_processor_kwargs={},
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=time.perf_counter() - begun_s),
            extra_fields=output.extra_fields,
        )


def samples(seed: str, count: int, response_tokens: int) -> list[Sample]:
    """Trajectories of one worker, all of them different; the same ones for the same seed."""
    drawn = random.Random(seed)
    ids = range(VOCABULARY)
    return [
        Sample(
            index=index,
            uid=f"{drawn.getrandbits(128):032x}",
            messages=[
                {"role": "system", "content": "Reason step by step. Put the final answer behind ####."},
                {"role": "user", "content": " ".join(drawn.choices(WORDS, k=PROMPT_WORDS))},
            ],
            prompt_ids=drawn.choices(ids, k=PROMPT_TOKENS),
            token_ids=drawn.choices(ids, k=response_tokens),
            log_probs=[-drawn.expovariate(2.0) for _ in range(response_tokens)],
            reward=drawn.random(),
        )
        for index in range(count)
    ]


class Burst:
    """Trajectories of one worker, traced as `attr` and `op` say; `nothing` traced by default."""

    def __init__(self, attr: Attr | None = None, op: Op | None = None) -> None:
        self._attr = attr
        self._loop: type[SingleTurnAgentLoop] = SingleTurnAgentLoop
        self._server: type[LLMServerClient] = LLMServerClient
        if op is not None:
            self._loop = type("SingleTurnAgentLoop", (SingleTurnAgentLoop,), {"run": op(SingleTurnAgentLoop.run)})
            self._server = type("LLMServerClient", (LLMServerClient,), {"generate": op(LLMServerClient.generate)})

    def run(self, given: list[Sample]) -> list[int]:
        """ns that the event loop spent inside each trajectory."""
        return asyncio.run(self._all(given))

    async def _all(self, given: list[Sample]) -> list[int]:
        watches = [_Stopwatch(self._trajectory(sample)) for sample in given]
        # The outputs stay until the last is there, as verl's do until they are a batch.
        outputs = await asyncio.gather(*(asyncio.create_task(_awaited(watch)) for watch in watches))
        assert len(outputs) == len(given)
        return [watch.spent_ns for watch in watches]

    async def _trajectory(self, sample: Sample) -> AgentLoopOutput:
        if self._attr is None:
            return await self._rollout(sample)
        with self._attr(step=STEP, sample_index=sample.index, rollout_n=0, validate=False, name="agent_loop"):
            return await self._rollout(sample)

    async def _rollout(self, sample: Sample) -> AgentLoopOutput:
        loop = self._loop(sample, self._server(sample))
        output = await loop.run(
            {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True},
            raw_prompt=sample.messages,
            index=sample.index,
            uid=sample.uid,
            data_source="openai/gsm8k",
            reward_model={"ground_truth": str(sample.index), "style": "rule"},
            extra_info={"index": sample.index, "split": "train"},
            tools_kwargs={},
        )
        output.reward_score = sample.reward
        output.extra_fields["reward_extra_info"] = {"acc": sample.reward}
        return output


class _Stopwatch:
    """Awaits a coroutine and adds up the time of its own steps, not of those in between."""

    def __init__(self, coroutine: Coroutine[Any, Any, AgentLoopOutput]) -> None:
        self._coroutine = coroutine
        self.spent_ns = 0

    def __await__(self) -> Generator[Any, Any, AgentLoopOutput]:
        clock = time.perf_counter_ns
        while True:
            begun_ns = clock()
            try:
                waited_for = self._coroutine.send(None)
            except StopIteration as end:
                self.spent_ns += clock() - begun_ns
                output: AgentLoopOutput = end.value
                return output
            self.spent_ns += clock() - begun_ns
            yield waited_for


async def _awaited(watch: Awaitable[AgentLoopOutput]) -> AgentLoopOutput:
    return await watch
