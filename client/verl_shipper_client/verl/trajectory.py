"""What one trajectory has told so far, so that nothing of it is written twice.

    turn 1   prompt_ids = P                    token_ids = A      written: P, A
    turn 2   prompt_ids = P A T (tool's)       token_ids = B      written: T, B, known_tokens = |P A|
    the end  response_ids = A T B                                 written: nothing, only how many

`known_tokens` of a span: so many of its tokens, prompt and response in one line, are those of the span before in the
same trace, in the order in which the spans ended. With that, every turn can be put together again. What is written
nowhere new says so by `response_of`: the id of the span that has the tokens.

Must not know: spool, verl's classes. Never raises for tokens that are no lists: they stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

from verl_shipper_client.span import Span

# Of the inputs of an agent loop, what tells which trajectory this is. The first name that has a value counts.
IDENTITY = {
    "uid": ("uid",),
    "sample_index": ("index",),
    "rollout_n": ("session_id",),
    "step": ("global_steps",),
    "data_source": ("data_source",),
}

Tokens: TypeAlias = "list[Any] | tuple[Any, ...]"
Line: TypeAlias = tuple[Tokens, Tokens]  # prompt and response, which are read as one line


@dataclass(slots=True)
class Trajectory:
    """One rollout of one sample. `root` is its span; None while nothing of it is wanted."""

    root: Span | None
    client: Any = None  # that made the root
    known: Line = ((), ())
    answer: bytes | None = None  # the span with the newest tokens of the model
    text: str | None = None  # the newest answer as text, where verl itself has decoded it
    has_log_probs: bool = True  # of every turn so far
    is_known: bool = False  # which one it is has been said, by the outermost loop
    messages: Any = None
    output: Any = None  # what the agent loop returned; its reward comes into it later

    def take_turn(self, span: Span, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Tokens of one call of the model: what is new of them stays, the rest becomes numbers."""
        prompt, response = inputs.get("prompt_ids"), outputs.get("token_ids")
        if not (_is_list(prompt) and _is_list(response)):
            return
        tokens = list(prompt), list(response)  # verl's loops go on with the same lists
        known = _shared(self.known, tokens)
        self.known = tokens
        self.text = None  # of an earlier answer
        self.has_log_probs = self.has_log_probs and bool(outputs.get("log_probs"))
        _keep_new(inputs, "prompt_ids", prompt, known)
        _keep_new(outputs, "token_ids", response, known - len(prompt))
        span.attributes |= {"prompt_tokens": len(prompt), "response_tokens": len(response)}
        if known:
            span.set_attribute("known_tokens", known)
        if known < len(prompt) + len(response) or self.answer is None:
            self.answer = span.span_id
        else:
            outputs.pop("log_probs", None)
            outputs["response_of"] = self.answer

    def take_end(self, span: Span, outputs: dict[str, Any]) -> None:
        """Tokens of the whole trajectory, most of which the turns have told already."""
        prompt, response = outputs.get("prompt_ids"), outputs.get("response_ids")
        if not (_is_list(prompt) and _is_list(response)):
            return
        known = _shared(self.known, (prompt, response))
        _keep_new(outputs, "prompt_ids", prompt, known)
        _keep_new(outputs, "response_ids", response, known - len(prompt))
        span.attributes |= {"prompt_tokens": len(prompt), "response_tokens": len(response)}
        if known:
            span.set_attribute("known_tokens", known)
        if known >= len(prompt) + len(response) and self.answer is not None:
            if self.root is None:
                outputs["response_of"] = self.answer  # else the root says so
            if self.has_log_probs:
                outputs.pop("response_logprobs", None)

    def result(self) -> dict[str, Any]:
        """Outputs of the root span."""
        outputs: dict[str, Any] = {}
        if self.text is not None:
            outputs["response_text"] = self.text
        elif self.answer is not None:
            outputs["response_of"] = self.answer
        return outputs


def _shared(left: Line, right: Line) -> int:
    """How many tokens two lines have in common. Most often all, or there is none: then nothing is copied."""
    if left == right:
        return len(right[0]) + len(right[1])
    return shared_prefix([*left[0], *left[1]], [*right[0], *right[1]]) if left[0] or left[1] else 0


def shared_prefix(left: list[Any], right: list[Any]) -> int:
    """How many elements two lists have in common at their beginning."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:  # by far the most common case, and one comparison in C
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def runs_of(mask: Any) -> Any:
    """A mask as pairs of value and length: [1, 1, 0] → [[1, 2], [0, 1]]; anything else as it is."""
    if not _is_list(mask):
        return mask
    if mask and mask[0] in (0, 1) and mask.count(mask[0]) == len(mask):  # one turn
        return [[mask[0], len(mask)]]
    if mask.count(0) + mask.count(1) != len(mask):
        return mask
    runs: list[list[Any]] = []
    start = 0
    while start < len(mask):
        value = mask[start]
        try:
            end = mask.index(1 - value, start)
        except ValueError:
            end = len(mask)
        runs.append([value, end - start])
        start = end
    return runs


def _keep_new(values: dict[str, Any], key: str, tokens: Any, known: int) -> None:
    if known >= len(tokens):
        values.pop(key, None)
    elif known > 0:
        values[key] = tokens[known:]


def _is_list(value: Any) -> TypeGuard[Tokens]:
    return type(value) in (list, tuple)
