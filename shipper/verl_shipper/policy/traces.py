"""Which rollout traces are kept, and how much of each.

    rate                            share of the traces; a trace's own id decides, so that all its spans agree
    max_samples_per_step_per_worker of one stream (a worker) and one step, so many different samples, with all their
                                    spans; a sample is the attribute `sample_index`, or else the trace. Without a step:
                                    always
    include_prompt: false           prompts inside inputs and outputs are left out, visibly
    token2text                      texts take the place of token ids (answers.py)
    max_length                      longer texts are cut, with a mark that says how much is gone

Must not know: trackers, tokenizers. Nothing here fails, whatever a span holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from verl_shipper.policy.answers import Answers
from verl_shipper.policy.sampling import TraceSampling
from verl_shipper.values import DEPTH_MAX, to_json

STEPS_MAX = 32  # steps whose samples are remembered; one that comes back later begins anew
PROMPT_KEYS = frozenset(
    {"prompt", "prompts", "prompt_ids", "prompt_text", "prompt_token_ids", "raw_prompt", "raw_prompt_ids"}
    | {"messages", "input_ids", "input_text"}
)
LEFT_OUT = "[prompt left out]"
_DIGEST_BYTES = 8


class Traces:
    """The choice among the spans of one stream."""

    def __init__(self, sampling: TraceSampling) -> None:
        self._sampling = sampling
        self._samples: dict[int, set[bytes]] = {}  # by step, in the order the steps came

    def wants(self, step: int | None, body: Mapping[Any, Any]) -> bool:
        """Whether a span is kept. Asked once per span, in the order of the stream."""
        sampling = self._sampling
        if not sampling.enabled or not _is_drawn(body.get("trace_id"), sampling.rate):
            return False
        limit = sampling.max_samples_per_step_per_worker
        if limit is None or step is None:
            return True
        samples = self._samples.get(step)
        if samples is None:
            samples = self._samples[step] = set()
            if len(self._samples) > STEPS_MAX:
                del self._samples[next(iter(self._samples))]
        sample = _sample(body)
        if sample not in samples and len(samples) >= limit:
            return False
        samples.add(sample)
        return True

    def state(self) -> list[Any]:
        """What a later process needs to go on."""
        return [[step, sorted(samples)] for step, samples in self._samples.items()]

    def restore(self, state: list[Any]) -> None:
        self._samples = {step: set(samples) for step, samples in state}


def trimmed(body: dict[Any, Any], sampling: TraceSampling, answers: Answers | None = None) -> dict[Any, Any]:
    """A span's body with as much in it as is wanted; the same object when that is all."""
    if sampling.include_prompt and sampling.max_length is None and answers is None:
        return body
    changed = dict(body)
    if answers is not None:
        changed["inputs"], changed["outputs"] = answers.told(body)
    if not sampling.include_prompt:
        inputs = changed.get("inputs")
        # Arguments have names; what has none is the prompt itself: text, messages or ids.
        is_named = inputs is None or isinstance(inputs, Mapping)
        changed["inputs"] = _without_prompts(inputs, 0) if is_named else LEFT_OUT
        changed["outputs"] = _without_prompts(changed.get("outputs"), 0)
    if sampling.max_length is not None:
        for key in ("inputs", "outputs", "attributes"):
            changed[key] = cut(changed.get(key), sampling.max_length)
    return changed


def cut(value: Any, chars_max: int, depth: int = 0) -> Any:
    """`value` with every text in it cut to `chars_max` characters and a mark."""
    if isinstance(value, str):
        return value if len(value) <= chars_max else f"{value[:chars_max]}… [{len(value) - chars_max} characters cut]"
    if depth >= DEPTH_MAX:
        return value
    if isinstance(value, Mapping):
        return {key: cut(element, chars_max, depth + 1) for key, element in value.items()}
    return [cut(element, chars_max, depth + 1) for element in value] if isinstance(value, list) else value


def _without_prompts(value: Any, depth: int) -> Any:
    if depth >= DEPTH_MAX:
        return value
    if isinstance(value, Mapping):
        return {
            key: LEFT_OUT if key in PROMPT_KEYS else _without_prompts(element, depth + 1)
            for key, element in value.items()
        }
    return [_without_prompts(element, depth + 1) for element in value] if isinstance(value, list) else value


def _is_drawn(trace_id: Any, rate: float) -> bool:
    return rate >= 1.0 or int.from_bytes(_digest(trace_id), "big") < rate * (1 << 8 * _DIGEST_BYTES)


def _sample(body: Mapping[Any, Any]) -> bytes:
    attributes = body.get("attributes")
    index = attributes.get("sample_index") if isinstance(attributes, Mapping) else None
    return _digest(body.get("trace_id") if index is None else ["sample", index])


def _digest(value: Any) -> bytes:
    content = value if isinstance(value, bytes) else repr(to_json(value)).encode()
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()
