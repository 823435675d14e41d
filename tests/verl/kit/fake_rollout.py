"""
An inference server whose model is a script: it knows the sums that the prompts ask for.

`ScriptedReplica` starts one `ScriptedServer` actor for each replica, as verl's vLLM replica does; `ScriptedAdapter` is its other
end inside the training workers, which hands it the weights. What the real agent loops see is what vLLM would answer: token ids,
log probabilities, the step whose weights were in use.

The script: a prompt asks "What is 17*24?". If it offers a calculator and no result of it is there yet, the answer is a tool call
in hermes' format; else the answer in words. Sampled (temperature above 0) every second answer to one prompt is off by one, so
that a group of rollouts has an advantage; greedy ones are right.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import ray
from transformers import AutoTokenizer
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

_QUESTION = re.compile(r"What is (\d+)\*(\d+)\?")
_RESULT = re.compile(r"<tool_response>\s*(-?\d+)\s*</tool_response>")


class Script:
    """What the model says to a prompt."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()

    def answer(self, prompt: str, *, sampled: bool) -> str:
        sums = _QUESTION.findall(prompt)
        if not sums:
            return "I have no idea."
        left, right = sums[-1]
        results = _RESULT.findall(prompt)
        if '"calculator"' in prompt and not results:
            call = {"name": "calculator", "arguments": {"expression": f"{left}*{right}"}}
            return f"I had better compute that.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        answer = int(results[-1]) if results else int(left) * int(right)
        if sampled:
            self._asked[prompt] += 1
            answer += self._asked[prompt] % 2
        return f"The answer is {answer}."


class ScriptedServer:
    """The actor that generates. One `generate` is one request of an agent loop."""

    def __init__(self, tokenizer_path: str, max_tokens: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        self._max_tokens = max_tokens
        self._script = Script()
        self._global_steps: int | None = None

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **inputs: Any
    ) -> TokenOutput:
        del request_id, inputs
        prompt = self._tokenizer.decode(prompt_ids)
        text = self._script.answer(prompt, sampled=sampling_params.get("temperature", 1.0) > 0)
        token_ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        token_ids = token_ids[: self._max_tokens]
        return TokenOutput(
            token_ids=token_ids,
            log_probs=[-0.25] * len(token_ids) if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": self._global_steps, "num_cached_tokens": 0},
        )

    async def set_global_steps(self, global_steps: int) -> None:
        self._global_steps = global_steps

    async def wake_up(self, tags: list[str] | None = None) -> None: ...

    async def sleep(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def abort_all_requests(self, **options: Any) -> None: ...

    async def resume_generation(self) -> None: ...


class ScriptedReplica(RolloutReplica):  # type: ignore[misc]
    async def launch_servers(self) -> None:
        name = server_name(self.replica_rank)
        server = ray.remote(ScriptedServer).options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
        self._server_handle = server.remote(self.model_config.path, self.config.response_length)
        self._server_address = name
        self.servers = [self._server_handle]


class ScriptedAdapter(BaseRollout):  # type: ignore[misc]
    """Inside the training worker. The weights are read, so that gathering them is part of the job, and forgotten."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None, **options: Any
    ) -> None:
        del options
        assert all(tensor.numel() for _, tensor in weights)
        if global_steps is not None:
            await ray.get_actor(server_name(0)).set_global_steps.remote(global_steps)


def server_name(replica_rank: int) -> str:
    return f"scripted_server_{replica_rank}"
