"""What the wandb server has of a run, asked by the same GraphQL fields that wandb's public API uses.

    lines      historyLineCount: rows of the history. May lag behind what was accepted by seconds.
    history    rows by `_step`, which is the number of the line because we count so
    files      names and sizes of the run's files; one that is announced but not uploaded has no size
    state      running, finished, failed, crashed

A server that does not offer these (an old or a compatible one) is asked what the SDK itself asks before it resumes a
run; it has the count, but neither history nor files nor state.

Source of the fields: wandb 0.31, apis/public/runs.py and files.py.
Must not know: the SDK, batches. On failure: RefusedError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from verl_shipper.backends.base import Park, Retry
from verl_shipper.backends.sdk.http import Http, RefusedError

PAGE_ROWS = 1000
FILES_PER_QUESTION = 100

VIEWER = "query Viewer { viewer { id entity username } }"
RUN = """query ShipperRun($project: String!, $entity: String, $run: String!) {
  project(name: $project, entityName: $entity) { run(name: $run) { id historyLineCount state } }
}"""
HISTORY = """query ShipperHistory($project: String!, $entity: String, $run: String!,
    $minStep: Int64!, $maxStep: Int64!, $samples: Int!) {
  project(name: $project, entityName: $entity) { run(name: $run) {
    history(minStep: $minStep, maxStep: $maxStep, samples: $samples) } }
}"""
RESUME = """query RunResumeStatus($project: String, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) {
    id name entity { id name } bucket(name: $name, missingOk: true) { id name historyLineCount } }
}"""
FILES = """query ShipperFiles($project: String!, $entity: String, $run: String!, $names: [String], $first: Int) {
  project(name: $project, entityName: $entity) { run(name: $run) {
    files(names: $names, first: $first) { edges { node { name sizeBytes } } } } }
}"""


@dataclass(frozen=True, slots=True)
class RunAddress:
    """Where a run is at wandb."""

    entity: str
    project: str
    run_id: str


@dataclass(frozen=True, slots=True)
class RunState:
    """What the server says of a run; `state` is empty when it does not tell."""

    lines: int
    state: str


class NotOfferedError(Exception):
    """The server does not know the question."""


class WandbApi:
    """Questions with one key. `who` names the key's origin to people."""

    def __init__(self, http: Http, key: str, who: str) -> None:
        self._http = http
        self._key = key
        self._hint = f"the key is from {who}; put a valid one there"
        self._offers = dict.fromkeys((RUN, HISTORY, FILES), True)

    def entity(self) -> str:
        """The account or team that the key writes to when nobody says otherwise."""
        viewer = self._ask(VIEWER, {}).get("viewer")
        if not isinstance(viewer, dict):
            raise RefusedError(Park(f"key refused by {self._http.base_url}; {self._hint}"), 401)
        entity = viewer.get("entity") or viewer.get("username")
        if not entity:
            raise RefusedError(Park("this key has no entity of its own; set backends.wandb.entity"))
        return str(entity)

    def run(self, address: RunAddress) -> RunState | None:
        """The run as the server shows it now; None when there is none."""
        try:
            run = self._run(RUN, address, {})
        except NotOfferedError:
            return self._resumable(address)
        if run is None:
            return None
        return RunState(int(run.get("historyLineCount") or 0), str(run.get("state") or ""))

    def _resumable(self, address: RunAddress) -> RunState | None:
        """The same in the SDK's own words."""
        where = {"entity": address.entity, "project": address.project, "name": address.run_id}
        model = self._ask(RESUME, where).get("model")
        bucket = model.get("bucket") if isinstance(model, dict) else None
        return RunState(int(bucket.get("historyLineCount") or 0), "") if isinstance(bucket, dict) else None

    def history(self, address: RunAddress, start: int, end: int) -> Iterator[dict[str, Any]]:
        """Rows `start` .. `end - 1`. Raises RefusedError (Retry) when the server does not show all of them yet, and
        NotOfferedError when it shows none."""
        while start < end:
            page_end = min(start + PAGE_ROWS, end)
            page = {"minStep": start, "maxStep": page_end, "samples": PAGE_ROWS}
            lines = (self._run(HISTORY, address, page) or {}).get("history") or []
            if len(lines) != page_end - start:
                raise RefusedError(Retry(f"wandb shows {len(lines)} of rows {start} to {page_end} of its history"))
            yield from (json.loads(line) for line in lines)
            start = page_end

    def uploaded(self, address: RunAddress, names: Iterable[str]) -> set[str]:
        """Those of `names` that the server has with their content; all, when it does not tell."""
        wanted = list(names)
        found: set[str] = set()
        for start in range(0, len(wanted), FILES_PER_QUESTION):
            part = wanted[start : start + FILES_PER_QUESTION]
            try:
                run = self._run(FILES, address, {"names": part, "first": len(part)}) or {}
            except NotOfferedError:
                return set(wanted)
            nodes = [edge.get("node") or {} for edge in (run.get("files") or {}).get("edges") or []]
            found.update(str(node["name"]) for node in nodes if int(node.get("sizeBytes") or 0) > 0)
        return found.intersection(wanted)

    def close(self) -> None:
        self._http.close()

    def _run(self, query: str, address: RunAddress, more: dict[str, Any]) -> dict[str, Any] | None:
        if not self._offers[query]:
            raise NotOfferedError
        where = {"entity": address.entity, "project": address.project, "run": address.run_id}
        try:
            project = self._ask(query, {**where, **more}).get("project")
        except RefusedError as refused:
            if refused.status != 400:
                raise
            self._resumable(address)  # it answers questions, so it is this one that it does not know
            self._offers[query] = False
            raise NotOfferedError from refused
        run = project.get("run") if isinstance(project, dict) else None
        return run if isinstance(run, dict) else None

    def _ask(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        content = {"query": query, "variables": variables}
        answer = self._http.ask("POST", "/graphql", key_hint=self._hint, json=content, auth=("api", self._key))
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict) or answer.get("errors"):
            # A GraphQL server says so in a 200 when it does not know a field.
            raise RefusedError(Retry(f"wandb answered a question with {json.dumps(answer)[:200]}"), 400)
        return data
