"""
The inference server of `fake_rollout`: its model is a script that knows the sums which the prompts ask for.

The script: a prompt asks "What is 17*24?". If it offers a calculator and no result of it is there yet, the answer is a
tool call in hermes' format; else the answer in words. Sampled (temperature above 0) every second answer to one prompt
is off by one, so that a group of rollouts has an advantage; greedy ones are right.

Must not load verl: a process that answers in milliseconds need not take ten seconds to start.
"""

import json
import os
import re
from collections import Counter
from typing import Any

from tokenizers import Tokenizer

END = "<|im_end|>"
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


class Answer:
    """Becomes verl's TokenOutput in the process that asked."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _token_output, (self._fields,)


def _token_output(fields: dict[str, Any]) -> Any:
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput(**fields)


class ScriptedServer:
    """The actor. One `generate` is one request of an agent loop; the rest is what a vLLM server is told to do."""

    def __init__(self, model_path: str, max_tokens: int) -> None:
        self._tokenizer = Tokenizer.from_file(os.path.join(model_path, "tokenizer.json"))
        self._max_tokens = max_tokens
        self._script = Script()
        self._global_steps: int | None = None

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **inputs: Any
    ) -> Answer:
        del request_id, inputs
        prompt = self._tokenizer.decode(prompt_ids, skip_special_tokens=False)
        text = self._script.answer(prompt, sampled=sampling_params.get("temperature", 1.0) > 0)
        token_ids = self._tokenizer.encode(text + END).ids[: self._max_tokens]
        return Answer(
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
