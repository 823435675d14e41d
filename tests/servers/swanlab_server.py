"""A small SwanLab: the paths that swanlab 0.10 and its OpenAPI use, under /api, with faults at will.

    api_key   None: every key may log in; else only this one, and sessions opened with another key get 401
    lag_s     how old a row must be before summaries and read-back show it (the real service: 5 to 10 s)
    username  who logs in

An experiment is created with 201, found again with 200 and then RUNNING again; what it was first created with stays.
A POST of metrics is stored whole or refused whole. Objects are PUT to a signed URL of this server's own address, never
to the address that the client used: the real ones go to another host as well. Errors are JSON {code, message}.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from aiohttp import web

from servers.app import TrackerServer, main
from servers.swanlab_readback import Reader, columns
from servers.swanlab_store import Project, Row, Run, object_name, rows_of, seen, summary, told

SESSION_S = 30 * 24 * 3600  # far beyond the 7 days below which the client logs in before every request
DESCRIBED = ("description", "labels", "job", "cluster", "colors")
STATES = {"FINISHED", "CRASHED", "ABORTED", "RUNNING"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RefusedError(Exception):
    """An answer other than 2xx."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class SwanlabServer(TrackerServer):
    """SwanLab for tests."""

    def __init__(self, folder: Path) -> None:
        self.projects: dict[str, Project] = {}
        self.runs: dict[str, Run] = {}
        self.sessions: dict[str, str] = {}
        self.objects: dict[str, int] = {}
        self.reader = Reader(self._run_of, self._seen)
        super().__init__(folder)

    @classmethod
    def defaults(cls) -> Mapping[str, Any]:
        return {"api_key": None, "lag_s": 0, "username": "tester"}

    def state(self) -> dict[str, Any]:
        return {
            "runs": {cuid: told(run, self.projects[run.project]) for cuid, run in self.runs.items()},
            "objects": self.objects,
            "projects": [f"{project.workspace}/{project.name}" for project in self.projects.values()],
        }

    def routes(self) -> list[web.RouteDef]:
        run, files, house = "/api/project/{user}/{project}/runs/{id}", "/api/experiment/{id}/files", "/api/house"
        return [
            web.post("/api/login/api_key", self._answering(self._login, known=False)),
            web.get("/api/project/{user}/{project}", self._answering(self._project)),
            web.post("/api/projects/{user}", self._answering(self._create_project)),
            web.post("/api/project/{user}/{project}/experiment", self._answering(self._create_run)),
            web.get(run, self._answering(self._run)),
            web.put(f"{run}/profile", self._answering(self._profile)),
            web.put(f"{run}/state", self._answering(self._state_of_run)),
            web.post("/api/projects/{user}/{project}/series", self._answering(self._series)),
            web.post(f"{house}/metrics", self._answering(self._metrics)),
            web.get(f"{house}/metrics/summaries/{{pid}}/{{id}}", self._answering(self._summary)),
            web.post(f"{house}/experiments/{{id}}/heartbeat", self._answering(self._heartbeat)),
            web.post(f"{house}/metrics/{{kind:scalar|scalar/value|media}}", self._answering(self._read)),
            web.post(f"{house}/metrics/scalar/export", self._answering(self._export)),
            web.get(f"{house}/metrics/log", self._answering(self._read_logs)),
            web.get("/api/experiment/{id}/column", self._answering(self._columns)),
            web.post("/api/resources/presigned/{verb:put|get}", self._answering(self._sign)),
            web.post("/api/files/presigned/get", self._answering(self._sign)),
            web.post(f"{files}/{{step:prepare|prepare-multipart}}", self._answering(self._prepare)),
            web.post(f"{files}/{{step:complete|complete-multipart}}", self._answering(self._complete)),
            web.put("/objects/{path:.+}", self._answering(self._put_object, known=False)),
            web.get("/objects/{path:.+}", self._answering(self._get_object, known=False)),
            web.route("*", "/{path:.*}", self._answering(self._unknown, known=False)),
        ]

    # -- state -----------------------------------------------------------------------------------------------------

    def apply(self, change: dict[str, Any]) -> None:
        getattr(self, f"_apply_{change['what']}")(change)

    def _apply_login(self, change: dict[str, Any]) -> None:
        self.sessions[change["sid"]] = change["key"]

    def _apply_project(self, change: dict[str, Any]) -> None:
        self.projects[change["cuid"]] = Project(
            change["cuid"], change["workspace"], change["name"], change["visibility"]
        )

    def _apply_create(self, change: dict[str, Any]) -> None:
        cuid, project = change["cuid"], change["project"]
        if cuid not in self.runs:
            self.runs[cuid] = Run(cuid, project, change["name"], change["created_at"], change["described"])
            self.projects[project].runs.append(cuid)
        self.runs[cuid].state = "RUNNING"
        self.runs[cuid].created += 1

    def _apply_profile(self, change: dict[str, Any]) -> None:
        self.runs[change["run"]].profile.update(change["profile"])

    def _apply_state(self, change: dict[str, Any]) -> None:
        self.runs[change["run"]].state = change["state"]

    def _apply_series(self, change: dict[str, Any]) -> None:
        series = self.projects[change["project"]].series
        for entry in change["series"]:
            series.setdefault(entry["key"], entry)

    def _apply_metrics(self, change: dict[str, Any]) -> None:
        rows = self.runs[change["run"]].rows(change["kind"])
        for key, row in rows_of(change["kind"], change["metrics"], change["at_s"]):
            rows.setdefault(key, []).append(row)

    def _apply_heartbeat(self, change: dict[str, Any]) -> None:
        self.runs[change["run"]].heartbeats += 1

    def _apply_save(self, change: dict[str, Any]) -> None:
        self.runs[change["run"]].saves[change["path"]] = change["state"]

    def _apply_object(self, change: dict[str, Any]) -> None:
        self.objects[change["path"]] = change["size"]

    # -- every request ---------------------------------------------------------------------------------------------

    def _answering(self, handler: Handler, *, known: bool = True) -> Handler:
        """`handler` with its refusals as JSON, and with a session asked for when `known`."""

        @functools.wraps(handler)
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                if known:
                    self._check_session(request)
                return await handler(request)
            except RefusedError as error:
                return web.json_response({"code": error.code, "message": error.message}, status=error.status)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                return web.json_response({"code": "Bad_Request", "message": f"{error!r}"}, status=400)

        return answer

    def _check_session(self, request: web.Request) -> None:
        key = self.sessions.get(request.cookies.get("sid", ""))
        if key is None or self.options["api_key"] not in {None, key}:
            raise RefusedError(401, "Unauthorized", "log in first")

    async def _unknown(self, request: web.Request) -> web.Response:
        raise RefusedError(404, "Not_Found", f"no {request.method} {request.path}")

    def _project_of(self, request: web.Request) -> Project:
        workspace, name = request.match_info["user"], request.match_info["project"]
        for project in self.projects.values():
            if (project.workspace, project.name) == (workspace, name):
                return project
        raise RefusedError(404, "Resource_Not_Found", f"no project {workspace}/{name}")

    def _run_of(self, cuid: str, project: str | None = None) -> Run:
        run = self.runs.get(cuid)
        if run is None or project not in {None, run.project}:
            raise RefusedError(404, "Resource_Not_Found", f"no experiment {cuid} in project {project}")
        return run

    def _seen(self, rows: list[Row], created_at: str | int) -> list[Row]:
        return seen(rows, self.options["lag_s"], int(created_at))

    # -- log in, projects, experiments -------------------------------------------------------------------------------

    async def _login(self, request: web.Request) -> web.Response:
        key = request.headers.get("authorization", "")
        if not key or self.options["api_key"] not in {None, key}:
            raise RefusedError(401, "Unauthorized", "wrong api key")
        sid = secrets.token_hex(16)
        self.keep({"what": "login", "sid": sid, "key": key})
        expires = datetime.now(timezone.utc) + timedelta(seconds=SESSION_S)
        return web.json_response(
            {
                "sid": sid,
                "expiredAt": expires.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                "userInfo": {"username": self.options["username"]},
            }
        )

    async def _project(self, request: web.Request) -> web.Response:
        project = self._project_of(request)
        return web.json_response(
            {
                "cuid": project.cuid,
                "name": project.name,
                "path": f"/{project.workspace}/{project.name}",
                "visibility": project.visibility,
                "version": 1,
                "group": {"username": project.workspace},
                "_count": {"experiments": len(project.runs), "contributors": 1, "collaborators": 0, "clones": 0},
            }
        )

    async def _create_project(self, request: web.Request) -> web.Response:
        body, workspace = await request.json(), request.match_info["user"]
        cuid = "p" + hashlib.sha256(f"{workspace}/{body['name']}".encode()).hexdigest()[:20]
        status = 200 if cuid in self.projects else 201
        if status == 201:
            change = {"cuid": cuid, "workspace": workspace, "name": body["name"], "visibility": body["visibility"]}
            self.keep({"what": "project", **change})
        return web.json_response({"cuid": cuid, "name": body["name"]}, status=status)

    async def _create_run(self, request: web.Request) -> web.Response:
        project, body = self._project_of(request), await request.json()
        cuid = body.get("cuid") or secrets.token_hex(10)
        if cuid in self.runs and self.runs[cuid].project != project.cuid:
            raise RefusedError(409, "Conflict", f"experiment {cuid} belongs to another project")
        status = 200 if cuid in self.runs else 201
        self.keep(
            {
                "what": "create",
                "cuid": cuid,
                "project": project.cuid,
                "name": body["name"],
                "created_at": body["createdAt"],
                "described": {name: body.get(name) for name in DESCRIBED},
            }
        )
        return web.json_response(self._told_run(self.runs[cuid]), status=status)

    def _told_run(self, run: Run) -> dict[str, Any]:
        fields = {"cuid": run.cuid, "slug": run.cuid, "name": run.name, "createdAt": run.created_at}
        return {**fields, "state": run.state, "profile": run.profile, **run.described}

    async def _run(self, request: web.Request) -> web.Response:
        run = self._run_of(request.match_info["id"], self._project_of(request).cuid)
        return web.json_response(self._told_run(run))

    async def _profile(self, request: web.Request) -> web.Response:
        run = self._run_of(request.match_info["id"], self._project_of(request).cuid)
        profile = dict(await request.json())
        if unknown := profile.keys() - {"config", "metadata", "requirements", "conda"}:
            raise RefusedError(400, "Bad_Request", f"unknown profile {sorted(unknown)}")
        self.keep({"what": "profile", "run": run.cuid, "profile": profile})
        return web.json_response({})

    async def _state_of_run(self, request: web.Request) -> web.Response:
        run, body = self._run_of(request.match_info["id"], self._project_of(request).cuid), await request.json()
        if body["state"] not in STATES:
            raise RefusedError(400, "Bad_Request", f"unknown state {body['state']}")
        self.keep({"what": "state", "run": run.cuid, "state": body["state"]})
        return web.json_response({})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self.keep({"what": "heartbeat", "run": self._run_of(request.match_info["id"]).cuid})
        return web.json_response({})

    # -- metrics -----------------------------------------------------------------------------------------------------

    async def _series(self, request: web.Request) -> web.Response:
        project, series = self._project_of(request), (await request.json())["series"]
        if len(series) > 3000 or not all(entry["key"] and entry["type"] for entry in series):
            raise RefusedError(400, "Bad_Request", "at most 3000 series, each with a key and a type")
        self.keep({"what": "series", "project": project.cuid, "series": series})
        return web.json_response({}, status=201)

    async def _metrics(self, request: web.Request) -> web.Response:
        body = await request.json()
        run, kind = self._run_of(body["experimentId"], body["projectId"]), body["type"]
        if kind not in {"scalar", "media", "log"}:
            raise RefusedError(400, "Bad_Request", f"unknown type {kind}")
        at_s = time.time()
        rows_of(kind, body["metrics"], at_s)  # whole or not at all
        self.keep({"what": "metrics", "run": run.cuid, "kind": kind, "metrics": body["metrics"], "at_s": at_s})
        return web.json_response({})

    async def _summary(self, request: web.Request) -> web.Response:
        run = self._run_of(request.match_info["id"], request.match_info["pid"])
        return web.json_response(summary(run, self.options["lag_s"], int(request.query["createdAt"])))

    async def _read(self, request: web.Request) -> web.Response:
        body, kind = await request.json(), request.match_info["kind"]
        answer = {"scalar": self.reader.scalars, "scalar/value": self.reader.values, "media": self.reader.media}
        return web.json_response(answer[kind](body))

    async def _export(self, request: web.Request) -> web.Response:
        path = f"exports/{secrets.token_hex(8)}.csv"
        self._store(path, self.reader.table(await request.json()))
        return web.json_response({"cosKey": path})

    async def _read_logs(self, request: web.Request) -> web.Response:
        return web.json_response(self.reader.logs(request.query))

    async def _columns(self, request: web.Request) -> web.Response:
        run = self._run_of(request.match_info["id"])
        return web.json_response(columns(run, self.projects[run.project], request.query))

    # -- objects -----------------------------------------------------------------------------------------------------

    async def _sign(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.match_info.get("verb") == "put":
            prefix = f"{self._run_of(body['experimentId']).cuid}/"
        else:  # the reader's prefix is "project/experiment", that of an export is empty
            prefix = f"{body['prefix'].rpartition('/')[2]}/" if body.get("prefix") else ""
        return web.json_response({"urls": [self._url(request, prefix + path) for path in body["paths"]]})

    async def _prepare(self, request: web.Request) -> web.Response:
        cuid, files = self._run_of(request.match_info["id"]).cuid, (await request.json())["files"]
        paths = [f"{cuid}/files/{entry['path']}" for entry in files]
        if request.match_info["step"] == "prepare":
            return web.json_response({"urls": [self._url(request, path) for path in paths]})
        uploads = [
            {
                "uploadId": secrets.token_hex(8),
                "parts": [
                    {"partNumber": part, "url": self._url(request, f"{path}.part{part}")}
                    for part in range(1, entry["count"] + 1)
                ],
            }
            for path, entry in zip(paths, files, strict=True)
        ]
        return web.json_response({"files": uploads})

    async def _complete(self, request: web.Request) -> web.Response:
        cuid = self._run_of(request.match_info["id"]).cuid
        for entry in (await request.json())["files"]:
            path = f"{cuid}/files/{entry['path']}"
            if "parts" in entry:
                parts = [self._file(f"{path}.part{part['partNumber']}").read_bytes() for part in entry["parts"]]
                self._store(path, b"".join(parts))
            elif entry["state"] == "UPLOADED" and path not in self.objects:
                raise RefusedError(404, "Resource_Not_Found", f"{path} was not uploaded")
            state = entry.get("state", "UPLOADED")
            self.keep({"what": "save", "run": cuid, "path": entry["path"], "state": state})
        return web.json_response({}, status=201)

    async def _put_object(self, request: web.Request) -> web.Response:
        path, content = request.match_info["path"], await request.read()
        self._check_signature(request)
        self._store(path, content)
        return web.Response(headers={"ETag": f'"{hashlib.md5(content).hexdigest()}"'})

    async def _get_object(self, request: web.Request) -> web.StreamResponse:
        self._check_signature(request)
        if request.match_info["path"] not in self.objects:
            raise RefusedError(404, "NoSuchKey", "no such object")
        return web.FileResponse(self._file(request.match_info["path"]))

    def _url(self, request: web.Request, path: str) -> str:
        host, port = request.transport.get_extra_info("sockname")[:2] if request.transport else ("127.0.0.1", 0)
        if request.scheme == "https":  # by name, which the certificate is for
            return f"https://{request.host}/objects/{urllib.parse.quote(path)}?sign={_signature(path)}"
        return f"http://{host}:{port}/objects/{urllib.parse.quote(path)}?sign={_signature(path)}"

    def _check_signature(self, request: web.Request) -> None:
        if request.query.get("sign") != _signature(request.match_info["path"]):
            raise RefusedError(403, "SignatureDoesNotMatch", "ask for a signed URL")

    def _file(self, path: str) -> Path:
        return self.folder / "objects" / object_name(path)

    def _store(self, path: str, content: bytes) -> None:
        file = self._file(path)
        file.parent.mkdir(exist_ok=True)
        unfinished = file.with_name(f".{secrets.token_hex(8)}")
        unfinished.write_bytes(content)
        unfinished.rename(file)
        self.keep({"what": "object", "path": path, "size": len(content)})


def _signature(path: str) -> str:
    return hashlib.sha256(f"swanlab {path}".encode()).hexdigest()[:16]


if __name__ == "__main__":
    main(SwanlabServer)
