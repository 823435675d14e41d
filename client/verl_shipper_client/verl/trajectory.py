"""What one trajectory has told so far, so that nothing of it is written twice.

    turn 1   prompt_ids = P                    token_ids = A      written: P, A
    turn 2   prompt_ids = P A T (tool's)       token_ids = B      written: T, B, known_tokens = |P A|
    the end  response_ids = A T B                                 written: nothing, only how many

`known_tokens` of a span: so many of its tokens, prompt and response in one line, are those of the span before in the
same trace, in the order in which the spans ended. With that, every turn can be put together again. A response is
written whole or, when spans before have all of it, not at all; then `response_of` names these spans in order.

Must not know: spool, verl's classes. Never raises for tokens that are no lists: they stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from verl_shipper_client.span import Span

# Attributes that tell which trajectory this is, and the inputs of an agent loop that they come from.
IDENTITY = {
    "uid": "uid",
    "sample_index": "index",
    "rollout_n": "session_id",
    "step": "global_steps",
    "data_source": "data_source",
}

Tokens: TypeAlias = "list[Any] | tuple[Any, ...]"
Line: TypeAlias = tuple[Tokens, Tokens]  # prompt and response, which are read as one line


@dataclass(frozen=True, slots=True)
class Turn:
    """A response on the line of tokens: from `start` to `end`, written in the spans `refs`, one after another."""

    start: int
    end: int
    refs: tuple[bytes, ...]
    has_log_probs: bool


@dataclass(slots=True)
class Trajectory:
    """One rollout of one sample. `root` is its span; None while nothing of it is wanted."""

    root: Span | None
    client: Any = None  # that made the root
    known: Line = ((), ())
    turns: tuple[Turn, ...] = ()  # on the line that is known
    answer: tuple[bytes, ...] = ()  # the spans with the newest answer of the model
    text: str | None = None  # the same as text, where verl itself has decoded it
    is_known: bool = False  # which one it is has been said, by the outermost loop
    messages: Any = None
    output: Any = None  # what the outermost loop returned; its reward comes into it later

    def take_turn(self, span: Span, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Tokens of one call of the model: what is new of them stays, the rest becomes numbers."""
        prompt, response = listed(inputs.get("prompt_ids")), listed(outputs.get("token_ids", ()))
        if prompt is None or response is None:
            return
        start, end = len(prompt), len(prompt) + len(response)
        shared = _shared(self.known, (prompt, response))
        there = [turn for turn in self.turns if turn.end <= shared]
        told = _tiles(there, start, end) if shared == end and response else ()
        _keep_new(inputs, "prompt_ids", prompt, min(shared, start))
        if told:
            outputs.pop("token_ids", None)
            outputs["response_of"] = [ref for turn in told for ref in turn.refs]
            if all(turn.has_log_probs for turn in told):
                outputs.pop("log_probs", None)
            self.turns = tuple(there)
            self.answer, self.text = tuple(outputs["response_of"]), None
        elif response:
            outputs["token_ids"] = response
            turn = Turn(start, end, (span.span_id,), _holds(outputs.get("log_probs")))
            self.turns = (*(before for before in there if before.end <= start), turn)
            self.answer, self.text = turn.refs, None
        self._note(span, len(prompt), len(response), end if told else min(shared, start))
        self.known = prompt, response

    def take_end(self, span: Span, outputs: dict[str, Any]) -> None:
        """Tokens of the whole trajectory, most of which the turns have told already."""
        prompt, response = listed(outputs.get("prompt_ids")), listed(outputs.get("response_ids", ()))
        if prompt is None or response is None:
            return
        start, end = len(prompt), len(prompt) + len(response)
        shared = _shared(self.known, (prompt, response))
        is_told = shared == end
        _keep_new(outputs, "prompt_ids", prompt, min(shared, start))
        self._note(span, len(prompt), len(response), end if is_told else min(shared, start))
        within = [turn for turn in self.turns if start <= turn.start < end]
        if not is_told:
            outputs["response_ids"] = response
            self.answer, self.text = (span.span_id,), None
        else:
            outputs.pop("response_ids", None)
            if within and all(turn.has_log_probs for turn in within):
                outputs.pop("response_logprobs", None)
            if within and within[-1].refs != self.answer:  # cut back to an earlier turn
                self.answer, self.text = within[-1].refs, None

    def result(self) -> dict[str, Any]:
        """Outputs of the root span."""
        if self.text is not None:
            return {"response_text": self.text}
        return {"response_of": list(self.answer)} if self.answer else {}

    @staticmethod
    def _note(span: Span, prompt: int, response: int, known: int) -> None:
        span.attributes |= {"prompt_tokens": prompt, "response_tokens": response}
        if known:
            span.set_attribute("known_tokens", known)


def _tiles(turns: list[Turn], start: int, end: int) -> tuple[Turn, ...]:
    """The turns that make up exactly this piece of the line; none when they do not."""
    inside = tuple(turn for turn in turns if start <= turn.start and turn.end <= end)
    at = start
    for turn in inside:
        if turn.start != at:
            return ()
        at = turn.end
    return inside if at == end else ()


def _holds(values: Any) -> bool:
    """Whether there is at least one number; a tensor does not say so by its truth."""
    try:
        return values is not None and len(values) > 0
    except TypeError:
        return False


def listed(value: Any) -> list[Any] | None:
    """Ids as a list of our own, whatever verl has them in; None for what are none."""
    if type(value) is list or type(value) is tuple:
        return list(value)  # verl's loops go on with the same list
    flat = value.tolist() if hasattr(value, "tolist") else None
    return flat if type(flat) is list else None


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
    else:
        values[key] = tokens[known:]


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple)
