"""Where a shipped file stands at a tracker that keeps files by their path. One rule for all of them.

    profiles/step_40/trace.json.gz              purpose "profile", step 40
    memory/no_step/snapshot.pickle.gz           purpose "memory", no step
    files/step_3/rank_1/eval/answers.jsonl      any other purpose; ranks above 0 have a folder of their own
    files/step_3/again_1f3a5c7e/answers.jsonl   the same path again, by another file

Each part of a name is made fit for a path; one that had to be changed carries a digest, and keeps its ending. A path
belongs to the file that came first, letters large or small; the places of the newest PLACES_MAX files are remembered.

Must not know: trackers. Never raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from verl_shipper.backends.file_assembly import Whole
from verl_shipper.backends.paths import component
from verl_shipper_spool.file_parts import MEMORY, PROFILE

PLACES_MAX = 2000
FOLDERS = {PROFILE: "profiles", MEMORY: "memory"}
ENDING = re.compile(r"(\.[A-Za-z0-9]{1,8}){1,3}$")
TRACE_ENDING = re.compile(r"(?<!\.pt\.trace)\.json(\.gz)?$")


class Places:
    """Who has which path of one run. `notes()` goes to the memory whenever `is_changed`."""

    def __init__(self, notes: Mapping[str, str] | None = None) -> None:
        self._owner_of: dict[str, str] = dict(notes or {})
        self.is_changed = False

    def place(self, whole: Whole, forbidden: re.Pattern[str]) -> str:
        """The path of a file, the same every time."""
        path = path_of(whole, forbidden)
        if not self._is_free(path.casefold(), whole.file_id):
            path = path_of(whole, forbidden, again=True)
        if self._owner_of.get(path.casefold()) != whole.file_id:
            self._owner_of[path.casefold()] = whole.file_id
            self.is_changed = True
        return path

    def notes(self) -> dict[str, str]:
        """What a later `Places` needs to give the same answers."""
        self.is_changed = False
        self._owner_of = dict(list(self._owner_of.items())[-PLACES_MAX:])
        return dict(self._owner_of)

    def _is_free(self, path: str, owner: str) -> bool:
        """Whether nobody else has this path, one above it, or one below."""
        if path in self._owner_of:
            return self._owner_of[path] == owner
        above = [path[: match.start()] for match in re.finditer("/", path)]
        return not any(each in self._owner_of for each in above) and not any(
            each.startswith(path + "/") for each in self._owner_of
        )


def path_of(whole: Whole, forbidden: re.Pattern[str], *, again: bool = False) -> str:
    """The path that a file wants; `again`: the one that no other file wants."""
    step = "no_step" if whole.step is None else f"step_{whole.step}"
    parts = [FOLDERS.get(whole.purpose, "files"), step]
    parts += [f"rank_{whole.rank}"] if whole.rank else []
    parts += [f"again_{whole.file_id[:8]}"] if again else []
    return "/".join([*parts, *(fit(part, forbidden) for part in whole.name.split("/"))])


def fit(name: str, forbidden: re.Pattern[str], *, bytes_max: int = 200) -> str:
    """One part of a name as a path component; its ending stays, since programs go by it."""
    clean = component(name, forbidden, bytes_max=bytes_max)
    ending = ENDING.search(name)
    if clean == name or ending is None or not ending.start() or len(ending[0]) > bytes_max // 2:
        return clean
    return component(name[: ending.start()], forbidden, bytes_max=bytes_max - len(ending[0])) + ending[0]


def trace_name(name: str) -> str:
    """A profiler's trace as TensorBoard and W&B know it: their viewers open `*.pt.trace.json` and nothing else."""
    return TRACE_ENDING.sub(lambda match: f".pt.trace.json{match[1] or ''}", name)
