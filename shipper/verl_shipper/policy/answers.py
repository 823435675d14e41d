"""Texts of token ids, and texts that one span has for another.

    outputs {token_ids: …}             →  {text: "The answer is 4."}          where the caller can decode
    outputs {response_of: [span id]}   →  {response_text: "The answer …"}     when these spans came by not long ago

A trajectory's tokens are in the spool once, in the spans of its turns; its root says only which of them has the answer.
Spans of a trajectory come in one stream, children first, so remembering the newest of them is enough. What is not
remembered any more stays a span id.

Must not know: tokenizers (a function that decodes is passed in), trackers. Nothing here fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from verl_shipper.values import DEPTH_MAX
from verl_shipper_spool.arrays import Ints

Decode: TypeAlias = Callable[[list[int]], "str | None"]

REFERENCE, RESOLVED = "response_of", "response_text"
TOLD = {"token_ids": "text", "response_ids": "response_text"}  # where a span has its response, and as text
REMEMBERED_MAX = 4096  # answers of one stream: trajectories that a rollout worker has under way at once
REMEMBERED_CHARS_MAX = 32 * 1024 * 1024


class Answers:
    """Decodes, and remembers what it decoded, for one stream."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._found: OrderedDict[bytes, str | Ints] = OrderedDict()
        self._chars = 0

    def remember(self, body: Mapping[Any, Any]) -> None:
        """A span that came by earlier: an answer may be asked for that was delivered before this process began."""
        outputs = body.get("outputs")
        if isinstance(outputs, Mapping):
            for ids in map(outputs.get, TOLD):
                if isinstance(ids, Ints):
                    self._keep(body.get("span_id"), ids)

    def told(self, body: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Inputs and outputs of a span, in text as far as it goes."""
        outputs = self._decoded(body.get("outputs"), 0)
        if isinstance(outputs, dict):
            for key in TOLD.values():
                if isinstance(outputs.get(key), str):
                    self._keep(body.get("span_id"), outputs[key])
            answer = self._answer(outputs.get(REFERENCE))
            if answer is not None:
                outputs = {**{key: value for key, value in outputs.items() if key != REFERENCE}, RESOLVED: answer}
        return self._decoded(body.get("inputs"), 0), outputs

    def _answer(self, span_ids: Any) -> str | None:
        """The texts of these spans, one after another; None when one of them is missing."""
        texts = [self._text(span_id) for span_id in span_ids] if isinstance(span_ids, list) else []
        return "".join(text for text in texts if text is not None) if texts and None not in texts else None

    def _text(self, span_id: Any) -> str | None:
        found = self._found.get(span_id) if isinstance(span_id, bytes) else None
        return self._decode(found.tolist()) if isinstance(found, Ints) else found

    def _keep(self, span_id: Any, answer: str | Ints) -> None:
        if not isinstance(span_id, bytes):
            return
        self._found[span_id] = answer
        self._chars += len(answer)
        while len(self._found) > REMEMBERED_MAX or self._chars > REMEMBERED_CHARS_MAX:
            _, gone = self._found.popitem(last=False)
            self._chars -= len(gone)

    def _decoded(self, value: Any, depth: int) -> Any:
        """Texts for ids, in their place. Ids that have their text beside them already are only taken out."""
        if depth >= DEPTH_MAX:
            return value
        if isinstance(value, list):
            return [self._decoded(element, depth + 1) for element in value]
        if not isinstance(value, Mapping):
            return value
        result: dict[Any, Any] = {}
        for key, element in value.items():
            name = text_key(key)
            ids = ids_of(element) if name is not None else None
            if name is None or ids is None:
                result[key] = self._decoded(element, depth + 1)
            elif name not in value:
                text = self._decode(ids)
                result[key if text is None else name] = element if text is None else text
        return result


def text_key(key: Any) -> str | None:
    """Name of the text that stands for ids of this name; None for a key that names no ids."""
    if key in ("ids", "token_ids"):
        return "text"
    return f"{key[:-4]}_text" if isinstance(key, str) and key.endswith("_ids") and len(key) > 4 else None


def ids_of(value: Any) -> list[int] | None:
    """The token ids in a value; None when it holds something else, or nothing."""
    if isinstance(value, Ints):
        return value.tolist() or None
    return value if isinstance(value, list) and value and all(type(element) is int for element in value) else None
