"""The client inside a training process. `log()` is: encode, one write(2), done.

Promises: no call raises into training, or waits for a network, a daemon, another process's lock or an fsync. When a
call has returned, its record survives `kill -9`. Threads, forks, asyncio, signal handlers and interpreter shutdown are
ordinary cases: one reentrant lock in the process, streams of its own for a fork child, no need of a clean exit.

Must not know: daemon, trackers, torch, numpy. On failure: counted (`errors`) and told on stderr, once a minute.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import msgpack

from verl_shipper_client import device, generations, identity, process_exit
from verl_shipper_client.complaints import Complaints
from verl_shipper_client.held import HELD_S_MAX, Held, Unfinished
from verl_shipper_client.packing import body_of, early_step, pack_apart, pack_slowly, shown_config
from verl_shipper_client.sender import Sender
from verl_shipper_client.span import Span, SpanValues, attributes_of
from verl_shipper_client.streams import METRICS_CLASS, Streams
from verl_shipper_client.values import STEP_MAX, cut_text, plain, to_plain, whole_step
from verl_shipper_spool.file_parts import FILE, parts_of
from verl_shipper_spool.frame import PAYLOAD_BYTES_MAX
from verl_shipper_spool.header import fresh_header, start_body
from verl_shipper_spool.location import SOCKET_BELOW_SPOOL, socket_address, spool_dir
from verl_shipper_spool.record import RECORD_VERSION, RecordKind
from verl_shipper_spool.writer import StreamWriter

DEVICE_LOOK_S = 0.002  # how often a call that waits for a device asks it
EXIT_S_MAX = 2.0  # what a process that ends waits for its device and its daemon

_METRICS = int(RecordKind.METRICS)
_ending = threading.Event()  # the interpreter is about to end
_living: weakref.WeakSet[Client] = weakref.WeakSet()


class Client:
    """One run as seen by one training process.

    project, experiment: names as the trackers show them (default: VERL_PROJECT and VERL_EXPERIMENT, else what the
    daemon's configuration says). config: nested dict, secrets are removed. run_id: the same id
    continues the same run (default: VERL_SHIPPER_RUN_ID, else a fresh one). rank, world: default from the launcher's
    variables. spool_dir, socket: default VERL_SHIPPER_SPOOL_DIR, VERL_SHIPPER_SOCKET, else places that the daemon of
    the same user finds. head: whether this process begins and ends the run (False for one that only adds to it, as a
    rollout worker does). As a context manager it finishes with exit code 0, or 1 when an exception passes.
    """

    _starts_at_once = True  # else with its first record

    def __init__(
        self,
        project: str | None = None,
        experiment: str | None = None,
        config: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        rank: int | None = None,
        spool_dir: str | os.PathLike[str] | None = None,
        socket: str | None = None,
        head: bool = True,
        world: int | None = None,
    ) -> None:
        self.project = identity.project_or_none(project)
        self.experiment = identity.experiment_or_none(experiment)
        self.run_id = identity.run_id_or_new(run_id)
        self.rank = identity.rank_or_detect(rank)
        self.world = identity.world_or_detect(world)
        self._complaints = Complaints()
        self._sender: Sender | None
        self._pack: Callable[[Any], bytes]
        # A daemon waits with a writer's traces for its first record; a helper of a run has to have one.
        self._config = {} if config is None and not head else config
        self._is_head = bool(head)
        self._finished = False
        self._spool_argument = spool_dir
        self._socket_argument = socket
        self._generation_calls = generations.CallCounter()
        self._reset()
        if self._starts_at_once:
            self._complaints.guard("start", self._start)
        process_exit.watch()
        _living.add(self)

    def log(self, data: Mapping[str, Any], step: int | None = None, sync: bool = False) -> None:
        """Record metrics of one step. `data`: numbers by name, nested dicts allowed; values.py says what else.

        Of tensors on a device the values are read later, without a wait: until the device has come so far, this record
        and those logged after it are in memory only. `sync`: wait for the device and keep all before returning.
        """
        try:
            with self._lock:
                streams = self._streams or self._start()
                if type(step) is not int or not -STEP_MAX <= step <= STEP_MAX:
                    step = early_step(step)
                if type(data) is not dict:  # a subclass may tell one thing to len() and another to items()
                    data = body_of(data)
                seq = next(self._seq)
                # Out of reach meanwhile: a signal handler that logs would pack into the middle of our record.
                pack, self._pack = self._pack, pack_apart
                try:
                    payload: bytes | Unfinished = pack((RECORD_VERSION, _METRICS, seq, step, time.time_ns(), data))
                except Exception:  # noqa: BLE001 - odd values: the slow road knows
                    payload = pack_slowly(RecordKind.METRICS, seq, step, data, wait=sync)
                finally:
                    self._pack = pack
                if streams.held.queue or isinstance(payload, Unfinished):
                    streams.put(RecordKind.METRICS, payload)
                elif not streams.scalars.append(payload, METRICS_CLASS):
                    streams.tell_loss(streams.scalars)
                if self._sender is None:
                    self._start_sender()
            if sync:
                self._await_device(HELD_S_MAX)
        except Exception as error:  # noqa: BLE001 - promise 1: never into training
            self._complaints.failed("log", error)

    def log_generations(
        self,
        samples: Iterable[Any],
        step: int | None = None,
        columns: Iterable[str] = generations.COLUMNS,
        name: str | None = None,
    ) -> None:
        """Record validation samples: tuples (input, output, score) or dicts. Big tables become several records.

        `name`: of a table that holds something else than a validation; all of its rows are kept.
        """

        def act() -> None:
            names, rows = generations.table(samples, columns)
            key = identity.name(name)
            with self._lock:
                call = self._generation_calls.next(whole_step(step), key)
                for body in generations.parts(names, rows, call, key):
                    self._append(RecordKind.GENERATIONS, step, body)

        self._complaints.guard("log_generations", act)

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Record one text under a name."""
        self._complaints.guard(
            "log_text", lambda: self._append(RecordKind.TEXT, step, {str(key): cut_text(plain(str(text)))})
        )

    def log_file(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        step: int | None = None,
        purpose: str = FILE,
        compress: bool = False,
    ) -> None:
        """Record a file's content, as it is now; the file is not needed afterwards. For trackers that take files.

        `name`: a relative path (default: the file's own name). `purpose`: "profile", "memory" or "file". `compress`:
        with gzip. Files beyond FILE_BYTES_MAX (file_parts.py) are refused and counted as an error.
        """

        def act() -> None:
            with open(path, "rb") as source:
                for body in parts_of(source, name or os.path.basename(os.fspath(path)), purpose, compress=compress):
                    self._append(RecordKind.FILE, step, body)

        self._complaints.guard("log_file", act)

    def span(
        self,
        name: str,
        trace_id: bytes | None = None,
        parent: Span | bytes | None = None,
        inputs: Any = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Span:
        """A context manager that records a span when it ends. Nested spans of one task find their parent."""
        return Span(self._record_span, name, trace_id, parent, inputs, attributes)

    def log_span(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        trace_id: bytes | None = None,
        span_id: bytes | None = None,
        parent_id: bytes | None = None,
        inputs: Any = None,
        outputs: Any = None,
        status: str = "ok",
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a span that has ended. Ids: 16 and 8 bytes, made up when not given. `status`: "ok" or "error"."""
        self._complaints.guard(
            "log_span",
            lambda: self._record_span(
                SpanValues(
                    name=name,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    trace_id=trace_id,
                    span_id=span_id,
                    parent_id=parent_id,
                    inputs=inputs,
                    outputs=outputs,
                    status=status,
                    attributes=attributes_of(attributes),
                )
            ),
        )

    def finish(self, exit_code: int | None = None, timeout_s: float = 5.0) -> bool:
        """Record the end of the run and give the daemon up to `timeout_s` to take everything. True when it has.

        Safe to call twice and to log after. Nothing is lost without it: what remains is taken from the spool later.
        """
        try:
            started_s = time.monotonic()
            self._await_device(timeout_s)
            with self._lock:
                first, self._finished = not self._finished, True
                if first and self._is_head:
                    (self._streams or self._start()).scalars.use_reserve()
                    body = {"exit_code": whole_step(exit_code), "reason": "finish"}
                    self._append(RecordKind.RUN_FINISH, None, body)
                self._release(Held.give_up)  # another thread may have logged since
                for writer in self._writers():
                    writer.declare_losses()
                sender, self._sender = self._sender, None
            if sender is not None:
                self._complete = False
                try:
                    self._complete = sender.drain(max(timeout_s - (time.monotonic() - started_s), 0.0))
                finally:
                    sender.stop()
            with self._lock:
                if self._sender is None:  # else somebody logs on
                    for writer in self._writers():
                        writer.close()
            return self._complete
        except Exception as error:  # noqa: BLE001 - promise 1
            self._complaints.failed("finish", error)
            return False

    @property
    def errors(self) -> int:
        """How often something failed in this client, for whatever reason."""
        return self._complaints.errors

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        code = process_exit.as_code(error.code) if isinstance(error, SystemExit) else int(kind is not None)
        self.finish(exit_code=code)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is this very client; in another process it is a helper of the same run."""
        from verl_shipper_client import copies

        return copies.pickled(self, self._spool_argument, self._socket_argument)

    def _reset(self) -> None:
        """Fresh per-process state: at construction, and in a fork child."""
        self._lock = threading.RLock()
        self._seq = itertools.count()
        self._streams: Streams | None = None
        self._sender = None
        self._complete = False  # the daemon has all that was logged before the last finish
        self._pack = msgpack.Packer(use_bin_type=True, default=to_plain).pack

    def _start(self) -> Streams:
        """Make this process's streams; the first record of a run is its start."""
        folder = spool_dir(self._spool_argument)
        address = self._daemon_address(folder)
        forked = not self._is_head
        header = fresh_header(self.run_id, self.project, self.experiment, self.rank, self.world, forked=forked)
        streams = Streams(folder, header, self._complaints)
        if self._streams is not None:
            return self._streams  # a signal handler logged meanwhile and has done all this
        self._address, self._streams = address, streams
        device.prepare()
        if self._is_head or self._config is not None:
            self._append(RecordKind.RUN_START, None, start_body(header, shown_config(self._config)))
        return streams

    def _daemon_address(self, folder: str) -> str:
        """Where to ship to. An address that cannot work is told, and costs no record: the spool takes them all."""
        try:
            return socket_address(folder, self._socket_argument)
        except Exception as error:  # noqa: BLE001 - promise 1
            self._complaints.failed("socket", error)
            return socket_address(folder, os.path.join(folder, *SOCKET_BELOW_SPOOL))

    def _append(self, kind: RecordKind, step: Any, body: Any) -> None:
        """Append a record of any kind to the stream it belongs to."""
        with self._lock:
            streams = self._streams or self._start()
            streams.put(kind, self._packed(kind, next(self._seq), early_step(step), body))
            if self._sender is None:
                self._start_sender()

    def _packed(self, kind: RecordKind, seq: int, step: Any, body: Any) -> bytes | Unfinished:
        """Payload of a record. Spans come by the thousand: MessagePack itself says which ones need a look."""
        if kind is not RecordKind.SPAN:
            return pack_slowly(kind, seq, step, body)
        pack, self._pack = self._pack, pack_apart  # as in `log`
        try:
            payload = pack((RECORD_VERSION, int(kind), seq, step, time.time_ns(), body))
        except Exception:  # noqa: BLE001 - odd values
            payload = b""
        finally:
            self._pack = pack
        # Of a payload that is too large, the slow road may keep a part.
        return payload if 0 < len(payload) <= PAYLOAD_BYTES_MAX else pack_slowly(kind, seq, step, body)

    def _record_span(self, values: SpanValues) -> None:
        attributes = values.attributes
        self._complaints.guard("span", lambda: self._append(RecordKind.SPAN, attributes.get("step"), values.body()))

    def _release(self, act: Callable[[Held], bool] = Held.release) -> bool:
        """Write what waited for a device and is complete. True when nothing waits any more."""
        streams = self._streams
        if streams is None or not (streams.held.queue or streams.bulk_held.queue):
            return True
        with self._lock:
            return streams.each_held(act)

    def _writers(self) -> tuple[StreamWriter, ...]:
        return self._streams.writers if self._streams is not None else ()

    def _await_device(self, timeout_s: float) -> None:
        """Write what waits for a device, without what has not come after `timeout_s`."""
        if self._release():
            return
        deadline_s = time.monotonic() + timeout_s
        while not self._release():
            if not time.monotonic() < deadline_s:  # true for a timeout that is no number
                self._release(Held.give_up)
                return
            time.sleep(DEVICE_LOOK_S)

    def _start_sender(self) -> None:
        if _ending.is_set():
            return  # a thread begun while the interpreter is taken apart never runs, and its starter waits for ever
        sender = Sender(self._address, self._lock, functools.partial(self._release, Held.look))
        for writer in self._writers():
            sender.add(writer)
        self._sender = sender
        try:
            sender.start()
        except RuntimeError as error:  # no new threads: interpreter shutdown, or a limit. The spool has it all.
            self._complaints.failed("sender", error)

    def _after_fork(self) -> None:
        """In the child: leave the parent's streams alone, begin own ones at the first record."""
        for writer in self._writers():
            writer.abandon()
        self._reset()
        self._is_head, self._config = False, None

    def _at_exit(self) -> None:
        if self._streams is None:
            return
        if self._finished:
            self._await_device(EXIT_S_MAX)
        else:
            self.finish(exit_code=process_exit.seen(), timeout_s=EXIT_S_MAX)


def _forget_parent() -> None:
    for client in list(_living):
        client._after_fork()  # noqa: SLF001 - module-private protocol between a client and its fork hook


def _finish_all() -> None:
    _ending.set()
    for client in list(_living):
        client._at_exit()  # noqa: SLF001 - same


os.register_at_fork(after_in_child=_forget_parent)
atexit.register(_finish_all)
