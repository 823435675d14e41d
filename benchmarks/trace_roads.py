"""Whose road a trace takes: ours, verl's own to trackio and to mlflow, the limit, and none. One line each in ROADS.

A road is opened in a worker process of its own, in a folder that all workers of a round share. What it gives stands in
for verl's `rollout_trace_attr` and `rollout_trace_op`. Afterwards the parent asks what is in the store.

    trackio   what verl 0.9.1 sends (utils/rollout_trace.py, `_log_trackio_trace`): one `trackio.log` of a
              Trace(messages, metadata) for each traced call, both of them with all tokens as numbers in JSON
    mlflow    what verl 0.9.1 does (same file, `init`, `rollout_trace_attr`, `rollout_trace_op`): async logging on, a
              span for the block with a tag per attribute, a span for each traced call with all inputs and outputs

Must not know: clocks. On failure: the SDK's exception; a missing package is `is_installed() == False`.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.util
import inspect
import json
import os
import sqlite3
import sys
from array import array
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rollouts import Attr, Op

from unit.client.verl.stand_in import trace_module

PROJECT, EXPERIMENT = "benchmark", "traces"


@dataclass(frozen=True, slots=True)
class Opened:
    """What a worker needs. `flush` waits at most as long as it is told."""

    attr: Attr | None
    op: Op | None
    flush: Callable[[float], object]


@dataclass(frozen=True, slots=True)
class Stored:
    """What the store has at the end."""

    spans: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Road:
    """`spans`: of one trajectory. `daemon`: whether ours runs. `is_peer`: fewer trajectories will do."""

    name: str
    module: str
    spans: int
    open: Callable[[str, int], Opened]
    stored: Callable[[str], Stored]
    prepare: Callable[[str], object] = lambda _folder: None
    daemon: bool = False
    is_peer: bool = False

    @property
    def is_traced(self) -> bool:
        return self.stored is not _nothing

    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


def _none(_folder: str, _worker: int) -> Opened:
    return Opened(None, None, lambda _timeout_s: None)


def _nothing(_folder: str) -> Stored:
    return Stored(0, 0)


# --- ours ---------------------------------------------------------------------------------------------------


def _verl_shipper(folder: str, _worker: int) -> Opened:
    """The plugin's own wrappers, around functions that do nothing. Where spool and daemon are, the environment says."""
    from verl_shipper_client.verl import rollout
    from verl_shipper_client.verl.job import JOB

    module: Any = trace_module()
    rollout.patch_trace(module)
    module.RolloutTraceConfig.init(PROJECT, EXPERIMENT, "shipper")
    client = JOB.helper(PROJECT, EXPERIMENT)

    def flush(timeout_s: float) -> None:
        client.finish(timeout_s=timeout_s)
        # What was written: with a daemon, the spool is empty again.
        Path(folder, f"written-{os.getpid()}").write_text(str(sum(writer.end_offset for writer in client._writers())))
        assert client.errors == 0, client.errors

    return Opened(module.rollout_trace_attr, module.rollout_trace_op, flush)


def _in_spool(folder: str) -> Stored:
    from unit.client.spooled import records
    from verl_shipper_spool.record import RecordKind

    spool = Path(folder, "spool")
    spans = sum(record.kind is RecordKind.SPAN for record in records(spool))
    return Stored(spans, sum(path.stat().st_size for path in spool.glob("*/*.seg")))


def _at_file_backend(folder: str) -> Stored:
    spans = 0
    for path in Path(folder, "out").rglob("*.jsonl"):
        with path.open(encoding="utf-8") as lines:
            spans += sum(json.loads(line)["kind"] == "span" for line in lines)
    return Stored(spans, sum(int(path.read_text()) for path in Path(folder).glob("written-*")))


# --- the limit ----------------------------------------------------------------------------------------------


def _limit(folder: str, worker: int) -> Opened:
    """No spans, ids, frames or checksums: three packed arrays, the question and the reward, in one write(2)."""
    import msgpack

    fd = os.open(os.path.join(folder, f"limit-{worker}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    held: ContextVar[dict[str, Any]] = ContextVar("held")

    @contextlib.contextmanager
    def attr(**attributes: Any) -> Iterator[None]:
        told: dict[str, Any] = dict(attributes)
        token = held.set(told)
        yield
        held.reset(token)
        turn, output = told.pop("turn"), told.pop("output")
        tokens = [array("i", output.prompt_ids).tobytes(), array("i", turn.token_ids).tobytes()]
        tokens.append(array("f", turn.log_probs).tobytes())
        os.write(fd, msgpack.packb([told, tokens, output.reward_score]))

    def op(function: Any) -> Any:
        @functools.wraps(function)
        async def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if function.__name__ == "run":
                held.get()["messages"] = kwargs["raw_prompt"]
            result = await function(self, *args, **kwargs)
            held.get()["output" if function.__name__ == "run" else "turn"] = result
            return result

        return noted

    return Opened(attr, op, lambda _timeout_s: os.close(fd))


def _at_limit(folder: str) -> Stored:
    import msgpack

    count = size_bytes = 0
    for path in Path(folder).glob("limit-*"):
        with path.open("rb") as file:
            count += sum(1 for _ in msgpack.Unpacker(file, max_buffer_size=0))
        size_bytes += path.stat().st_size
    return Stored(3 * count, size_bytes)


# --- trackio, as verl uses it -------------------------------------------------------------------------------


def _trackio(folder: str, _worker: int) -> Opened:
    os.environ["TRACKIO_DIR"] = os.path.join(folder, "trackio")
    import trackio

    run = trackio.init(project=PROJECT, name=EXPERIMENT, config={"framework": "verl"})
    about: ContextVar[dict[str, Any]] = ContextVar("about")

    @contextlib.contextmanager
    def attr(*, name: str, **attributes: Any) -> Iterator[None]:  # noqa: ARG001 - trackio has no span for the block
        token = about.set({**attributes, "experiment_name": EXPERIMENT})
        try:
            yield
        finally:
            about.reset(token)

    def log(name: str, inputs: dict[str, Any], output: Any) -> None:
        fields = _as_json(output)
        metadata = {"op": name, "backend": "trackio", "inputs": _as_json(inputs), **about.get()}
        metadata |= {"status": "success", "output": fields}
        messages = [
            {"role": "system", "content": f"verl rollout trace operation: {name}"},
            {"role": "user", "content": json.dumps({"inputs": inputs}, default=str, ensure_ascii=False)},
            {"role": "assistant", "content": json.dumps({"output": output}, default=str, ensure_ascii=False)},
        ]
        trace = trackio.Trace(messages=messages, metadata=metadata)
        trackio.log({f"rollout_trace/{name}": trace}, step=about.get()["step"])

    def flush(timeout_s: float) -> None:
        trackio.finish()
        sender = getattr(run, "_local_sender_thread", None)
        if sender is not None:
            sender.join(timeout_s)  # `finish` itself gives up after 30 s

    return Opened(attr, functools.partial(_logged, log), flush)


def _logged(log: Callable[[str, dict[str, Any], Any], None], function: Any) -> Any:
    """Arguments by name, all of them, and then the result, as verl's decorator has them."""

    @functools.wraps(function)
    async def logged(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = _arguments(function, self, args, kwargs)
        result = await function(self, *args, **kwargs)
        log(function.__qualname__, inputs, result)
        return result

    return logged


def _arguments(function: Any, self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(function).bind(self, *args, **kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def _as_json(value: Any) -> Any:
    """Plain values, element by element."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, dict):
        return {str(key): _as_json(element) for key, element in value.items()}
    return [_as_json(element) for element in value] if isinstance(value, (list, tuple)) else str(value)


def _at_trackio(folder: str) -> Stored:
    return Stored(_rows(glob.glob(f"{folder}/trackio/*.db"), "traces"), _size_bytes(Path(folder, "trackio")))


# --- mlflow, as verl uses it --------------------------------------------------------------------------------


def _mlflow(folder: str, _worker: int) -> Opened:
    import mlflow

    mlflow.config.enable_async_logging()
    mlflow.set_tracking_uri(_mlflow_uri(folder))
    mlflow.set_experiment(PROJECT)

    @contextlib.contextmanager
    def attr(*, name: str, **attributes: Any) -> Iterator[None]:
        with mlflow.start_span(name=name) as span:
            for key, value in {**attributes, "experiment_name": EXPERIMENT}.items():
                mlflow.set_trace_tag(span.trace_id, key, str(value))
            yield

    def op(function: Any) -> Any:
        @functools.wraps(function)
        async def spanned(self: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = _arguments(function, self, args, kwargs)
            with mlflow.start_span(name=function.__qualname__) as span:
                span.set_inputs(inputs)
                result = await function(self, *args, **kwargs)
                span.set_outputs(result)
            return result

        return spanned

    return Opened(attr, op, lambda _timeout_s: mlflow.flush_trace_async_logging())


def _mlflow_uri(folder: str) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def _mlflow_schema(folder: str) -> None:
    """Eight workers that make the tables at once stand in each other's way, which is not the question here."""
    import mlflow

    mlflow.set_tracking_uri(_mlflow_uri(folder))
    mlflow.set_experiment(PROJECT)


def _at_mlflow(folder: str) -> Stored:
    return Stored(
        _rows([f"{folder}/mlflow.db"], "spans"), sum(_size_bytes(path) for path in Path(folder).glob("mlflow.db*"))
    )


def _rows(paths: list[str], table: str) -> int:
    count = 0
    for path in paths:
        with contextlib.closing(sqlite3.connect(path)) as database:
            count += database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
    return count


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.rglob("*.*"))


ROADS = (
    Road("verl-shipper, daemon healthy", "verl_shipper_client", 3, _verl_shipper, _at_file_backend, daemon=True),
    Road("verl-shipper, daemon absent", "verl_shipper_client", 3, _verl_shipper, _in_spool),
    Road("limit: packed arrays + write(2)", "msgpack", 3, _limit, _at_limit),
    Road("verl's way to trackio", "trackio", 2, _trackio, _at_trackio, is_peer=True),
    Road("verl's way to mlflow", "mlflow", 3, _mlflow, _at_mlflow, _mlflow_schema, is_peer=True),
    Road("nothing traced", "verl_shipper_client", 3, _none, _nothing),
)
