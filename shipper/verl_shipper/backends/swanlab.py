"""Backend `swanlab`: one SwanLab run per run, through SwanLab's own package in a process that may be thrown away.

    metrics       a point for every number, at its own step, with the wall time of capture
    system        a point for every number under system/<node>/…; step: whole seconds since the run began
    generations   a table val/generations, one for each validation
    text          a text for every key
    run_start     config; rank 0's
    run_finish    finished (exit code 0) or crashed; rank 0's
    span, file    not shown at SwanLab (counted)

SwanLab's server only appends: a point sent twice is there twice. Its package gives data up at any 4xx and sends it
twice after a lost answer. So everything it sends passes a gateway of ours that knows the server's answer to every
point, and a batch is delivered when the server has acknowledged each of its points and shows the last step of each of
its keys; until then the outbox keeps it.

    swanlab.py ── swanlab_points.py                      what is sent
        ├────── swanlab_run.py ── swanlab_api.py         what the server has
        │            └──── sdk/child.py ── swanlab_child.py ── swanlab_gateway.py ── swanlab_upstream.py
        └────── swanlab_folder.py                        offline and local: a folder

Settings: docs/configuration.md. Must not know: cursors, backoff. On failure: an outcome; nothing is given up.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from verl_shipper.backends import swanlab_diagnose
from verl_shipper.backends.base import (
    Backend,
    Batch,
    Decided,
    Delivered,
    Limits,
    Memory,
    Outcome,
    Park,
    Retry,
    RunInfo,
)
from verl_shipper.backends.paths import component
from verl_shipper.backends.road import road_of
from verl_shipper.backends.sdk.http import Http, RefusedError
from verl_shipper.backends.sdk.parts import check_settings, exit_code_of, is_part, rejected
from verl_shipper.backends.sdk.run_lock import lock_path
from verl_shipper.backends.secrets import find_key
from verl_shipper.backends.swanlab_api import RunAddress, SwanlabApi
from verl_shipper.backends.swanlab_folder import SwanlabFolder
from verl_shipper.backends.swanlab_place import (
    DEFAULT_URL,
    KEY_VARIABLES,
    MODES,
    base_url,
    decided,
    log_dir,
    mode_of,
)
from verl_shipper.backends.swanlab_points import FORBIDDEN, Plan, Row, names_of, notes_of, plan
from verl_shipper.backends.swanlab_run import Sent, SwanlabRun, Wish
from verl_shipper.backends.swanlab_settings import SETTINGS
from verl_shipper.checks import Finding
from verl_shipper.errors import ConfigError
from verl_shipper.schema import Key
from verl_shipper.values import visible

SETTLE_S = 15.0  # the server's summaries lag 5 to 10 s (SwanHubX/SwanLab #1576)
PROJECT_FORBIDDEN = re.compile(r"[^0-9a-zA-Z_\-+.]")
WORKSPACE = re.compile(r"[0-9a-zA-Z_\-]{1,25}")
CUID_DIGITS = string.digits + string.ascii_lowercase
CUID_CHARS = 21
TEXT_CHARS_MAX = {"name": 512, "description": 1024, "group": 512, "job_type": 512}


class SwanlabBackend(Backend):
    """Delivers one run to SwanLab."""

    name: ClassVar[str] = "swanlab"
    settings_known: ClassVar[tuple[str | Key, ...] | None] = SETTINGS
    # While its process lives, a run is not "interrupted".
    limits: ClassVar[Limits] = Limits(
        items_max=1000,
        bytes_max=4 * 1024 * 1024,
        age_s_max=2.0,
        runs_at_once_max=8,
        idle_s_max=24 * 3600.0,
        upload_s_max=400.0,
    )

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        mode, url = mode_of(settings), base_url(settings)
        check_settings("swanlab", settings, mode=mode, modes=MODES, url=url, variable="SWANLAB_API_HOST")
        road_of("swanlab", settings)
        workspace = settings.get("workspace")
        if workspace and not WORKSPACE.fullmatch(str(workspace)):
            hint = "SwanLab takes 1 to 25 letters, digits, - and _"
            raise ConfigError(f"workspace is {workspace!r}", where="backends.swanlab.workspace", hint=hint)
        if importlib.util.find_spec("swanlab") is None:
            raise ConfigError("swanlab is not installed", hint="pip install 'verl-shipper[swanlab]'")

    @classmethod
    def decide(cls, settings: Mapping[str, Any]) -> Decided:
        return decided(settings)

    @classmethod
    def diagnose(cls, settings: Mapping[str, Any]) -> Iterator[Finding]:
        if mode_of(settings) != "online":
            return swanlab_diagnose.folder(log_dir(settings))
        return swanlab_diagnose.findings(base_url(settings), KEY_VARIABLES, settings)

    def __init__(self, run: RunInfo, settings: Mapping[str, Any], memory: Memory) -> None:
        super().__init__(run, settings, memory)
        self._api: SwanlabApi | None = None
        self._run: SwanlabRun | None = None
        self._folder: SwanlabFolder | None = None
        self._names = names_of(memory.get("metric_names"), memory.get("media_names"))
        self._batch_id = ""  # the batch whose points the child of now has
        self._sent: Sent | None = None
        self._refused: dict[str, dict[int, str]] = {}  # of a batch whose child is gone

    def open(self) -> Outcome | None:
        try:
            if mode_of(self.settings) == "online":
                self._open()
            else:
                self._open_folder()
        except RefusedError as refused:
            self._let_go()
            return refused.outcome
        except OSError as error:
            return Retry(f"cannot prepare for swanlab: {error}")
        return None

    def upload(self, batch: Batch) -> Outcome:
        try:
            if mode_of(self.settings) != "online":
                return self._keep(self._open_folder(), batch)
            run = self._open()
            with run.mutex:
                return self._deliver(self._open(), batch)
        except RefusedError as refused:
            if isinstance(refused.outcome, Park):
                self._let_go()
            return refused.outcome
        except OSError as error:
            self._let_go()
            return Retry(f"cannot work for swanlab: {error}")

    def watermark(self) -> Mapping[str, int]:
        return {}  # SwanLab knows steps, not records: `tops` keeps repeats out

    def close(self) -> None:
        self._let_go()
        if self._api is not None:
            self._api.close()
            self._api = None

    def _open(self) -> SwanlabRun:
        """The run, opened: its lock held and its last steps known."""
        if self._run is not None and self._run.is_writing:
            return self._run
        if self._run is None:
            self._api, self._run = self._connect()
        if self._run.is_ready:
            return self._run
        self._forget_sent()
        self._run.open(tops_known=self.memory.get("tops") or {}, is_clean=not self.memory.get("in_flight"))
        return self._run

    def _deliver(self, run: SwanlabRun, batch: Batch) -> Outcome:
        made = self._plan(batch, run.tops)
        refused = made.refused | self._refused.pop(batch.batch_id, {})
        if refused:
            return rejected(refused)
        if made.config is not None:
            self.memory.put("config", made.config)
        finish = self._finish_code(made, {"FINISHED": 0, "CRASHED": 1}.get(run.state_found), is_ours=run.is_writing)
        if made.rows or made.config is not None or finish is not None:
            if self._batch_id != batch.batch_id:
                self._send(run, batch, made)
            assert self._sent is not None, "sent just now"
            made.ignored["config_refused"] += run.confirm(self._sent)
            if self._sent.refused:
                refused = self._sent.refused
                self._batch_id, self._sent = "", None
                return rejected(refused)
        if finish is not None:
            run.finish(finish)
        self._batch_id, self._sent = "", None
        return self._delivered(made, finish)

    def _plan(self, batch: Batch, tops_there: Mapping[str, int]) -> Plan:
        """The same for the same batch, whatever of it is at the server by now."""
        tops = self.memory.get("tops") or {}
        if not is_part(batch.batch_id, self.memory.get("in_flight") or ""):
            # Nothing of ours is under way: what is there beyond our own is another daemon's, or our state was lost.
            known = {**tops, **{key: max(step, tops.get(key, -1)) for key, step in tops_there.items()}}
            if known != tops:
                self.memory.put("tops", known)
                tops = known
        return plan(batch, self.memory.get("last_steps") or {}, tops, self._names)

    def _send(self, run: SwanlabRun, batch: Batch, made: Plan) -> None:
        """Give the child those points of the batch that the server does not have."""
        if not is_part(batch.batch_id, self.memory.get("in_flight") or ""):
            self.memory.put("in_flight", batch.batch_id)
        wanted = above(made.rows, run.tops)
        run.start(self.memory.get("config") or {}, (point for row in wanted for point in row.points()))
        self._sent = run.send(above(wanted, run.tops))
        self._batch_id = batch.batch_id

    def _keep(self, folder: SwanlabFolder, batch: Batch) -> Outcome:
        """Offline and local: a row that is in the row log is delivered."""
        made = plan(batch, self.memory.get("last_steps") or {}, self.memory.get("tops") or {}, self._names)
        if made.refused:
            return rejected(made.refused)
        if made.config is not None:
            self.memory.put("config", made.config)
        finish = self._finish_code(made, None, is_ours=True)
        if made.rows or made.config is not None or finish is not None:
            folder.write(made.rows, self.memory.get("config") or {})
        if finish is not None:
            folder.finish(finish)
            self.memory.put("part", folder.part + 1)
            folder.drop_rows()
        return self._delivered(made, finish)

    def _delivered(self, made: Plan, finish: int | None) -> Delivered:
        remember: dict[str, Any] = {
            "tops": made.tops,
            "in_flight": None,
            "last_steps": made.last_steps,
            "finish": finish,
        }
        if self._names.is_changed:
            remember |= notes_of(self._names)
        return Delivered(remember, +made.ignored)

    def _finish_code(self, made: Plan, found: int | None, *, is_ours: bool) -> int | None:
        """The exit code to end the run with after this batch; None when it goes on."""
        if made.finish is not None:
            return exit_code_of(made.finish)
        if made.config is not None:
            return None
        known = self.memory.get("finish")
        if isinstance(known, int):
            return known
        # Another daemon may have ended the run that we only add to.
        return None if is_ours or not made.rows else found

    def _let_go(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        self._forget_sent()

    def _forget_sent(self) -> None:
        """The child is gone. What the server had refused by then stays refused."""
        if self._sent is not None and self._sent.refused:
            self._refused = {self._batch_id: self._sent.refused}
        self._batch_id, self._sent = "", None

    def _open_folder(self) -> SwanlabFolder:
        if self._folder is None:
            address = RunAddress("", project_name(self.run.project), cuid(self.run.run_id))
            wish = self._wish(address, "", "")
            place = log_dir(self.settings)
            lock = lock_path(self.settings.get("lock_dir"), "swanlab", os.path.abspath(place), address.cuid)
            part = self.memory.get("part") or 0
            self._folder = SwanlabFolder(replace(wish, lock_path=lock), place, self.run.created_ns, part)
        self._folder.open()
        return self._folder

    def _connect(self) -> tuple[SwanlabApi, SwanlabRun]:
        url = base_url(self.settings)
        try:
            road = road_of("swanlab", self.settings)
            key = find_key(KEY_VARIABLES, self.settings, urlsplit(url).hostname)
        except ConfigError as error:
            raise RefusedError(Park(error.line())) from error
        if key is None:
            raise RefusedError(Park("no key for swanlab; set SWANLAB_API_KEY or backends.swanlab.api_key_file"))
        api = SwanlabApi(Http(url, road), key.value, key.origin)
        account = api.login()
        workspace = str(self.settings.get("workspace") or os.environ.get("SWANLAB_WORKSPACE") or account)
        address = RunAddress(workspace, project_name(self.run.project), cuid(self.run.run_id))
        return api, SwanlabRun(self._wish(address, url, key.value), api)

    def _wish(self, address: RunAddress, url: str, key: str) -> Wish:
        settings, tags = self.settings, self.settings.get("tags")
        mode = mode_of(settings)
        work_dir = settings.get("work_dir") or os.path.join(os.path.expanduser("~"), ".cache", "verl-shipper")
        identity = (url, address.workspace, address.project, address.cuid)
        folder = os.path.abspath(os.path.join(work_dir, f"{address.workspace}-{address.project}-{address.cuid}"))
        texts = {"name": self.run.experiment or self.run.run_id}
        texts |= {name: settings[name] for name in ("description", "group", "job_type") if settings.get(name)}
        return Wish(
            address=address,
            where={
                "mode": mode,
                "workspace": address.workspace or None,
                "project": address.project,
                "id": address.cuid,
                "resume": "allow" if mode == "online" else None,
                "tags": [tags] if isinstance(tags, str) else tags,
                "log_dir": os.path.abspath(log_dir(settings)) if mode != "online" else folder,
                **{name: text_of(str(text), TEXT_CHARS_MAX[name]) for name, text in texts.items()},
            },
            environment=child_environment(folder, settings, url),
            api_key=key,
            url=url,
            ca_file=str(settings.get("ca_file") or ""),
            folder=folder,
            lock_path=lock_path(settings.get("lock_dir"), "swanlab", *identity),
            settle_s=float(settings.get("settle_s", SETTLE_S)),
        )


def above(rows: list[Row], tops: Mapping[str, int]) -> list[Row]:
    """What of the rows is above the last step of its key."""
    left = []
    for row in rows:
        scalars = {key: number for key, number in row.scalars.items() if row.step > tops.get(key, -1)}
        media = tuple(each for each in row.media if row.step > tops.get(each.key, -1))
        if scalars or media:
            left.append(replace(row, scalars=scalars, media=media))
    return left


def project_name(project: str) -> str:
    """The project's name as far as SwanLab takes it."""
    return component(project, PROJECT_FORBIDDEN, bytes_max=100) if project else "uncategorized"


def cuid(run_id: str) -> str:
    """The run's id at SwanLab: the same for the same run, of the 21 characters that all its versions take."""
    number = int.from_bytes(hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).digest(), "big")
    digits = []
    for _ in range(CUID_CHARS - 1):
        number, digit = divmod(number, len(CUID_DIGITS))
        digits.append(CUID_DIGITS[digit])
    return string.ascii_lowercase[number % 26] + "".join(digits)


def text_of(text: str, chars_max: int) -> str:
    """A name or a description as SwanLab takes it."""
    return FORBIDDEN.sub(" ", visible(text)).strip()[:chars_max].strip() or "unnamed"


def child_environment(folder: str, settings: Mapping[str, Any], url: str) -> dict[str, str]:
    """What the SDK sees: our settings, nobody else's; and no files of its own in the home folder. The key is told
    where no other process can look."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith("SWANLAB_")}
    web = settings.get("web_url") or os.environ.get("SWANLAB_WEB_HOST") or ""
    ours = {
        "SWANLAB_CONFIG_DIR": os.path.join(folder, "config"),
        "SWANLAB_ROOT": os.path.join(folder, "root"),
        "SWANLAB_WEB_HOST": str(web or ("" if url == DEFAULT_URL else url)),
    }
    return kept | {name: value for name, value in ours.items() if value}
