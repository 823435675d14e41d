"""Traces of PyTorch's profiler and snapshots of its memory, handed over as files of the run.

    <name.><node>.rank<rank>.step<step>.pt.trace.json.gz   Chrome's format, for Perfetto and TensorBoard
    <name.><node>.rank<rank>.step<step>.pickle.gz              for pytorch.org/memory_viz

torch writes a temporary file, the client compresses it into the spool, the file is removed. It lies in the system's
folder for temporary files (TMPDIR): what a process killed meanwhile leaves in /dev/shm is memory that nobody frees.

Must not know: trackers. Never raises into training: what fails is counted and told as by the client.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from verl_shipper_client.client import Client
from verl_shipper_spool.file_parts import MEMORY, PROFILE

_TAIL_BYTES = 16


def profiler_handler(client: Client, name: str = "") -> Callable[[Any], None]:
    """For `torch.profiler.profile(on_trace_ready=profiler_handler(client))`: ships each trace under its `step_num`.

    `name` stands in front of the file's own, where one process has several profilers.
    """
    taken: Counter[int] = Counter()

    def on_trace_ready(profiler: Any) -> None:
        def act() -> None:
            step = int(profiler.step_num)
            taken[step] += 1
            again = f".{taken[step]}" if taken[step] > 1 else ""
            stem = _stem(client, name, step) + again
            with _temporary("trace.json") as path:
                profiler.export_chrome_trace(path)
                _check_complete(path)
                client.log_file(path, f"{stem}.pt.trace.json", step=step, purpose=PROFILE, compress=True)

        client._complaints.guard("profiler_handler", act)  # noqa: SLF001 - the one place that counts and tells failures

    return on_trace_ready


def memory_snapshot(client: Client, step: int | None = None, name: str = "") -> None:
    """Ship what `torch.cuda.memory._record_memory_history()` has recorded so far."""

    def act() -> None:
        import torch

        with _temporary("snapshot.pickle") as path:
            torch.cuda.memory._dump_snapshot(path)  # noqa: SLF001 - the documented name
            shown = f"{_stem(client, name, step)}.pickle"
            client.log_file(path, shown, step=step, purpose=MEMORY, compress=True)

    client._complaints.guard("memory_snapshot", act)  # noqa: SLF001 - as above


@contextlib.contextmanager
def _temporary(name: str) -> Iterator[str]:
    """A path for a file that does not outlive the block, nor what torch puts beside it."""
    with tempfile.TemporaryDirectory(prefix="verl-shipper-", ignore_cleanup_errors=True) as folder:
        yield os.path.join(folder, name)


def _stem(client: Client, name: str, step: int | None) -> str:
    front = f"{name}." if name else ""
    behind = "" if step is None else f".step{step}"
    return f"{front}{os.uname().nodename}.rank{client.rank}{behind}"


def _check_complete(path: str) -> None:
    """A full disk cuts a trace short, and torch does not say so."""
    with open(path, "rb") as file:
        file.seek(max(os.path.getsize(path) - _TAIL_BYTES, 0))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(f"{path} is cut short: no room for the profiler's trace")
