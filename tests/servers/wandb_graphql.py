"""The GraphQL operations of our wandb server: those the SDK sends, and the queries of our own backend.

Not a GraphQL engine: an operation is known by its name, a question about a run by the fields it asks for; the answer
holds all fields of that shape, asked for or not. Whatever is not known is refused with HTTP 400 and its name, because
the SDK would try anything else again for minutes.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from servers.wandb_store import EVENTS, LOGS, Artifact, Run, Store

NAME = re.compile(r"^\s*(?:query|mutation)\s+(\w+)", re.MULTILINE)
RUN_QUESTION = re.compile(r"\brun\s*\(.*\b(?:historyLineCount|stopped|history\s*\(|files\s*\()", re.DOTALL)
FILES_FIRST = 50  # the vendor's default page
SAMPLES = 500  # the vendor's default sample
STEP_END = 1 << 62


class RefusedError(Exception):
    """An answer that is no success: HTTP status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Call:
    """One operation with what it may use."""

    query: str
    variables: dict[str, Any]
    store: Store
    keep: Callable[[dict[str, Any]], None]
    entity: str  # of whoever asks
    url: str  # of this server
    now_s: float
    before_s: float | None  # lines that came later are not shown yet
    offers_questions: bool = True  # about a run's count, history and files

    @property
    def inputs(self) -> dict[str, Any]:
        """Variables, whether flat or wrapped in one `input`."""
        inputs: dict[str, Any] = self.variables.get("input") or self.variables
        return inputs

    def key(self, project: str = "projectName", run: str = "runName") -> str:
        entity = self.inputs.get("entityName") or self.inputs.get("entity") or self.entity
        return f"{entity}/{self.inputs[project]}/{self.inputs[run]}"

    def run(self, key: str) -> Run:
        if key not in self.store.runs:
            raise RefusedError(404, f"run {key} not found")
        return self.store.runs[key]

    def artifact(self) -> Artifact:
        artifact_id = self.inputs["artifactID"]
        if artifact_id not in self.store.artifacts:
            raise RefusedError(404, f"artifact {artifact_id} not found")
        return self.store.artifacts[artifact_id]


def answer(call: Call, operation: str | None) -> dict[str, Any]:
    """The `data` of the answer. Raises RefusedError."""
    found = NAME.search(call.query)
    name = operation or (found.group(1) if found else "")
    operate = OPERATIONS.get(name)
    if operate is None and call.offers_questions and RUN_QUESTION.search(call.query):
        operate = _question
    if operate is None:
        raise RefusedError(400, f"unknown operation: {name or call.query[:80]!r}")
    try:
        return operate(call)
    except KeyError as error:
        raise RefusedError(400, f"{name}: variable {error} is missing") from error


def _viewer(call: Call) -> dict[str, Any]:
    return {
        "viewer": {
            "id": opaque("User", call.entity),
            "entity": call.entity,
            "username": call.entity,
            "email": f"{call.entity}@example.org",
            "flags": "{}",
            "teams": {"edges": []},
        }
    }


def _features(_: Call) -> dict[str, Any]:
    return {"serverInfo": {"features": []}}


def _resume_status(call: Call) -> dict[str, Any]:
    entity = call.variables.get("entity") or call.entity
    project = call.variables["project"]
    run = call.store.runs.get(call.key("project", "name"))
    if not call.store.has_project(entity, project):
        return {"model": None}
    return {"model": {**_project(entity, project), "bucket": None if run is None else _resumable(call, run)}}


def _resumable(call: Call, run: Run) -> dict[str, Any]:
    lines = run.lines(call.before_s)
    events = run.streams.get(EVENTS, [])[: run.event_count(call.before_s)]
    return {
        "id": opaque("Run", run.key),
        "name": run.run_id,
        "summaryMetrics": run.summary(call.before_s),
        "displayName": run.display_name,
        "logLineCount": len(run.streams.get(LOGS, [])),
        "historyLineCount": len(lines),
        "eventsLineCount": len(events),
        "historyTail": json.dumps(lines[-1:]),
        "eventsTail": json.dumps(events[-1:]),
        "config": json.dumps(run.config),
        "tags": run.tags,
        "notes": run.notes,
        # Without `t`, the telemetry of the SDK, the SDK takes the run for one that never started.
        "wandbConfig": json.dumps({"t": run.config.get("_wandb", {}).get("value", {}).get("t")}),
    }


def _upsert_bucket(call: Call) -> dict[str, Any]:
    entity = call.variables.get("entity") or call.entity
    project = call.variables.get("project") or "uncategorized"
    run_id = call.variables.get("name") or secrets.token_hex(4)
    is_new = f"{entity}/{project}/{run_id}" not in call.store.runs
    sent = {key: value for key, value in call.variables.items() if value is not None}
    sent["config"] = parsed(sent.get("config") or "{}")
    parsed(sent.get("summaryMetrics") or "{}")
    call.keep(
        {"op": "upsert", "entity": entity, "project": project, "run_id": run_id, "at_s": call.now_s, "sent": sent}
    )
    run = call.store.runs[f"{entity}/{project}/{run_id}"]
    bucket = {
        "id": opaque("Run", run.key),
        "name": run.run_id,
        "displayName": run.display_name,
        "description": None,
        "config": json.dumps(run.config),
        "sweepName": None,
        "project": _project(entity, project),
        "historyLineCount": run.line_count(call.before_s),
    }
    return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}


def _create_run_files(call: Call) -> dict[str, Any]:
    run = call.run(call.key("project", "run"))
    names = call.variables["files"]
    call.keep({"op": "announce", "run": run.key, "names": names})
    files = [{"name": name, "uploadUrl": f"{call.url}/storage/runs/{quote(f'{run.key}/{name}')}"} for name in names]
    return {"createRunFiles": {"runID": opaque("Run", run.key), "uploadHeaders": [], "files": files}}


def _files_uploaded(_: Call) -> dict[str, Any]:
    return {"markRunFilesUploaded": {"success": True}}


def _question(call: Call) -> dict[str, Any]:
    """Any `project(…) { run(…) { … } }`: count, history, files, stopped."""
    run_variable = next((name for name in ("run", "runId", "runName", "name") if name in call.variables), "run")
    project_variable = "project" if "project" in call.variables else "projectName"
    run = call.store.runs.get(call.key(project_variable, run_variable))
    entity = call.inputs.get("entityName") or call.inputs.get("entity") or call.entity
    if not call.store.has_project(entity, call.variables[project_variable]):
        return {"project": None}
    return {"project": {"run": None if run is None else _run_answers(call, run)}}


def _run_answers(call: Call, run: Run) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "id": opaque("Run", run.key),
        "historyLineCount": run.line_count(call.before_s),
        "state": run.state,
        "stopped": False,
    }
    if re.search(r"\bhistory\s*\(", call.query):
        samples = call.variables.get("samples") or call.variables.get("pageSize") or SAMPLES
        end = call.variables.get("maxStep")
        lines = run.history(call.before_s, call.variables.get("minStep") or 0, STEP_END if end is None else end)
        answers["history"] = list(itertools.islice(lines, samples))
    if re.search(r"\bfiles\s*\(", call.query):
        names = call.variables.get("names") or sorted(run.files)
        nodes = [{"name": name, "sizeBytes": run.files[name] or 0} for name in names if name in run.files]
        answers["files"] = {"edges": [{"node": node} for node in nodes[: call.variables.get("first") or FILES_FIRST]]}
    return answers


def _artifact_type(_: Call) -> dict[str, Any]:
    return {"project": {"artifact": None, "artifactType": None}}


def _create_artifact(call: Call) -> dict[str, Any]:
    run = call.run(call.key())
    type_, name = call.inputs["artifactTypeName"], call.inputs["artifactCollectionName"]
    digest, client_id = call.inputs["digest"], call.inputs.get("clientID")
    versions = call.store.versions(run.key, type_, name)
    committed = [artifact for artifact in versions if artifact.committed]
    latest = {"id": committed[-1].artifact_id} if committed else None
    known = []
    if call.inputs.get("enableDigestDeduplication", True):
        known = [artifact for artifact in committed if artifact.digest == digest]
    known += [artifact for artifact in versions if client_id is not None and artifact.client_id == client_id]
    if known:
        artifact = known[0]
    else:
        artifact_id = opaque("Artifact", str(len(call.store.artifacts)))
        fields = {"artifact_id": artifact_id, "name": name, "type": type_, "digest": digest, "client_id": client_id}
        fields["metadata"] = parsed(call.inputs.get("metadata") or "{}")
        call.keep({"op": "create_artifact", "run": run.key, **fields})
        artifact = call.store.artifacts[artifact_id]
    aliases = [each["alias"] for each in call.inputs.get("aliases") or []]
    if aliases:
        call.keep({"op": "name_artifact", "artifact_id": artifact.artifact_id, "aliases": aliases})
    answer = {
        "id": artifact.artifact_id,
        "state": "COMMITTED" if artifact.committed else "PENDING",
        "artifactSequence": {"id": opaque("ArtifactSequence", f"{type_}/{name}"), "latestArtifact": latest},
    }
    return {"createArtifact": {"artifact": answer}}


def _create_artifact_manifest(call: Call) -> dict[str, Any]:
    artifact = call.artifact()
    file = {
        "id": opaque("File", artifact.artifact_id),
        "uploadUrl": f"{call.url}/storage/manifests/{quote(artifact.artifact_id)}",
        "uploadHeaders": [],
    }
    manifest = {"id": opaque("ArtifactManifest", artifact.artifact_id), "file": file}
    return {"createArtifactManifest": {"artifactManifest": manifest}}


def _create_artifact_files(call: Call) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    for wanted in call.inputs["artifactFiles"]:
        artifact_id, name = wanted["artifactID"], wanted["name"]
        if artifact_id not in call.store.artifacts:
            raise RefusedError(404, f"artifact {artifact_id} not found")
        path = f"{quote(artifact_id)}/{quote(name)}"
        nodes.append(
            {
                "storagePath": f"wandb_artifacts/{path}",
                "uploadUrl": f"{call.url}/storage/artifacts/{path}",
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": artifact_id},
            }
        )
    return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}


def _commit_artifact(call: Call) -> dict[str, Any]:
    artifact = call.artifact()
    if artifact.manifest_bytes is None:
        raise RefusedError(400, f"artifact {artifact.name} has no manifest")
    if not artifact.committed:
        call.keep({"op": "commit", "artifact_id": artifact.artifact_id})
    return {"commitArtifact": {"artifact": {"id": artifact.artifact_id, "digest": artifact.digest}}}


def parsed(text: str) -> dict[str, Any]:
    """Refuse what is no JSON object before the journal has it."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RefusedError(400, f"no JSON: {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise RefusedError(400, f"no JSON object: {text[:80]!r}")
    return value


def opaque(kind: str, name: str) -> str:
    """An id as the vendor's look: base64, not to be taken apart."""
    return base64.urlsafe_b64encode(f"{kind}:{name}".encode()).decode()


def _project(entity: str, project: str) -> dict[str, Any]:
    return {
        "id": opaque("Project", f"{entity}/{project}"),
        "name": project,
        "entity": {"id": opaque("Entity", entity), "name": entity},
    }


def _artifact_by_id(call: Call) -> dict[str, Any]:
    """What the SDK reads once more of an artifact that it has committed."""
    artifact = call.store.artifacts.get(call.variables["id"])
    if artifact is None:
        return {"artifact": None}
    entity, project, _ = artifact.run.split("/", 2)
    sequence = {
        "__typename": "ArtifactSequence",
        "id": opaque("ArtifactSequence", artifact.name),
        "name": artifact.name,
        "project": {
            "id": opaque("Project", project),
            "internalId": opaque("ProjectInternalId", project),
            "name": project,
            "entity": {"name": entity},
        },
    }
    told = {
        "__typename": "Artifact",
        "id": artifact.artifact_id,
        "artifactSequence": sequence,
        "versionIndex": 0,
        "artifactType": {"name": artifact.type},
        "description": None,
        "metadata": json.dumps(artifact.metadata),
        "ttlDurationSeconds": -2,
        "ttlIsInherited": True,
        "tags": [],
        "historyStep": None,
        "state": "COMMITTED" if artifact.committed else "PENDING",
        "size": sum(artifact.files.values()),
        "digest": artifact.digest,
        "digestAlgorithm": "MANIFEST_MD5",
        "commitHash": "",
        "fileCount": len(artifact.files),
        "createdAt": "2026-01-01T00:00:00",
        "updatedAt": None,
        "aliases": [{"id": alias, "alias": alias, "artifactCollection": sequence} for alias in artifact.aliases],
    }
    return {"artifact": told}


OPERATIONS: dict[str, Callable[[Call], dict[str, Any]]] = {
    "Viewer": _viewer,
    "ServerFeaturesQuery": _features,
    "RunResumeStatus": _resume_status,
    "UpsertBucket": _upsert_bucket,
    "CreateRunFiles": _create_run_files,
    "MarkRunFilesUploaded": _files_uploaded,
    "RunStoppedStatus": _question,
    "ArtifactType": _artifact_type,
    "CreateArtifact": _create_artifact,
    "CreateArtifactManifest": _create_artifact_manifest,
    "CreateArtifactFiles": _create_artifact_files,
    "CommitArtifact": _commit_artifact,
    "ArtifactByID": _artifact_by_id,
}
