"""A small HTTP server on 127.0.0.1 that can be sick in chosen ways, and healthy by passing on to a real server.

    HANG        takes the connection and never answers           RATE_LIMIT  429 with Retry-After
    RESET       resets the connection                            PASS        forwards to `upstream`
    ERROR       500                                              SWALLOW     forwards, then hides the answer
    BUSY        503

`mode` may change at any time, also under a kept-alive connection: the next request feels it. Every request is noted.
Must not know: what the product sends. On an upstream that is gone: 502.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import socket
import struct
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, final
from urllib.parse import urlsplit

UPSTREAM_S = 60.0
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close throws the connection away


class Mode(enum.Enum):
    """How the server behaves."""

    HANG = "hang"
    RESET = "reset"
    ERROR = "error"
    BUSY = "busy"
    RATE_LIMIT = "rate limit"
    PASS = "pass"
    SWALLOW = "swallow"


STATUS = {Mode.ERROR: 500, Mode.BUSY: 503, Mode.RATE_LIMIT: 429}


@dataclass(frozen=True, slots=True)
class Request:
    """One request that came in, with what was done to it."""

    time_s: float
    method: str
    path: str
    mode: Mode


@final
class FaultServer:
    """Starts at once on a free port; use it as a context manager."""

    def __init__(self, upstream: str | None = None, mode: Mode = Mode.PASS, retry_after_s: int = 2) -> None:
        self.upstream = urlsplit(upstream).netloc if upstream else None
        self.mode = mode
        self.retry_after_s = retry_after_s
        self.requests: list[Request] = []
        self.closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fault-http")
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def seen(self, mode: Mode) -> int:
        """How many requests met this mode."""
        return sum(request.mode is mode for request in list(self.requests))

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.cut_connections()
        self._server.server_close()
        self._thread.join(timeout=10)

    def __enter__(self) -> FaultServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # `server_close` waits for every handler: no thread outlives the test
    request_queue_size = 64
    owner: FaultServer

    def __init__(self, *arguments: Any) -> None:
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()  # guards _open, which handlers and `close` both change
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.discard(request)
        if request.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, len(ABORT)) == ABORT:
            self.close_request(request)  # without a shutdown first: RST instead of FIN
        else:
            super().shutdown_request(request)

    def cut_connections(self) -> None:
        with self._guard:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    HOP_BY_HOP: ClassVar[set[str]] = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}

    def _serve(self) -> None:
        owner = self.server.owner
        mode = owner.mode
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        owner.requests.append(Request(time.monotonic(), self.command, self.path, mode))
        match mode:
            case Mode.HANG:
                while owner.mode is Mode.HANG and not owner.closing.wait(0.05):
                    pass
                self._reset()
            case Mode.RESET:
                self._reset()
            case Mode.PASS:
                self._forward(body)
            case Mode.SWALLOW:
                self._exchange(body)
                self._reset()
            case _:
                headers = {"Retry-After": str(owner.retry_after_s)} if mode is Mode.RATE_LIMIT else {}
                self._answer(STATUS[mode], headers, b'{"error_code":"INTERNAL_ERROR","message":"scripted"}')

    # http.server finds its methods by these names.
    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _forward(self, body: bytes) -> None:
        exchanged = self._exchange(body)
        if exchanged is None:
            self._answer(502, {}, b"no upstream")
        else:
            self._answer(*exchanged)

    def _exchange(self, body: bytes) -> tuple[int, dict[str, str], bytes] | None:
        upstream = self.server.owner.upstream
        if upstream is None:
            return None
        connection = http.client.HTTPConnection(upstream, timeout=UPSTREAM_S)
        try:
            headers = {key: value for key, value in self.headers.items() if key.lower() not in self.HOP_BY_HOP}
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            kept = {key: value for key, value in answer.getheaders() if key.lower() not in self.HOP_BY_HOP}
            return answer.status, kept, answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        """RST instead of FIN: what a proxy that dies sends."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@final
class BlackHole:
    """Takes TCP connections by its backlog and never reads a byte: the purest hang there is."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> BlackHole:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
