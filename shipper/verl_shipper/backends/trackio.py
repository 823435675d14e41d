"""Backend `trackio`: one run per run in trackio's local store, which its dashboard shows (`trackio show`).

    run_start     configuration of the run, without secrets
    metrics       one row, at its step, with the time of capture
    system        a row of trackio's system metrics, whose page goes by time
    generations   traces `val/generations`: question and answer, score beside them
    span          a trace `rollout_trace/<name>`: messages, and everything else as metadata
    text          a report (Markdown)
    run_finish    an alert: info when the exit code is 0, else error; only rank 0 speaks for the run

Everything may be sent again at any time: a row carries its record's id as `log_id`, which is unique in the store; a
trace has its row's. Rows are written by the function that trackio's own server writes them with, in one transaction a
batch, fsynced. trackio's queue and threads, which drop what they could not send, are not used.

Local stores only. A trackio server answers before a row is stored when its database is busy, keeps it in memory, and
takes no time of capture; `trackio sync` brings a local store to a Space.

Settings: docs/configuration.md.

    trackio.py ── trackio_plan.py ── trackio_traces.py      what is stored
        └──────── trackio_store.py                          how it is stored

Must not know: cursors, backoff. On failure: Retry for a store that is busy, full or away; Park for one that is broken.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from verl_shipper.backends import trackio_diagnose
from verl_shipper.backends.base import Backend, Batch, Decided, Delivered, Limits, Memory, Outcome, Reject, RunInfo
from verl_shipper.backends.trackio_plan import CONFIG_OF, plan
from verl_shipper.backends.trackio_settings import NUMBERS_MAX, SETTINGS
from verl_shipper.backends.trackio_store import Store, decided, folder_of
from verl_shipper.checks import Finding
from verl_shipper.errors import ConfigError
from verl_shipper.schema import Key

VERSION_MIN = (0, 28)  # the first whose commits can be made to last over power loss


class TrackioBackend(Backend):
    """Delivers one run to a local trackio store."""

    name: ClassVar[str] = "trackio"
    settings_known: ClassVar[tuple[str | Key, ...] | None] = SETTINGS
    limits: ClassVar[Limits] = Limits(items_max=500)

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        if not folder_of(settings):
            raise ConfigError("trackio's folder has no name", where="backends.trackio.dir", hint="leave it out")
        if importlib.util.find_spec("trackio") is None:
            raise ConfigError("trackio is not installed", hint="pip install 'verl-shipper[trackio]'")
        version = importlib.metadata.version("trackio")
        if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < VERSION_MIN:
            needed = ".".join(map(str, VERSION_MIN))
            hint = "pip install -U 'verl-shipper[trackio]'"
            raise ConfigError(f"trackio {version} is too old, {needed} is needed", hint=hint)

    @classmethod
    def decide(cls, settings: Mapping[str, Any]) -> Decided:
        return decided(settings)

    @classmethod
    def diagnose(cls, settings: Mapping[str, Any]) -> Iterator[Finding]:
        return trackio_diagnose.findings(folder_of(settings))

    def __init__(self, run: RunInfo, settings: Mapping[str, Any], memory: Memory) -> None:
        super().__init__(run, settings, memory)
        self._store = Store(folder_of(settings), run)

    def open(self) -> Outcome | None:
        return self._store.open()

    def upload(self, batch: Batch) -> Outcome:
        made = plan(batch, self.memory.get(CONFIG_OF), self.settings.get("numbers_max", NUMBERS_MAX))
        failed = self._store.write(made)
        if failed is not None:
            return failed
        if made.refused:
            reasons = list(dict.fromkeys(made.refused.values()))
            return Reject("; ".join(reasons[:3]), sorted(made.refused), made.refused)
        return Delivered({} if made.config_of is None else {CONFIG_OF: made.config_of}, made.ignored)

    def watermark(self) -> Mapping[str, int]:
        return {}  # repeats are harmless

    def close(self) -> None:
        """Nothing is held between uploads."""
