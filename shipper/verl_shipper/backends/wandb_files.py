"""Shipped files as artifacts of a W&B run, each in a collection of its own name.

    <run id>-<name>      type profile, memory or file; aliases latest and step-N; a file again is its next version
    in it                <name>, a profiler's trace as *.pt.trace.json(.gz): W&B's own viewer opens nothing else

Online a file is delivered when the server calls its artifact committed; the same content again is the same version.
It goes up when all rows of its batch are confirmed, so that a file that fails costs them nothing: after TRIES tries
of limited length, all while the server answers questions, it is refused and kept here. An outage is no try.

Offline the file is kept beside the run's folder, and an artifact that points at it is recorded in a row of its own, so
that it is written again with the folder after a crash. `wandb sync` sends it, if the file is still at its place.

Must not know: the SDK, cursors. On failure: RefusedError, OSError.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_shipper.backends import file_shelf
from verl_shipper.backends.base import Item, Memory, Park, Reject, Retry, RunInfo
from verl_shipper.backends.file_assembly import Staging, Whole, staging_root
from verl_shipper.backends.file_names import fit, trace_name
from verl_shipper.backends.paths import ARTIFACT_FORBIDDEN
from verl_shipper.backends.sdk.child import ChildError
from verl_shipper.backends.sdk.http import RefusedError
from verl_shipper.backends.wandb_rows import ID_KEY, STEP_KEY, TIME_KEY, Media, Row
from verl_shipper.backends.wandb_run import WandbRun
from verl_shipper.backends.wandb_wish import base_url, offline_dir, project_name, run_name
from verl_shipper_spool.file_parts import FILE, MEMORY, PROFILE
from verl_shipper_spool.record import RecordKind

log = logging.getLogger(__name__)

TRIES = 3
TRY_S = 30.0  # of a small file: five tries of the SDK's own
BYTES_PER_S_MIN = 256 * 1024  # a slower upload is one that hangs
DIGEST_BYTES_PER_S = 50 * 1024 * 1024  # the SDK reads a file before it sends it
CALL_S = 60.0
LOOK_PAUSE_S, LOOK_PAUSE_S_MAX = 0.2, 2.0
BUSY_S = 2 * CALL_S
NAME_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_.\-]")
NAME_CHARS_MAX = 128  # of an artifact
NODES_MAX = 4096
TRIES_NOTE, NODES_NOTE = "file_tries", "nodes"


class Files:
    """The shipped files of one run. `busy(s)`: the upload under way may take that much longer."""

    def __init__(
        self, run: RunInfo, settings: Mapping[str, Any], memory: Memory, busy: Callable[[float], None]
    ) -> None:
        self._run_id = run_name(run.run_id)
        self._settings = settings
        self._memory = memory
        self._busy = busy
        self.staging = Staging(
            staging_root(settings, "wandb"), base_url(settings), project_name(run.project), run.run_id
        )

    def deliver(self, run: WandbRun, whole: Whole) -> None:
        """Return when the server has committed the file. All rows that the child has must be confirmed."""
        content = self._content(whole, whole.path)
        limit_s = TRY_S + whole.size / BYTES_PER_S_MIN
        began_s, pause_s = time.monotonic(), LOOK_PAUSE_S
        while self._put(run, whole, content) != "committed":
            if time.monotonic() - began_s > limit_s:
                self._failed(run, whole, f"it was not committed in {limit_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LOOK_PAUSE_S_MAX)
        if self._memory.get(TRIES_NOTE):
            self._memory.put(TRIES_NOTE, {})

    def keep(self, whole: Whole, item: Item) -> Row:
        """Offline: the file to its place beside the run's folder, and the row that tells of it."""
        path = os.path.join(offline_dir(self._settings), "wandb", f"files-{self._run_id}")
        content = self._content(whole, os.path.join(path, file_shelf.put(whole, path)))
        row_id = f"{item.stream_id}:{item.ordinal}"
        values = {STEP_KEY: whole.step or 0, TIME_KEY: item.record.time_ns / 1e9, ID_KEY: row_id}
        return Row(row_id, values, (Media(whole.key, "file", content),))

    def notes(self, items: Sequence[Item]) -> dict[str, Any]:
        """What is to be remembered of a batch: the nodes of its ranks."""
        known = self._memory.get(NODES_NOTE) or {}
        fresh = {
            str(item.rank): item.record.body.get("node")
            for item in items
            if item.record.kind is RecordKind.RUN_START and isinstance(item.record.body.get("node"), str)
        }
        return {} if fresh.items() <= known.items() or len(known) >= NODES_MAX else {NODES_NOTE: {**known, **fresh}}

    def _put(self, run: WandbRun, whole: Whole, content: dict[str, Any]) -> str:
        """How far the file has come. What the SDK says against it is a failed try."""
        self._busy(BUSY_S + whole.size / DIGEST_BYTES_PER_S)
        try:
            return run.put_file(whole.key, content, CALL_S + whole.size / DIGEST_BYTES_PER_S)
        except RefusedError as refused:
            cause = refused.__cause__
            if isinstance(refused.outcome, Park) or not isinstance(cause, ChildError) or cause.kind == "gone":
                raise
            self._failed(run, whole, str(cause))
            raise

    def _failed(self, run: WandbRun, whole: Whole, why: str) -> None:
        """A try has failed, if the server can be asked at all. Raises what follows from that."""
        run.abandon()  # it would go on with the file, and hold back the end of the run for it
        run.ask_server()
        tries = int((self._memory.get(TRIES_NOTE) or {}).get(whole.key, 0)) + 1
        self._memory.put(TRIES_NOTE, {whole.key: tries} if tries < TRIES else {})
        if tries < TRIES:
            raise RefusedError(Retry(f"wandb does not take {whole.label}: {why}"))
        raise RefusedError(Reject(f"{whole.label}: wandb did not take it in {TRIES} tries: {why}", [whole.index]))

    def _content(self, whole: Whole, path: str) -> dict[str, Any]:
        """What the child is told of a file."""
        kind = whole.purpose if whole.purpose in (PROFILE, MEMORY) else FILE
        base = whole.name.rpartition("/")[2]
        known = self._memory.get(NODES_NOTE) or {}
        told = {"step": whole.step, "rank": whole.rank, "node": known.get(str(whole.rank)), "name": whole.name}
        return {
            "path": path,
            "name": artifact_name(self._run_id, whole.name),
            "kind": kind,
            "entry": fit(trace_name(base) if kind == PROFILE else base, ARTIFACT_FORBIDDEN),
            "aliases": ["latest"] if whole.step is None else ["latest", f"step-{whole.step}"],
            "metadata": {key: value for key, value in told.items() if value is not None} | {"sha256": whole.sha256},
        }


def artifact_name(run_id: str, name: str) -> str:
    """The collection of a file: of this run's own, since an alias like step-40 stands in a collection only once."""
    return f"{run_id}-{fit(name, NAME_FORBIDDEN, bytes_max=NAME_CHARS_MAX - len(run_id) - 1)}"
