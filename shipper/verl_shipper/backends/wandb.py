"""Backend `wandb`: one W&B run per run, through wandb's own package in a process that may be thrown away.

    metrics       a row of the history, x axis trainer/global_step, wall time of capture
    system        a row of its own, x axis system/elapsed_s; see wandb_system.py
    generations   a table val/generations, one for each validation
    text          a page
    run_start     config; rank 0's
    run_finish    finished (exit code 0) or failed; rank 0's
    file          an artifact; wandb_files.py
    span          not shown at W&B (counted)

wandb's package acknowledges nothing and may lose what it holds without a word. So a batch is delivered when the
server's own count of lines has reached it and its files are there, and until then the outbox keeps it. Rows are
numbered before they are sent, and every row carries its record's id: after a crash the server's history tells which
rows of the batch in flight are there, and only the others are sent again.

    wandb.py ── wandb_rows.py                       what is sent
        ├────── wandb_files.py ── file_assembly.py            files, whole
        └────── wandb_run.py ── wandb_api.py        what the server has
                     └───────── sdk/child.py ── wandb_child.py        the SDK, in its own process

Settings: docs/configuration.md. Must not know: cursors, backoff. On failure: an outcome; nothing is given up.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

from verl_shipper.backends.base import (
    Backend,
    Batch,
    Delivered,
    Limits,
    Memory,
    Outcome,
    Park,
    Reject,
    Retry,
    RunInfo,
)
from verl_shipper.backends.file_assembly import Taken
from verl_shipper.backends.road import road_of
from verl_shipper.backends.sdk.http import Http, RefusedError
from verl_shipper.backends.sdk.parts import check_settings, exit_code_of, is_part, rejected
from verl_shipper.backends.secrets import find_key
from verl_shipper.backends.wandb_api import NotOfferedError, WandbApi
from verl_shipper.backends.wandb_files import Files
from verl_shipper.backends.wandb_offline import OfflineRun
from verl_shipper.backends.wandb_rows import Plan, Row, plan
from verl_shipper.backends.wandb_run import Sent, WandbRun
from verl_shipper.backends.wandb_settings import SETTINGS
from verl_shipper.backends.wandb_wish import KEY_NAMES, PROXY_KEY, base_url, entity_of, mode_of, wish_of
from verl_shipper.checks import Finding
from verl_shipper.errors import ConfigError
from verl_shipper.schema import Key

NAMES_MAX = 1000  # changed names that `status` can list
MODES = ("online", "offline")


class WandbBackend(Backend):
    """Delivers one run to W&B."""

    name: ClassVar[str] = "wandb"
    settings_known: ClassVar[tuple[str | Key, ...] | None] = SETTINGS
    # A row's company costs little, a question to the server some; and while its process lives, a run is not "crashed".
    limits: ClassVar[Limits] = Limits(
        items_max=1000,
        bytes_max=4 * 1024 * 1024,
        age_s_max=3.0,
        runs_at_once_max=8,
        idle_s_max=24 * 3600.0,
        upload_s_max=400.0,
    )

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        mode, url = mode_of(settings), base_url(settings)
        check_settings("wandb", settings, mode=mode, modes=MODES, url=url, variable="WANDB_BASE_URL")
        road_of("wandb", settings, proxy_key=PROXY_KEY)
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError("wandb is not installed", hint="pip install 'verl-shipper[wandb]'")

    @classmethod
    def diagnose(cls, settings: Mapping[str, Any]) -> Iterator[Finding]:
        from verl_shipper.backends.wandb_diagnose import findings

        return findings(settings)

    def __init__(self, run: RunInfo, settings: Mapping[str, Any], memory: Memory) -> None:
        super().__init__(run, settings, memory)
        self._api: WandbApi | None = None
        self._run: WandbRun | None = None
        self._is_offline = mode_of(settings) == "offline"
        self._offline: OfflineRun | None = None
        self._files = Files(run, settings, memory, self.keep_busy)
        self._batch_id = ""  # the batch whose rows the child of now has
        self._sent: Sent | None = None
        self._planned: list[Row] = []  # rows of that batch that were not given to the child

    def open(self) -> Outcome | None:
        try:
            self._files.staging.open()
            if not self._is_offline:
                self._open()
        except RefusedError as refused:
            self._let_go()
            return refused.outcome
        except OSError as error:
            return Retry(f"cannot prepare for wandb: {error}")
        return None

    def upload(self, batch: Batch) -> Outcome:
        made = plan(batch, self.memory.get("last_steps") or {})
        try:
            taken = self._files.staging.take(batch.items)
            if made.refused or taken.refused:
                return rejected(made.refused | taken.refused)
            if self._is_offline:
                return self._keep(batch, made, taken)
            run = self._open()
            with run.mutex:
                self._open()  # it may have given way to another daemon just now
                return self._deliver(run, batch, made, taken)
        except RefusedError as refused:
            if isinstance(refused.outcome, Park):
                self._let_go()
            return refused.outcome
        except OSError as error:
            self._let_go()
            return Retry(f"cannot work for wandb: {error}")

    def watermark(self) -> Mapping[str, int]:
        if self._run is None or self.memory.get("rows") is not None:
            return {}  # a new stream: nothing of it is there
        ordinals: dict[str, int] = {}
        try:
            rows = self._run.rows_there(0)
        except NotOfferedError:
            return {}
        for row_id in rows:
            stream_id, _, ordinal = row_id.rpartition(":")
            if ordinal.isdecimal():
                ordinals[stream_id] = max(int(ordinal) + 1, ordinals.get(stream_id, 0))
        return ordinals

    def close(self) -> None:
        self._let_go()
        if self._api is not None:
            self._api.close()
            self._api = None

    def _open(self) -> WandbRun:
        """The run, opened: its lock held and its count known."""
        if self._run is None:
            self._api, self._run = self._connect()
        with self._run.mutex:
            if not self._run.is_writing:
                self._batch_id, self._sent = "", None
                self._run.open(rows_known=self.memory.get("rows") or 0, is_clean=not self.memory.get("in_flight"))
        return self._run

    def _keep(self, batch: Batch, made: Plan, taken: Taken) -> Outcome:
        """Without a server: into the run's folder."""
        if self.memory.get("offline_ended_with") == batch.batch_id:
            return self._delivered(batch, made, taken)  # its commit was lost; the folder is whole
        if made.config is not None:
            self.memory.put("config", made.config)
        if self._offline is None:
            self._offline = OfflineRun(wish_of(self.run, self.settings, entity_of(self.settings), ""), self.memory)
        made.rows += [self._files.keep(whole, batch.items[whole.index]) for whole in taken.wholes]
        finish = exit_code_of(made.finish) if made.finish is not None else None
        if made.rows or made.config is not None or finish is not None:
            self._offline.deliver(made.rows, self.memory.get("config") or {})
        if finish is not None:
            self._offline.finish(finish, batch.batch_id)
        return self._delivered(batch, made, taken)

    def _delivered(self, batch: Batch, made: Plan, taken: Taken, **notes: Any) -> Delivered:
        for whole in taken.wholes:
            self._files.staging.finish(whole)
        return Delivered({**notes, **self._notes_of(made), **self._files.notes(batch.items)}, made.ignored)

    def _deliver(self, run: WandbRun, batch: Batch, made: Plan, taken: Taken) -> Outcome:
        if made.config is not None:
            self.memory.put("config", made.config)
        finish = self._finish_code(run, made)
        if made.rows or made.config is not None or finish is not None:
            if self._batch_id != batch.batch_id:
                self._send(run, batch, made)
            assert self._sent is not None, "sent just now"
            run.confirm(self._sent)
            if self._sent.refused:
                return self._refuse(run, batch, self._sent.refused)
            made.ignored["artifact_refused"] += self._sent.artifacts_refused
        rows = run.lines
        for whole in taken.wholes:
            run.start(self.memory.get("config") or {})
            self._files.deliver(run, whole)
        if finish is not None:
            run.finish(finish)
        self._batch_id, self._sent = "", None
        in_flight = {key: line for key, line in self._in_flight().items() if not is_part(batch.batch_id, key)}
        return self._delivered(batch, made, taken, rows=rows, in_flight=in_flight, finish=finish)

    def _send(self, run: WandbRun, batch: Batch, made: Plan) -> None:
        """Give the child those rows of the batch that the server does not have."""
        in_flight = self._in_flight()
        first = next((first for key, first in in_flight.items() if is_part(batch.batch_id, key)), None)
        there = self._there(run, first, made) if first is not None and made.rows else {}
        self._planned = [row for row in made.rows if row.row_id not in there]
        if first is None and made.rows:
            self.memory.put("in_flight", {**in_flight, batch.batch_id: run.lines})
        run.start(self.memory.get("config") or {})
        before = run.lines
        self._sent = run.send(self._planned)
        self._planned = self._planned[self._sent.lines - before :]
        late = [(there[row.row_id], row) for row in made.rows if row.row_id in there and row.media]
        if late:
            self._sent.files |= run.attach(late)
        self._batch_id = batch.batch_id

    def _there(self, run: WandbRun, first: int, made: Plan) -> dict[str, int]:
        """Which rows of the batch the server has, with their numbers."""
        try:
            return run.rows_there(first)
        except NotOfferedError:  # then its count has to do: rows went there in this order, from `first` on
            return {row.row_id: first + place for place, row in enumerate(made.rows[: max(run.lines - first, 0)])}

    def _notes_of(self, made: Plan) -> dict[str, Any]:
        """What is to be remembered of a plan: last steps, and names for `status`."""
        notes: dict[str, Any] = {"last_steps": made.last_steps}
        known = self.memory.get("metric_names") or {}
        if not made.renamed.keys() <= known.keys() and len(known) < NAMES_MAX:
            notes["metric_names"] = {**known, **made.renamed}
        return notes

    def _refuse(self, run: WandbRun, batch: Batch, reason: str) -> Outcome:
        """wandb did not take a row: name its item. What went before it is there, and is recognised next time."""
        bad = self._planned[0].row_id
        self.memory.put("rows", run.lines)
        self._batch_id, self._sent = "", None
        index = next(place for place, item in enumerate(batch.items) if f"{item.stream_id}:{item.ordinal}" == bad)
        return Reject(reason, [index])

    def _finish_code(self, run: WandbRun, made: Plan) -> int | None:
        """The exit code to end the run with after this batch; None when it goes on."""
        if made.finish is not None:
            return exit_code_of(made.finish)
        if made.config is not None:
            return None
        known = self.memory.get("finish")
        if isinstance(known, int):
            return known
        # Another daemon may have ended the run that we only add to.
        return None if run.is_writing else {"finished": 0, "failed": 1}.get(run.state_found)

    def _in_flight(self) -> dict[str, int]:
        return dict(self.memory.get("in_flight") or {})

    def _let_go(self) -> None:
        if self._offline is not None:
            self._offline.close()
            self._offline = None
        if self._run is not None:
            self._run.close()
            self._run = None
        self._batch_id, self._sent = "", None

    def _connect(self) -> tuple[WandbApi, WandbRun]:
        url = base_url(self.settings)
        try:
            road = road_of("wandb", self.settings, proxy_key=PROXY_KEY)
            key = find_key(KEY_NAMES, self.settings, urlsplit(url).hostname)
        except ConfigError as error:
            raise RefusedError(Park(error.line())) from error
        if key is None:
            raise RefusedError(Park(f"no key for wandb; set {KEY_NAMES[0]} or backends.wandb.api_key_file"))
        api = WandbApi(Http(url, road), key.value, key.origin)
        entity = entity_of(self.settings) or self.memory.get("entity")
        if not entity:
            entity = api.entity()
            self.memory.put("entity", entity)
        wish = wish_of(self.run, self.settings, str(entity), key.value)
        if self.memory.get("place") != (place := os.path.basename(wish.lock_path)):
            # Another server or account than before: what we know is of no use there.
            for note in ("rows", "in_flight", "finish"):
                self.memory.put(note, None)
            self.memory.put("place", place)
        return api, WandbRun(wish, api)
