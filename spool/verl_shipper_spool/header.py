"""The header of a stream: whose bytes these are. One small file `stream`, MessagePack map, written once.

All that names the run, finds its writer and tells whether it lives stands here, so that a folder can be copied to any
machine and still be delivered. No secret ever goes in: no environment, no command line, no configuration.

Must not know: segments, sockets. On bytes it cannot read: CorruptionError.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import msgpack

from verl_shipper_spool.errors import CorruptionError

HEADER_VERSION = 1
HEADER_NAME = "stream"
ENDED_NAME = "ended"  # beside it: nobody will add to this stream, though its process lives on
HEADER_BYTES_MAX = 64 * 1024

SCALARS = "scalars"  # metrics, run start and finish, text, system
BULK = "bulk"  # generations, spans, files


@dataclass(frozen=True, slots=True)
class Process:
    """A process that can be recognised again: pids are recycled, start times within one boot are not."""

    node: str
    boot_id: str
    pid: int
    pid_namespace: str
    start_ticks: int
    uid: int


@dataclass(frozen=True, slots=True)
class StreamHeader:
    """Identity of a stream. `stream_id` and `writer_id` are 32 hexadecimal digits, unique for ever.

    `forked`: its process only adds to the run, as a fork child or a rollout worker does; the run neither begins nor
    ends with it.
    """

    stream_id: str
    writer_id: str
    stream_class: str
    run_id: str
    project: str
    experiment: str
    rank: int
    world: int
    created_ns: int
    forked: bool
    process: Process


def new_id() -> str:
    """A fresh stream or writer id."""
    return uuid.uuid4().hex


def is_stream_id(text: object) -> bool:
    """Whether a text, a folder's name for one, can be the id of a stream or a writer."""
    return isinstance(text, str) and len(text) == 32 and not set(text) - set("0123456789abcdef")


def fresh_header(
    run_id: str,
    project: str,
    experiment: str,
    rank: int,
    world: int,
    *,
    forked: bool,
    process: Process | None = None,
) -> StreamHeader:
    """Header of a new writer's scalars. `process`: the calling one, where it is known already."""
    return StreamHeader(
        stream_id=new_id(),
        writer_id=new_id(),
        stream_class=SCALARS,
        run_id=run_id,
        project=project,
        experiment=experiment,
        rank=rank,
        world=world,
        created_ns=time.time_ns(),
        forked=forked,
        process=process or this_process(),
    )


def start_body(header: StreamHeader, config: dict[str, Any]) -> dict[str, Any]:
    """Body of the run_start record with which this writer begins; what a helper says of itself is marked."""
    body: dict[str, Any] = {"project": header.project, "experiment": header.experiment, "config": config}
    body |= {"node": header.process.node, "rank": header.rank, "world": header.world}
    return body | {"forked": True} if header.forked else body


def sibling(header: StreamHeader, stream_class: str) -> StreamHeader:
    """The other stream of the same writer."""
    return replace(header, stream_id=new_id(), stream_class=stream_class)


def encode_header(header: StreamHeader) -> bytes:
    packed: bytes = msgpack.packb({"version": HEADER_VERSION, **asdict(header)})
    return packed


def read_header(folder: str) -> StreamHeader:
    """Header of the stream in a folder. Raises OSError, CorruptionError."""
    with open(os.path.join(folder, HEADER_NAME), "rb") as file:
        return decode_header(file.read())


def decode_header(content: bytes) -> StreamHeader:
    """Header of the file's content. Raises CorruptionError when it is empty, torn or of another version."""
    try:
        fields_in = msgpack.unpackb(content)
    except Exception as error:
        raise CorruptionError(f"stream header is not MessagePack: {error}") from error
    if not isinstance(fields_in, dict) or fields_in.get("version") != HEADER_VERSION:
        raise CorruptionError("stream header is not version 1")
    try:
        process = Process(**{field.name: fields_in["process"][field.name] for field in fields(Process)})
        values = {field.name: fields_in[field.name] for field in fields(StreamHeader) if field.name != "process"}
        header = StreamHeader(**values, process=process)
    except (KeyError, TypeError) as error:
        raise CorruptionError(f"stream header lacks a field: {error}") from error
    _check(header)
    return header


def _check(header: StreamHeader) -> None:
    for name in ("stream_id", "writer_id"):
        if not is_stream_id(getattr(header, name)):
            raise CorruptionError(f"{name} is not 32 hexadecimal digits")
    process = header.process
    texts = (header.run_id, header.project, header.experiment, process.node, process.boot_id, process.pid_namespace)
    numbers = (header.rank, header.world, header.created_ns, process.pid, process.start_ticks, process.uid)
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(n, int) for n in numbers):
        raise CorruptionError("stream header fields have wrong types")
    if header.stream_class not in (SCALARS, BULK):
        raise CorruptionError(f"unknown stream class {header.stream_class!r:.40}")


def this_process() -> Process:
    """The calling process. Fields the system does not tell are empty or 0; liveness then goes by heartbeat."""
    return Process(
        node=os.uname().nodename,
        boot_id=_read_text("/proc/sys/kernel/random/boot_id"),
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        start_ticks=start_ticks("self"),
        uid=os.getuid(),
    )


def pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def start_ticks(pid: int | str) -> int:
    """Start time of a process in clock ticks since boot; 0 when there is no such process."""
    fields = process_stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def parent_of(pid: int) -> int:
    """The process that a process is a child of; 0 when there is no such process."""
    fields = process_stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def process_stat(pid: int | str) -> list[str]:
    """What the kernel says of a process, from its state on (proc(5), stat); empty when there is none."""
    return _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
