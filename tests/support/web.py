"""A web server behind a private authority's certificate, and a proxy that wants a password: the odd networks of P31.

    authority = Authority(folder)                        makes ca.pem with the openssl command
    WebServer(authority.certificate("localhost"))        https; WebServer() is plain http
    PasswordProxy("svc", "password")                     CONNECT and plain requests; user None: takes everybody
    proxy.names["wandb.test"] = "127.0.0.1"              names that only the proxy can look up
    proxy.connects                                       how often it was asked for each host, with the answer

All on 127.0.0.1 and a free port, each a context manager that leaves no thread. What the server answers can be changed
at any time; what came in is noted.

Must not know: what the product sends. On failure: CalledProcessError or OSError.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import http.client
import select
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, final
from urllib.parse import urlsplit

CA_CONFIG = """
[req]
distinguished_name = name
x509_extensions = authority
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@final
class Authority:
    """A certificate authority of our own; nobody trusts it unless told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ca.cnf").write_text(CA_CONFIG)
        self._openssl("req", "-x509", *NEW_KEY, "-config", "ca.cnf", "-subj", "/CN=Private Authority", "-days", "2")

    def certificate(self, name: str, *more: str, days: int = 1) -> Path:
        """Certificate and key for a host name, or several, in one PEM file."""
        names = ", ".join(f"DNS:{each}" for each in (name, *more))
        (self.folder / "leaf.cnf").write_text(
            f"subjectAltName = {names}\nbasicConstraints = CA:FALSE\nauthorityKeyIdentifier = keyid\n"
            "subjectKeyIdentifier = hash\nextendedKeyUsage = serverAuth\n"
        )
        request = ["req", *NEW_KEY, "-config", "ca.cnf", "-subj", f"/CN={name}"]
        self._openssl(*request, key="leaf.key", out="leaf.csr")
        sign = ["x509", "-req", "-in", "leaf.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
        self._openssl(*sign, "-extfile", "leaf.cnf", "-days", str(days), key="", out="leaf.pem")
        path = self.folder / f"{name}.pem"
        path.write_text((self.folder / "leaf.pem").read_text() + (self.folder / "leaf.key").read_text())
        return path

    def _openssl(self, *arguments: str, key: str = "ca.key", out: str = "ca.pem") -> None:
        keys = ("-keyout", key) if key else ()
        subprocess.run(["openssl", *arguments, *keys, "-out", out], cwd=self.folder, check=True, capture_output=True)


@dataclass(slots=True)
class Reply:
    """What a WebServer answers. `clock_shift_s`: how far its clock is ahead."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"fine"
    clock_shift_s: float = 0.0


class _Serving:
    """A threading server that lives as long as its `with` block."""

    scheme = "http"

    def __init__(
        self, handler: type[BaseHTTPRequestHandler], context: ssl.SSLContext | None = None, port: int = 0
    ) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []  # request line and headers, names in small letters
        self._server = _Server(("127.0.0.1", port), handler)
        self._server.owner = self
        self._server.context = context
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="web")
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"{self.scheme}://localhost:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    owner: Any
    context: ssl.SSLContext | None

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(20)
        if self.context is not None:
            request = self.context.wrap_socket(request, server_side=True)
        with request:
            super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that does not trust us goes away in the middle; that is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def note(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.owner.requests.append((self.requestline, headers))

    def reply(self, reply: Reply) -> None:
        self.send_response_only(reply.status)
        self.send_header("Date", email.utils.formatdate(time.time() + reply.clock_shift_s, usegmt=True))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, *_: object) -> None:
        pass


class _WebHandler(_Handler):
    def _serve(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.note()
        self.reply(self.server.owner.reply)

    do_GET = do_POST = _serve  # noqa: N815


@final
class WebServer(_Serving):
    """Answers every request with `reply`. With a certificate: over TLS."""

    def __init__(self, certificate: Path | None = None) -> None:
        context = None
        if certificate is not None:
            self.scheme = "https"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
        self.reply = Reply()
        super().__init__(_WebHandler, context)


class _ProxyHandler(_Handler):
    def _is_welcome(self) -> bool:
        self.note()
        status: int = self.server.owner.status(self.headers.get("Proxy-Authorization", ""))
        if status:
            self.reply(Reply(status, {"Proxy-Authenticate": 'Basic realm="proxy"'}))
        return status == 0

    def do_CONNECT(self) -> None:
        host, _, port = self.path.rpartition(":")
        is_welcome = self._is_welcome()
        self.server.owner.connects[host, is_welcome] += 1
        if not is_welcome:
            return
        host = self.server.owner.names.get(host, host)
        with socket.create_connection((host, int(port)), timeout=20) as upstream:
            self.send_response_only(200, "Connection established")
            self.end_headers()
            ends = {self.connection: upstream, upstream: self.connection}
            while True:
                for end in select.select(list(ends), [], [], 20)[0]:
                    content = b""
                    with contextlib.suppress(OSError):
                        content = end.recv(65536)
                        ends[end].sendall(content)
                    if not content:
                        return

    def do_GET(self) -> None:
        if not self._is_welcome():
            return
        parts = urlsplit(self.path)
        connection = http.client.HTTPConnection(parts.netloc, timeout=20)
        connection.request("GET", parts.path or "/")
        answer = connection.getresponse()
        self.reply(Reply(answer.status, {}, answer.read()))
        connection.close()


@final
class PasswordProxy(_Serving):
    """An HTTP proxy. `refuses`: a status that everybody gets, 0 for none."""

    def __init__(self, user: str | None = None, password: str = "", *, port: int = 0) -> None:
        self.refuses = 0
        self.names: dict[str, str] = {}
        self.connects: Counter[tuple[str, bool]] = Counter()  # by host, and whether the password was right
        pair = base64.b64encode(f"{user}:{password}".encode()).decode()
        self._wanted = f"Basic {pair}" if user is not None else None
        super().__init__(_ProxyHandler, port=port)

    def status(self, authorization: str) -> int:
        """What a request with this header is answered with, 0: it is passed on."""
        return 407 if self._wanted not in (None, authorization) else self.refuses
