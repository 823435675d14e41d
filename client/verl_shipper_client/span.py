"""A span: one timed piece of a rollout, and the context manager that measures it.

Ids are frozen at capture, so that a tracker can refuse doubles. Lists of token ids and of log-probabilities among its
inputs and outputs (ID_KEYS and NUMBER_KEYS) are packed: 4 bytes an element. The current span travels in a context
variable: tasks of one event loop do not see each other's. Must not know: spool, sockets.
"""

from __future__ import annotations

import contextvars
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from verl_shipper_client import identity
from verl_shipper_client.values import STEP_MAX, error_text, is_a
from verl_shipper_spool.arrays import Floats, Ints, packed

ID_KEYS, NUMBER_KEYS = ("ids",), ("logprobs", "log_probs")  # alone, or behind a "_"
_ARRAY_ENDS = (*ID_KEYS, *NUMBER_KEYS)
ARRAY_LEN_MIN = 4  # a shorter list is no smaller as an array
TRACE_ID_BYTES = 16
SPAN_ID_BYTES = 8

_current: contextvars.ContextVar[Span | None] = contextvars.ContextVar("verl_shipper_span", default=None)


@dataclass(frozen=True, slots=True)
class SpanValues:
    """All that is known of an ended span. Times in ns since the epoch."""

    name: str
    start_ns: int
    end_ns: int
    trace_id: bytes | None = None
    span_id: bytes | None = None
    parent_id: bytes | None = None
    inputs: Any = None
    outputs: Any = None
    status: str = "ok"
    attributes: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The record's body; ids of a wrong length are replaced by fresh ones rather than refused."""
        return {
            "trace_id": _id(self.trace_id, TRACE_ID_BYTES),
            "span_id": _id(self.span_id, SPAN_ID_BYTES),
            "parent_id": self.parent_id if _fits(self.parent_id, SPAN_ID_BYTES) else None,
            "name": identity.name(self.name) or "span",
            "start_ns": _ns(self.start_ns),
            "end_ns": _ns(self.end_ns),
            "inputs": with_arrays(self.inputs),
            "outputs": with_arrays(self.outputs),
            "status": "error" if self.status == "error" else "ok",
            "attributes": self.attributes,
        }


class Span:
    """Context manager made by `Client.span`; records itself when it ends, as an error when an exception passes."""

    def __init__(
        self,
        record: Callable[[SpanValues], None],
        name: str,
        trace_id: bytes | None,
        parent: Span | bytes | None,
        inputs: Any,
        attributes: Mapping[str, Any] | None,
    ) -> None:
        above: Any = parent if is_a(parent, Span) else _current.get() if parent is None else None
        parent_id: Any = above.span_id if above else parent
        self.name = name
        # An id of a wrong length is replaced here, once, so that the spans inside go to the same trace.
        self.trace_id: bytes = _id(trace_id if trace_id is not None or not above else above.trace_id, TRACE_ID_BYTES)
        self.span_id: bytes = os.urandom(SPAN_ID_BYTES)
        self.attributes: dict[str, Any] = attributes_of(attributes)
        # The root decides about a trace only when it is the same trace.
        self._parent_id = parent_id if not above or above.trace_id == self.trace_id else None
        self._record = record
        self._inputs = inputs
        self._outputs: Any = None
        self._start_ns = time.time_ns()
        self._token: contextvars.Token[Span | None] | None = None

    def set_inputs(self, inputs: Any) -> None:
        self._inputs = inputs

    def set_outputs(self, outputs: Any) -> None:
        self._outputs = outputs

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def __enter__(self) -> Span:
        self._start_ns = time.time_ns()
        self._token = _current.set(self)
        return self

    def leave(self) -> None:
        """Be the current span no longer; nothing is recorded."""
        if self._token is not None:
            try:
                _current.reset(self._token)
            except ValueError:  # ended in another task than it began in
                _current.set(None)
            self._token = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()
        if kind is not None:
            self.attributes.setdefault("error", kind.__name__ if error is None else error_text(error))
        self._record(
            SpanValues(
                self.name,
                self._start_ns,
                time.time_ns(),
                self.trace_id,
                self.span_id,
                self._parent_id,
                self._inputs,
                self._outputs,
                "ok" if kind is None else "error",
                self.attributes,
            )
        )


def with_arrays(values: Any) -> Any:
    """Named inputs or outputs with their token ids and log-probabilities packed; anything else as it is."""
    if type(values) is not dict:
        return values
    return {
        key: _as_array(key, value) if type(key) is str and key.endswith(_ARRAY_ENDS) else value
        for key, value in values.items()
    }


def _as_array(key: str, value: Any) -> Any:
    """A list, an array or a tensor of one dimension, packed; what is none of them as it is."""
    name = key.rpartition("_")[2]
    kind: Any = Ints if name in ID_KEYS else (Ints, Floats)
    if name not in ID_KEYS and name not in NUMBER_KEYS and not key.endswith("log_probs"):
        return value  # "grids" ends like it, too
    try:
        flat = value.tolist() if hasattr(value, "tolist") and not isinstance(value, (Ints, Floats)) else value
        array = packed(flat) if type(flat) in (list, tuple) and len(flat) >= ARRAY_LEN_MIN else None
        return array if isinstance(array, kind) else value
    except Exception:  # noqa: BLE001 - any object may be given
        return value


def attributes_of(given: Any) -> dict[str, Any]:
    """A dict of ours of whatever was given as attributes."""
    try:
        return {} if given is None else dict(given)
    except Exception:  # noqa: BLE001 - any object may be given; it stays visible
        return {"attributes": given}


def _ns(value: Any) -> int:
    """A time as trackers hold it; 0 for what is none."""
    try:
        return min(max(int(value), 0), STEP_MAX)
    except Exception:  # noqa: BLE001 - any object may be given
        return 0


def _fits(value: Any, size_bytes: int) -> bool:
    return is_a(value, bytes) and len(value) == size_bytes and any(value)


def _id(value: Any, size_bytes: int) -> bytes:
    return bytes(value) if _fits(value, size_bytes) else os.urandom(size_bytes)
