"""A server in front of another one: whatever a healthy upstream never does is done here by rule.

    upstream     where requests go, http://HOST:PORT
    per_window   [requests, window_s, retry_after_s]: more than that in a window meets 429 with Retry-After

The rules of servers/faults.py come first; SWALLOW and LOST pass a request on and hide the answer. `state()` tells of
every request that came as far as here: {"method", "path", "time_s", "limited"}. Must not know: any tracker. Without an
upstream that answers: 502.
"""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from servers.app import TrackerServer, main

UPSTREAM_S = 60.0
HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host", "content-encoding"})


class ForwardServer(TrackerServer):
    """Any HTTP server, made sick from outside."""

    def __init__(self, folder: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        self._window_began_s = 0.0
        self._in_window = 0
        super().__init__(folder)

    @classmethod
    def defaults(cls) -> Mapping[str, Any]:
        return {"upstream": None, "per_window": None}

    def apply(self, change: dict[str, Any]) -> None:
        """Nothing is kept."""

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def routes(self) -> list[web.RouteDef]:
        return [web.route("*", "/{rest:.*}", self._forward)]

    async def _forward(self, request: web.Request) -> web.Response:
        limited = self._is_over()
        self.seen.append(
            {"method": request.method, "path": request.path_qs, "time_s": time.monotonic(), "limited": limited}
        )
        if limited:
            headers = {"Retry-After": f"{self.options['per_window'][2]:g}"}
            return web.json_response({"error_code": "REQUEST_LIMIT_EXCEEDED"}, status=429, headers=headers)
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        return await asyncio.to_thread(self._exchange, request.method, request.raw_path, headers, body)

    def _is_over(self) -> bool:
        if self.options["per_window"] is None:
            return False
        most, window_s, _ = self.options["per_window"]
        now_s = time.monotonic()
        if now_s - self._window_began_s >= window_s:
            self._window_began_s, self._in_window = now_s, 0
        self._in_window += 1
        return bool(self._in_window > most)

    def _exchange(self, method: str, path: str, headers: dict[str, str], body: bytes) -> web.Response:
        connection = http.client.HTTPConnection(urlsplit(self.options["upstream"]).netloc, timeout=UPSTREAM_S)
        try:
            connection.request(method, path, body or None, {**headers, "Accept-Encoding": "identity"})
            answer = connection.getresponse()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP}
            return web.Response(status=answer.status, body=answer.read(), headers=kept)
        except (OSError, http.client.HTTPException) as error:
            return web.Response(status=502, text=f"{type(error).__name__}: {error}")
        finally:
            connection.close()


if __name__ == "__main__":
    main(ForwardServer)
