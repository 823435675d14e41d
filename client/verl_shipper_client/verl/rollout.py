"""Rollout traces of verl: what its agent loops do, as spans of one tree per trajectory.

    agent_loop                         messages in, answer and reward out; uid, sample, rollout, step, validate
    └ ToolAgentLoop.run                sampling, what the loop returned: turns, mask, timings
      ├ LLMServerClient.generate       one turn: new prompt tokens, new tokens, log-probabilities
      ├ HermesToolParser.extract_tool_calls
      └ tool calculator                arguments in, response and reward out

Whatever verl decorates with `rollout_trace_op` becomes a span; agent loops and tools that nobody has decorated, too.
Tokens are written once (trajectory.py) and as ids: nobody decodes on the rollout's event loop.

verl 0.9's default trainer asks for no trace at all (`trace=False`, whatever the configuration says); there, and only
there, we trace all the same, as many samples a step as the configuration allows. Its true step, sample and rollout
index come with the arguments of `run`, the reward comes into what `run` has returned: both are in the root span, which
ends last.

Must not know: spool, trackers. On failure: told once, and the rollout goes on.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import ModuleType, TracebackType
from typing import Any

from verl_shipper_client.span import Span
from verl_shipper_client.verl.job import JOB, TAKEN
from verl_shipper_client.verl.patch import MARK, safely, tell_once, wrap
from verl_shipper_client.verl.seen import (
    Describe,
    call_of,
    describe_op,
    fields_of,
    is_nothing,
    is_same_list,
    number_of,
    scalar,
)
from verl_shipper_client.verl.training import watch_subclasses
from verl_shipper_client.verl.trajectory import IDENTITY, Trajectory
from verl_shipper_spool.verl_names import PLUGIN_NAME as NAME

V1_MODULES = ("verl.trainer.ppo.v1.agent_loop_tq", "verl.trainer.main_ppo_sync")
STEPS_MAX = 32  # steps whose samples are remembered; one that comes back later begins anew
EXTRA_KEYS = ("turn_scores", "tool_rewards", "min_global_steps", "max_global_steps")

_trajectory: ContextVar[Trajectory | None] = ContextVar("verl_shipper_trajectory", default=None)
_samples: dict[Any, set[Any]] = {}


def patch_trace(module: ModuleType) -> None:
    """Change `verl.utils.rollout_trace` before anybody takes its functions."""
    config = getattr(module, "RolloutTraceConfig", None)
    if config is None:
        return
    wrap(config, "init", _init)
    wrap(module, "rollout_trace_attr", functools.partial(_attr, config))
    wrap(module, "rollout_trace_op", functools.partial(_op, config))


def patch_agent_loop(module: ModuleType) -> None:
    """Change `verl.experimental.agent_loop.agent_loop`: its workers know the job, its loops are spans."""
    for name, found in list(vars(module).items()):
        if isinstance(found, type) and name.startswith("AgentLoopWorker"):
            wrap(found, "__init__", _knowing)
    base = getattr(module, "AgentLoopBase", None)
    traced = _traced_by(sys.modules.get("verl.utils.rollout_trace"))
    if base is not None and traced is not None:
        watch_subclasses(base, "run", traced)


def patch_tools(module: ModuleType) -> None:
    """Change `verl.experimental.agent_loop.tool_agent_loop`: a tool need not be decorated to be seen."""
    loop = getattr(module, "ToolAgentLoop", None)
    traced = _traced_by(sys.modules.get("verl.utils.rollout_trace"))
    if loop is not None and traced is not None:
        wrap(loop, "_call_tool", traced)


def _init(found: Any) -> Any:
    original = getattr(found, "__func__", found)

    @functools.wraps(original)
    def init(cls: Any, project_name: Any, experiment_name: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        is_taken = safely(lambda: JOB.wishes.takeover and backend in TAKEN)
        result = original(cls, project_name, experiment_name, NAME if is_taken else backend, *args, **kwargs)
        if is_taken or backend == NAME:
            tell_once("shipping rollout traces" + (f" instead of calling {backend}" if is_taken else ""))
        return result

    return classmethod(init)


def _knowing(original: Any) -> Any:
    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        config = args[0] if args else kwargs.get("config")
        safely(lambda: JOB.note(config))
        original(self, *args, **kwargs)
        safely(lambda: JOB.note(config, getattr(self, "tokenizer", None)))

    return begin


def _attr(config: Any, original: Any) -> Any:
    @functools.wraps(original)
    def rollout_trace_attr(*args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        if config.get_backend() != NAME:
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        return _trajectory_block(config, *args, **kwargs)

    return rollout_trace_attr


@contextmanager
def _trajectory_block(
    config: Any,
    sample_index: Any = None,
    step: Any = None,
    rollout_n: Any = None,
    name: str = "rollout_trace",
    validate: Any = False,
    trace: bool = True,
    **_others: Any,
) -> Iterator[None]:
    """One trajectory: whatever is traced inside belongs to its root span."""
    attributes = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n, "validate": validate}
    root, client = safely(lambda: _root(config, name, attributes, trace)) or (None, None)
    trajectory = Trajectory(root, client)
    token = _trajectory.set(trajectory)
    if root is not None:
        safely(root.__enter__)
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        if root is not None:
            safely(lambda: _end_root(root, trajectory))
            safely(lambda: root.__exit__(type(failure) if failure else None, failure, None))
        _trajectory.reset(token)


def _root(config: Any, name: str, attributes: dict[str, Any], trace: bool) -> tuple[Span, Any] | None:
    """The root span of a trajectory that is to be traced, and the client that all of its spans are recorded by."""
    known = {key: scalar(value) for key, value in attributes.items() if value is not None}
    instance = config.get_instance()
    if not trace and not (_is_v1() and _is_drawn(instance, known)):
        return None
    known["experiment_name"] = instance.experiment_name
    known["span_type"] = "agent"
    client = _client(config)
    return client.span(name, attributes=known), client


def _is_v1() -> bool:
    return any(name in sys.modules for name in V1_MODULES)


def _is_drawn(instance: Any, attributes: dict[str, Any]) -> bool:
    """The first samples of a step, as many as the configuration says; with all of their rollouts."""
    limit = getattr(instance, "max_samples_per_step_per_worker", None)
    if limit is None:
        return True
    samples = _samples.setdefault((attributes.get("step"), attributes.get("validate")), set())
    while len(_samples) > STEPS_MAX:
        del _samples[next(iter(_samples))]
    sample = attributes.get("sample_index")
    if sample not in samples and len(samples) >= limit:
        return False
    samples.add(sample)
    return True


def _end_root(root: Span, trajectory: Trajectory) -> None:
    """What is known only now: the answer, and the reward that came into the loop's output after it had returned."""
    outputs = trajectory.result()
    root.set_outputs(outputs)
    if trajectory.messages is not None:
        root.set_inputs({"messages": trajectory.messages})
    output = trajectory.output
    final = output[-1] if isinstance(output, list) and output else output
    shown = fields_of(final)
    fields = shown if isinstance(shown, dict) else {}
    extra = fields.get("extra_fields") or {}
    found = {"reward": number_of(fields.get("reward_score")), "num_turns": fields.get("num_turns")}
    if isinstance(extra, dict):
        found["reward_extra_info"] = extra.get("reward_extra_info") or None
        found |= {key: extra.get(key) for key in EXTRA_KEYS}
    for key, value in found.items():
        if not is_nothing(value):
            outputs[key] = value
            if key in ("reward", "reward_extra_info", "num_turns"):
                root.set_attribute(key, value)


def _op(config: Any, original: Any) -> Any:
    @functools.wraps(original)
    def rollout_trace_op(func: Any) -> Any:
        return _traced(config, func, original(func))

    return rollout_trace_op


def _traced_by(module: ModuleType | None) -> Callable[[Any], Any] | None:
    """What makes a span of a function that verl itself has not decorated."""
    config = getattr(module, "RolloutTraceConfig", None)
    return None if config is None else lambda func: _traced(config, func, func)


def _traced(config: Any, func: Any, others: Any) -> Any:
    """`func` as a span when traces are ours, else as `others` has it."""
    describe = describe_op(func)
    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def traced_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            if config.get_backend() != NAME:
                return await others(self, *args, **kwargs)
            with _Operation(config, describe, args, kwargs) as operation:
                result = await func(self, *args, **kwargs)
                operation.result = result
            return result

        setattr(traced_async, MARK, True)
        return traced_async

    @functools.wraps(func)
    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        if config.get_backend() != NAME:
            return others(self, *args, **kwargs)
        with _Operation(config, describe, args, kwargs) as operation:
            result = func(self, *args, **kwargs)
            if not inspect.iscoroutine(result):
                operation.result = result
                return result
            operation.abandon()  # somebody's decorator hides that it is asynchronous: it begins when it is awaited
        return _awaited(config, describe, args, kwargs, result)

    setattr(traced, MARK, True)
    return traced


async def _awaited(config: Any, describe: Describe, args: Any, kwargs: Any, coroutine: Any) -> Any:
    with _Operation(config, describe, args, kwargs) as operation:
        operation.result = await coroutine
    return operation.result


class _Operation:
    """One traced call. Nothing that goes wrong in here reaches it."""

    __slots__ = (
        "_args",
        "_config",
        "_describe",
        "_inputs",
        "_is_abandoned",
        "_is_outermost",
        "_kwargs",
        "_span",
        "_trajectory",
        "result",
    )

    def __init__(self, config: Any, describe: Describe, args: Any, kwargs: Any) -> None:
        self._config, self._describe, self._args, self._kwargs = config, describe, args, kwargs
        self._trajectory = _trajectory.get()
        self._inputs: dict[str, Any] = {}
        self._span: Span | None = None
        self._is_outermost = False
        self._is_abandoned = False
        self.result: Any = None

    def __enter__(self) -> _Operation:
        if self._trajectory is None or self._trajectory.root is not None:
            self._span = safely(self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        span = self._span
        if span is None:
            return
        if self._is_abandoned:
            safely(span.leave)
            return
        safely(lambda: self._end(span, failed=kind is not None))
        safely(lambda: span.__exit__(kind, error, traceback))

    def abandon(self) -> None:
        """Nothing has happened yet; nothing is recorded."""
        self._is_abandoned = True
        if self._is_outermost and self._trajectory is not None:
            self._trajectory.is_known = False

    def _begin(self) -> Span:
        name, self._inputs = call_of(self._describe, self._args, self._kwargs)
        trajectory = self._trajectory
        root = trajectory.root if trajectory is not None else None
        if root is not None and self._describe.is_run and trajectory is not None and not trajectory.is_known:
            self._is_outermost = True
            self._identify(root, trajectory)
        attributes = {"span_type": self._describe.span_type}
        if root is not None:
            attributes |= {key: root.attributes[key] for key in ("step", "sample_index") if key in root.attributes}
        client = trajectory.client if trajectory is not None else _client(self._config)
        span: Span = client.span(name, attributes=attributes)
        return span.__enter__()

    def _identify(self, root: Span, trajectory: Trajectory) -> None:
        """The arguments of the first loop say which trajectory this is; verl's own word for it may be a batch's."""
        trajectory.is_known = True
        messages = trajectory.messages = self._inputs.pop("raw_prompt", None)
        # A dataset may have the same conversation in a column of its own.
        self._inputs = {key: value for key, value in self._inputs.items() if not is_same_list(value, messages)}
        for attribute, name in IDENTITY.items():
            if self._inputs.get(name) is not None:
                root.set_attribute(attribute, scalar(self._inputs[name]))

    def _end(self, span: Span, *, failed: bool) -> None:
        trajectory = self._trajectory or Trajectory(None)
        outputs = None if failed else self._describe.outputs(self.result)
        span.set_inputs(self._inputs)
        span.set_outputs(outputs)
        if not isinstance(outputs, dict):
            return
        if self._describe.is_turn:
            trajectory.take_turn(span, self._inputs, outputs)
        if self._describe.is_run and self._is_outermost:
            trajectory.output = self.result
            trajectory.take_end(span, outputs)
        if self._describe.is_parser:
            trajectory.text = None if outputs.get("tool_calls") else outputs.get("content")


def _client(config: Any) -> Any:
    instance = config.get_instance()
    return JOB.helper(instance.project_name, instance.experiment_name)
