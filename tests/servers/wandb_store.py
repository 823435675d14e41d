"""What our wandb server holds: runs, their lines and files, artifacts. Pure: no HTTP, no clock, no disk.

    apply(change)    one journalled change; `op` names the method below that takes the other keys
    Run.…(before_s)  what a reader is shown of lines that came before this time: counts lag at the vendor's

History lines lie at `offset + i`, as at the vendor's: a line sent again with the same content is a rewrite, with
another content a conflict, and an offset behind the end leaves a gap (holes are None). All three are counted. Lines of
events (what the SDK sends of a machine) lie in the same way; of these only lines overwritten by others are counted.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

HISTORY = "wandb-history.jsonl"
EVENTS = "wandb-events.jsonl"
LOGS = "output.log"
SUMMARY = "wandb-summary.json"
SUMMARIES_MAX = 64  # how many past summaries a lagging reader may be shown


@dataclass(slots=True)
class Run:
    """One run, found by `key`: entity/project/run id."""

    entity: str
    project: str
    run_id: str
    display_name: str
    group: str | None = None
    job_type: str | None = None
    notes: str | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)  # as sent: {key: {"value": …}}
    state: str = "running"
    exit_code: int | None = None
    created: int = 0
    streams: dict[str, list[str | None]] = field(default_factory=dict)
    stored_s: list[float] = field(default_factory=list)  # of each history line: when it came first,
    steps: list[int] = field(default_factory=list)  # and its `_step`
    events_s: list[float] = field(default_factory=list)  # of each line of events: when it came first
    event_conflicts: int = 0
    summaries: list[tuple[float, str]] = field(default_factory=list)
    rewrites: int = 0
    conflicts: int = 0
    gaps: int = 0
    files: dict[str, int | None] = field(default_factory=dict)  # None: announced, not uploaded

    @property
    def key(self) -> str:
        return f"{self.entity}/{self.project}/{self.run_id}"

    def lines(self, before_s: float | None = None) -> list[str | None]:
        lines = self.streams.get(HISTORY, [])
        return lines if before_s is None else lines[: bisect_right(self.stored_s, before_s)]

    def line_count(self, before_s: float | None = None) -> int:
        return len(self.streams.get(HISTORY, [])) if before_s is None else bisect_right(self.stored_s, before_s)

    def event_count(self, before_s: float | None = None) -> int:
        return len(self.events_s) if before_s is None else bisect_right(self.events_s, before_s)

    def summary(self, before_s: float | None = None) -> str:
        shown = [text for stored_s, text in self.summaries if before_s is None or stored_s <= before_s]
        return shown[-1] if shown else "{}"

    def history(self, before_s: float | None, step_min: int, step_end: int) -> Iterator[str]:
        """Lines, as stored, whose `_step` is in [step_min, step_end)."""
        for line, step in zip(self.lines(before_s), self.steps, strict=False):
            if line is not None and step_min <= step < step_end:
                yield line

    def write(self, name: str, offset: int, content: list[str], at_s: float) -> None:
        if name == SUMMARY:
            self.summaries = [*self.summaries, *((at_s, text) for text in content)][-SUMMARIES_MAX:]
            return
        lines = self.streams.setdefault(name, [])
        if name == EVENTS:
            self.event_conflicts += sum(
                old not in (None, new) for old, new in zip(lines[offset:], content, strict=False)
            )
            self.events_s += [at_s] * (offset + len(content) - len(lines))
        if name != HISTORY:  # a console may well overwrite its last line
            lines += [None] * (offset - len(lines))
            lines[offset : offset + len(content)] = content
            return
        if offset > len(lines):
            self.gaps += 1
            self._extend(offset - len(lines), at_s)
        self._extend(offset + len(content) - len(lines), at_s)
        for index, line in enumerate(content, start=offset):
            if lines[index] is not None:
                self.rewrites += lines[index] == line
                self.conflicts += lines[index] != line
            lines[index] = line
            self.steps[index] = json.loads(line).get("_step", 0)

    def _extend(self, count: int, at_s: float) -> None:
        self.streams[HISTORY] += [None] * count
        self.stored_s += [at_s] * count
        self.steps += [0] * count

    def told(self) -> dict[str, Any]:
        """This run as JSON for a test."""
        return {
            "history": [None if line is None else json.loads(line) for line in self.lines()],
            "lines": self.line_count(),
            "events": [None if line is None else json.loads(line) for line in self.streams.get(EVENTS, [])],
            "event_conflicts": self.event_conflicts,
            "rewrites": self.rewrites,
            "conflicts": self.conflicts,
            "gaps": self.gaps,
            "config": {key: _value(entry) for key, entry in self.config.items()},
            "display_name": self.display_name,
            "group": self.group,
            "job_type": self.job_type,
            "tags": self.tags,
            "notes": self.notes,
            "state": self.state,
            "exit_code": self.exit_code,
            "files": {name: size for name, size in sorted(self.files.items()) if size is not None},
            "summary": json.loads(self.summary()),
            "created": self.created,
        }


@dataclass(slots=True)
class Artifact:
    """One version of an artifact."""

    artifact_id: str
    name: str  # of its collection: entity/project/type/name tell collections apart
    type: str
    digest: str
    run: str
    client_id: str | None
    committed: bool = False
    files: dict[str, int] = field(default_factory=dict)  # uploaded ones
    manifest_bytes: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    aliases: list[str] = field(default_factory=list)  # each on one version of a collection

    def told(self) -> dict[str, Any]:
        return {
            "artifact_id": self.artifact_id,
            "name": self.name,
            "type": self.type,
            "aliases": sorted(self.aliases),
            "metadata": self.metadata,
            "digest": self.digest,
            "state": "COMMITTED" if self.committed else "PENDING",
            "run": self.run,
            "files": sorted(self.files),
        }


class Store:
    """All runs and artifacts."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.artifacts: dict[str, Artifact] = {}
        self.upload_bytes = 0

    def apply(self, change: dict[str, Any]) -> None:
        arguments = {key: value for key, value in change.items() if key != "op"}
        getattr(self, f"_{change['op']}")(**arguments)

    def told(self) -> dict[str, Any]:
        return {
            "runs": {key: run.told() for key, run in self.runs.items()},
            "artifacts": [artifact.told() for artifact in self.artifacts.values()],
            "uploads_bytes": self.upload_bytes,
        }

    def has_project(self, entity: str, project: str) -> bool:
        return any((run.entity, run.project) == (entity, project) for run in self.runs.values())

    def versions(self, run: str, type_: str, name: str) -> list[Artifact]:
        """All versions of the collection that `run` would write to, oldest first."""
        project = run.rsplit("/", 1)[0]
        return [
            artifact
            for artifact in self.artifacts.values()
            if (artifact.run.rsplit("/", 1)[0], artifact.type, artifact.name) == (project, type_, name)
        ]

    def _upsert(self, entity: str, project: str, run_id: str, at_s: float, sent: dict[str, Any]) -> None:
        key = f"{entity}/{project}/{run_id}"
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = Run(entity, project, run_id, sent.get("displayName") or run_id)
            run.created += 1
        run.display_name = sent.get("displayName") or run.display_name
        run.group = sent.get("groupName") or run.group
        run.job_type = sent.get("jobType") or run.job_type
        run.notes = sent.get("notes") or run.notes
        run.tags = run.tags if sent.get("tags") is None else sent["tags"]
        run.state = sent.get("state") or "running"
        if sent.get("config"):
            run.config = sent["config"]
        if sent.get("summaryMetrics"):
            run.write(SUMMARY, 0, [sent["summaryMetrics"]], at_s)

    def _stream(self, run: str, at_s: float, sent: dict[str, Any]) -> None:
        written = self.runs[run]
        for name, part in (sent.get("files") or {}).items():
            written.write(name, part["offset"], part["content"], at_s)
        if sent.get("complete"):
            written.exit_code = sent.get("exitcode")
            written.state = "failed" if written.exit_code else "finished"
        else:
            written.state = "running"

    def _announce(self, run: str, names: list[str]) -> None:
        for name in names:
            self.runs[run].files.setdefault(name, None)

    def _put_file(self, run: str, name: str, size_bytes: int) -> None:
        self.runs[run].files[name] = size_bytes
        self.upload_bytes += size_bytes

    def _create_artifact(self, **fields: Any) -> None:
        artifact = Artifact(**fields)
        self.artifacts[artifact.artifact_id] = artifact

    def _name_artifact(self, artifact_id: str, aliases: list[str]) -> None:
        """Aliases move to this version from the others of its collection."""
        named = self.artifacts[artifact_id]
        for version in self.versions(named.run, named.type, named.name):
            version.aliases = [alias for alias in version.aliases if alias not in aliases]
        named.aliases += aliases

    def _put_artifact(self, artifact_id: str, name: str, size_bytes: int) -> None:
        self.artifacts[artifact_id].files[name] = size_bytes
        self.upload_bytes += size_bytes

    def _put_manifest(self, artifact_id: str, size_bytes: int) -> None:
        self.artifacts[artifact_id].manifest_bytes = size_bytes
        self.upload_bytes += size_bytes

    def _commit(self, artifact_id: str) -> None:
        self.artifacts[artifact_id].committed = True


def _value(entry: Any) -> Any:
    return entry["value"] if isinstance(entry, dict) and "value" in entry else entry
