"""Which run do files belong to that somebody pushes? Looks into spool folders, asks nobody.

    --run-id, VERL_SHIPPER_RUN_ID     that one; project and experiment from its streams, if there are any
    a process above us logs a run     that one: a hook of the trainer, a script that it started
    one run is alive in this spool    that one
    anything else                     an error that names what there is to choose from

Must not know: files, records. On failure: ConfigError.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from verl_shipper.errors import ConfigError
from verl_shipper.liveness import Life, judge, silent_s
from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.header import StreamHeader, is_stream_id, parent_of, read_header, start_ticks, this_process
from verl_shipper_spool.location import RUN_ID_VARIABLE, state_dir

ANCESTORS_MAX = 64
SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class RunName:
    """A run as streams name it. `project` and `experiment` are empty where the daemon decides."""

    run_id: str
    project: str = ""
    experiment: str = ""
    world: int = 1

    @property
    def label(self) -> str:
        names = "/".join(name for name in (self.project, self.experiment) if name)
        return f"{self.run_id} ({names})" if names else self.run_id


@dataclass(frozen=True, slots=True)
class Known:
    """A stream in a spool folder."""

    folder: str
    header: StreamHeader


def find_run(spool: str, run_id: str | None) -> RunName:
    """The run that is meant. Raises ConfigError when that cannot be told."""
    known = sorted(streams(spool), key=lambda each: each.header.created_ns)
    wanted = run_id or os.environ.get(RUN_ID_VARIABLE)
    if wanted:
        everywhere = [*streams(os.path.join(state_dir(spool), "spool")), *known]
        return _named([each for each in everywhere if each.header.run_id == wanted]) or RunName(wanted)
    above = _of_ancestor(known)
    if above is not None:
        return above
    living = [each for each in known if _is_alive(each)]
    if len({each.header.run_id for each in living}) == 1:
        found = _named(living)
        assert found is not None, "there is one"
        return found
    what = "several runs are alive" if living else "no run is alive"
    raise ConfigError(f"which run do these files belong to? {what} here", where=spool, hint=_choices(living or known))


def streams(folder: str) -> Iterator[Known]:
    """Streams in a spool folder, those that can be read."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError, CorruptionError):
            if is_stream_id(name):
                yield Known(path, read_header(path))


def _named(known: Iterable[Known]) -> RunName | None:
    """The run of these streams, oldest first; the last one that names a project is believed."""
    found: RunName | None = None
    for each in known:
        header = each.header
        if found is None or header.project or not found.project:
            found = RunName(header.run_id, header.project, header.experiment, header.world)
    return found


def _of_ancestor(known: list[Known]) -> RunName | None:
    """The run of the nearest process above us that logs one; of several, the latest."""
    here = this_process()
    pid = os.getppid()
    for _ in range(ANCESTORS_MAX):
        ticks = start_ticks(pid)
        if pid <= 0 or not ticks:
            return None
        found = [
            each
            for each in known
            if (each.header.process.pid, each.header.process.start_ticks) == (pid, ticks)
            and (each.header.process.boot_id, each.header.process.pid_namespace) == (here.boot_id, here.pid_namespace)
        ]
        if found:
            return _named([each for each in found if each.header.run_id == found[-1].header.run_id])
        pid = parent_of(pid)
    return None


def _is_alive(known: Known) -> bool:
    return judge(known.header.process, this_process(), silent_s(known.folder, time.time())) is not Life.GONE


def _choices(known: list[Known]) -> str:
    by_run: dict[str, list[Known]] = {}
    for each in known:
        by_run.setdefault(each.header.run_id, []).append(each)
    names = [found.label for each in reversed(by_run.values()) if (found := _named(each)) is not None]
    if not names:
        return "say --run-id RUN_ID, and --project and --experiment"
    more = f", and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return f"say --run-id RUN_ID: {', '.join(names[:SHOWN_MAX])}{more}"
