"""The header of a stream: whose bytes these are. One small file `stream`, MessagePack map, written once.

All that names the run, finds its writer and tells whether it lives stands here, so that a folder can be copied to any
machine and still be delivered. No secret ever goes in: no environment, no command line, no configuration.

Must not know: segments, sockets. On bytes it cannot read: CorruptionError.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import asdict, dataclass, fields, replace

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


def sibling(header: StreamHeader, stream_class: str) -> StreamHeader:
    """The other stream of the same writer."""
    return replace(header, stream_id=new_id(), stream_class=stream_class)


def encode_header(header: StreamHeader) -> bytes:
    packed: bytes = msgpack.packb({"version": HEADER_VERSION, **asdict(header)})
    return packed


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
        value = getattr(header, name)
        if not isinstance(value, str) or len(value) != 32 or set(value) - set("0123456789abcdef"):
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
    text = _read_text(f"/proc/{pid}/stat")
    behind_name = text.rpartition(")")[2].split()
    return int(behind_name[19]) if len(behind_name) > 19 else 0


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
