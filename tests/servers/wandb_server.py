"""A small wandb server, as far as the SDK's runs, tables, media and artifacts need one.

    POST /graphql                                      servers/wandb_graphql.py
    POST /files/{entity}/{project}/{run}/file_stream   lines at their offsets; `complete` ends the run
    PUT  /storage/…                                    bodies of files, at URLs that /graphql handed out

Options: `api_key` (None: any), `entity` (of whoever logs in), `lag_s` (how long new lines stay out of counts, history
and resume information), `offers_questions` (False: only what the SDK asks is answered, as an old server would). A wrong
key meets 401 everywhere, but a storage URL is its own permission, as at the vendor's.
Bodies lie below `folder/storage`, each complete before the journal names it. Must not know: what our product sends.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from servers.app import TrackerServer, main
from servers.faults import CONTROL
from servers.wandb_graphql import Call, RefusedError, answer, parsed
from servers.wandb_store import HISTORY, Store

STORAGE = "/storage/"


class WandbServer(TrackerServer):
    """wandb for tests."""

    def __init__(self, folder: Path) -> None:
        self.store = Store()
        super().__init__(folder)

    @classmethod
    def defaults(cls) -> Mapping[str, Any]:
        return {"api_key": None, "entity": "tester", "lag_s": 0.0, "offers_questions": True}

    def apply(self, change: dict[str, Any]) -> None:
        self.store.apply(change)

    def state(self) -> dict[str, Any]:
        return self.store.told()

    def routes(self) -> list[web.RouteDef]:
        run = "/{entity}/{project}/{run}"
        return [
            web.post("/graphql", self._graphql),
            web.post(f"/files{run}/file_stream", self._file_stream),
            web.put(f"/storage/runs{run}/{{name:.+}}", self._put_file),
            web.put("/storage/artifacts/{artifact}/{name:.+}", self._put_artifact),
            web.put("/storage/manifests/{artifact}", self._put_manifest),
            web.route("*", "/{rest:.*}", self._unknown),
        ]

    def app(self) -> web.Application:
        app = super().app()
        app.middlewares.append(self._authorise)
        return app

    @web.middleware
    async def _authorise(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        key = self.options["api_key"]
        sent = request.headers.get("Authorization")
        is_free = request.path.startswith(CONTROL) or (sent is None and request.path.startswith(STORAGE))
        if key is not None and not is_free and sent != "Basic " + base64.b64encode(f"api:{key}".encode()).decode():
            return _refuse(401, "user is not logged in")
        try:
            return await handler(request)
        except RefusedError as error:
            return _refuse(error.status, str(error))

    async def _graphql(self, request: web.Request) -> web.Response:
        sent = parsed(await request.text())
        now_s = time.time()
        call = Call(
            query=sent.get("query") or "",
            variables=sent.get("variables") or {},
            store=self.store,
            keep=self.keep,
            entity=self.options["entity"],
            url=f"{request.scheme}://{request.host}",
            now_s=now_s,
            before_s=now_s - self.options["lag_s"] if self.options["lag_s"] else None,
            offers_questions=self.options["offers_questions"],
        )
        return web.json_response({"data": answer(call, sent.get("operationName"))})

    async def _file_stream(self, request: web.Request) -> web.Response:
        run = self._run(request)
        sent = parsed(await request.text())
        files = sent.get("files") or {}
        for line in files.get(HISTORY, {}).get("content", []):
            parsed(line)
        if files or sent.get("complete"):  # the rest is heartbeats
            self.keep({"op": "stream", "run": run, "at_s": time.time(), "sent": sent})
        return web.json_response({"exitcode": None, "limits": {}})

    async def _put_file(self, request: web.Request) -> web.Response:
        run, name = self._run(request), request.match_info["name"]
        size_bytes = await self._save(request, f"runs/{run}/{name}")
        self.keep({"op": "put_file", "run": run, "name": name, "size_bytes": size_bytes})
        return web.json_response({})

    async def _put_artifact(self, request: web.Request) -> web.Response:
        artifact_id, name = self._artifact(request), request.match_info["name"]
        size_bytes = await self._save(request, f"artifacts/{artifact_id}/{name}")
        self.keep({"op": "put_artifact", "artifact_id": artifact_id, "name": name, "size_bytes": size_bytes})
        return web.json_response({})

    async def _put_manifest(self, request: web.Request) -> web.Response:
        artifact_id = self._artifact(request)
        size_bytes = await self._save(request, f"manifests/{artifact_id}")
        self.keep({"op": "put_manifest", "artifact_id": artifact_id, "size_bytes": size_bytes})
        return web.json_response({})

    async def _unknown(self, request: web.Request) -> web.Response:
        return _refuse(404, f"{request.method} {request.path} does not exist")

    def _run(self, request: web.Request) -> str:
        key = "/".join(request.match_info[part] for part in ("entity", "project", "run"))
        if key not in self.store.runs:
            raise RefusedError(404, f"run {key} not found")
        return key

    def _artifact(self, request: web.Request) -> str:
        artifact_id = request.match_info["artifact"]
        if artifact_id not in self.store.artifacts:
            raise RefusedError(404, f"artifact {artifact_id} not found")
        return artifact_id

    async def _save(self, request: web.Request, name: str) -> int:
        """Body to its place below the folder, all of it or nothing."""
        if ".." in Path(name).parts:
            raise RefusedError(400, f"{name} is no name for a file")
        path = self.folder / "storage" / name
        body = await request.read()
        torn = self.folder / "incoming"
        torn.write_bytes(body)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(torn, path)
        except OSError as error:
            raise RefusedError(400, f"{name} is no name for a file: {error}") from error
        return len(body)


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"errors": [{"message": message}], "error": message}, status=status)


if __name__ == "__main__":
    main(WandbServer)
