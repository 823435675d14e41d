"""What `verl-shipper doctor` says, and how it asks a tracker: one HTTP request, taken apart.

    name lookup ─ TCP ─ [CONNECT through the proxy] ─ TLS ─ request ─ answer ─ clock

Each step has `timeout_s`; the first that fails is one line that names proxy, certificate, name lookup or whatever it
was, with what to type next. Proxies as in route.py. Trusted is the authority that was given, else those of
REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE, SSL_CERT_FILE, else the system's; and a further one beside them.

    answer = yield from probe(url, headers={...}, ca=settings.get("ca"))        in a backend's `diagnose`

Promises: certificates are always verified. No user name, password, query, header or body is ever in a finding.
Must not know: which tracker is asked. On failure: a Finding, and None for the answer; nothing is raised.
"""

from __future__ import annotations

import contextlib
import email.utils
import enum
import http.client
import importlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from urllib.parse import urljoin

from verl_shipper.route import PORTS, Route, StepError, Target, route_to, shown, target_of

STEP_S = 5.0
CLOCK_S = 5.0  # above it, points of two machines stand in the wrong order, and signed requests begin to be refused
BODY_BYTES_MAX = 64 * 1024
CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
HOSTNAME_MISMATCH, NOT_YET_VALID, EXPIRED = 62, 9, 10  # OpenSSL's verify codes


class Level(enum.Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `what` is the fact, `hint` what to type next (empty when there is nothing to do)."""

    level: Level
    what: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. Names of headers are in small letters; `body` has at most BODY_BYTES_MAX."""

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


def probe(
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    proxy: str | None = None,
    proxy_key: str = "",
    ca: str | None = None,
    more_ca: str | None = None,
    more_ca_key: str = "",
    timeout_s: float = STEP_S,
) -> Generator[Finding, None, Answer | None]:
    """Findings about one request to `url`; returns the answer, None when there was none.

    Any HTTP status but a proxy's own is an answer: whether 401 is bad is for the caller to say. `proxy` and `ca` (a
    file or folder) go before the environment's, `more_ca` (a file) is trusted beside them; the keys are the settings
    that they are from. Redirects are not followed.
    """
    began_s = time.monotonic()
    try:
        target = target_of(url)
        route = route_to(target, proxy)
        if proxy and proxy_key:
            route = replace(route, variable=proxy_key)
        if route.proxy is not None and route.proxy.scheme != "http":
            what = f"{shown(url)} is not checked: {route.text} speaks {route.proxy.scheme}, only http proxies are known"
            yield Finding(Level.WARN, what, f"try it: curl -v {shown(url)}")
            return None
        context, trust = _trusted(ca, more_ca, more_ca_key) if target.scheme == "https" else (None, "")
        sock = _open(target, route, context, trust, timeout_s)
        with sock:
            answer = _exchange(sock, target, route, method, headers or {}, body)
    except StepError as broken:
        yield Finding(Level.FAIL, broken.what, broken.hint)
        return None
    took = f"in {(time.monotonic() - began_s) * 1000:.0f} ms"
    by = f", certificate trusted by {trust}" if trust else ""
    yield _told(url, answer, f"{took}, {route.text}{by}")
    clock = clock_finding(answer, time.time())
    if clock is not None:
        yield clock
    return answer


def clock_finding(answer: Answer, now_s: float) -> Finding | None:
    """How this machine's clock differs from the server's; None when the server does not tell its own time."""
    if "age" in answer.headers:
        return None  # a cache's old answer
    try:
        theirs_s = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5  # whole seconds
    except (KeyError, TypeError, ValueError):
        return None
    ahead_s = now_s - theirs_s
    if abs(ahead_s) <= CLOCK_S:
        return Finding(Level.OK, f"clock agrees with the tracker's within {CLOCK_S:g} s")
    what = f"this machine's clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the tracker's"
    return Finding(Level.WARN, what, "look which one is wrong: timedatectl status")


def _open(target: Target, route: Route, context: ssl.SSLContext | None, trust: str, timeout_s: float) -> socket.socket:
    """A connection to speak HTTP over; over TLS when there is a context, which trusts whom `trust` names."""
    first = route.proxy or target
    sock = _connect(first, f"proxy {first.place}" if route.proxy else first.place, timeout_s)
    try:
        if context is None:
            return sock
        if route.proxy is not None:
            _tunnel(sock, target, route, route.proxy)
        return _secure(sock, context, target, route, trust)
    except BaseException:
        sock.close()
        raise


def _connect(target: Target, who: str, timeout_s: float) -> socket.socket:
    addresses = _looked_up(target, who, timeout_s)
    deadline_s = time.monotonic() + timeout_s
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        sock = socket.socket(family, kind, protocol)
        try:
            # The last address gets what the others left: one family that leads nowhere must not hide the other.
            sock.settimeout(max(deadline_s - time.monotonic(), 0.1) / (len(addresses) - index))
            sock.connect(address)
            sock.settimeout(timeout_s)
            return sock
        except OSError as error:
            sock.close()
            if index == len(addresses) - 1:
                _refused(error, target, who, timeout_s)
    raise StepError(f"{who} has no address", f"getent hosts {target.host}")


def _refused(error: OSError, target: Target, who: str, timeout_s: float) -> NoReturn:
    if isinstance(error, TimeoutError):
        what = f"no connection to {who} within {timeout_s:g} s: the host is down, or a firewall is between"
        raise StepError(what, "if a proxy is needed: export https_proxy=http://HOST:PORT") from error
    if isinstance(error, ConnectionRefusedError):
        what = f"nothing listens at {who} (connection refused)"
        raise StepError(what, f"start the server or correct the address; look: curl -v telnet://{target.place}")
    raise StepError(f"cannot connect to {who}: {error.strerror or error}", f"ip route get {target.host}") from error


def _looked_up(target: Target, who: str, timeout_s: float) -> list[Any]:
    """Addresses of a host. In a thread of its own: the resolver knows no time limit."""
    found: list[Any] = []

    def look() -> None:
        try:
            found.append(socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(error)

    thread = threading.Thread(target=look, name="name lookup", daemon=True)
    thread.start()
    thread.join(timeout_s)
    result = found[0] if found else TimeoutError(f"no answer within {timeout_s:g} s")
    if isinstance(result, Exception):
        why = (result.strerror if isinstance(result, OSError) else None) or result
        what = f"name lookup of {target.host} failed{f' (for {who})' if who != target.place else ''}: {why}"
        raise StepError(what, f"correct the name, or /etc/resolv.conf; look: getent hosts {target.host}")
    return list(result)


def _tunnel(sock: socket.socket, target: Target, route: Route, proxy: Target) -> None:
    """Have the proxy connect us to the target."""
    who = f"proxy {proxy.place}"
    lines = [f"CONNECT {target.place} HTTP/1.1", f"Host: {target.place}"]
    if proxy.authorization:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    try:
        sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        response = http.client.HTTPResponse(sock, method="CONNECT")
        response.begin()
        status = response.status
        response.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise StepError(f"{who} {_silence_of(error)}", f"is it an HTTP proxy? curl -v -x {proxy.place}") from error
    if status == 407:
        raise _wants_password(route, proxy)
    if not 200 <= status < 300:
        hint = f"let the proxy's owner allow it, or go past it: export NO_PROXY={target.host}"
        raise StepError(f"{who} does not connect us to {target.place}: it answers {status}", hint)


def _wants_password(route: Route, proxy: Target) -> StepError:
    what = "refuses its user and password" if proxy.authorization else "wants a user and a password"
    is_setting = "." in route.variable
    how = f"set {route.variable}: " if is_setting else f"export {route.variable}=" if route.variable else "write "
    hint = f"{how}http://USER:PASSWORD@{proxy.place} (other signs than letters and digits as %XX)"
    return StepError(f"proxy {proxy.place} {what} (407)", hint)


def _trusted(ca: str | None, more_ca: str | None, more_ca_key: str) -> tuple[ssl.SSLContext, str]:
    """Whom to trust: exactly the given file or folder, else the environment's, else the system; and one beside them."""
    named = {ca: "as configured"} if ca else {}
    if not ca:
        for name in CA_VARIABLES:
            if os.environ.get(name):
                named.setdefault(os.environ[name], name)
    words = [f"{path} ({origin})" for path, origin in named.items()] or ["the system's authorities"]
    if more_ca:
        more_ca = os.path.expanduser(more_ca)
        named[more_ca] = more_ca_key
        words.append(f"{more_ca} ({more_ca_key})")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not set(named) - {more_ca}:
        context.load_default_certs()
        with contextlib.suppress(ImportError, OSError):  # what Python packages trust besides
            context.load_verify_locations(importlib.import_module("certifi").where())
    for path, origin in named.items():
        _load(context, path, origin)
    return context, " and ".join(words)


def _load(context: ssl.SSLContext, path: str, origin: str) -> None:
    try:
        is_folder = os.path.isdir(path)
        context.load_verify_locations(cafile=None if is_folder else path, capath=path if is_folder else None)
    except OSError as error:  # SSLError is one
        why = "it holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror
        hint = f"give a PEM file; look: openssl x509 -noout -subject -in {path}"
        raise StepError(f"certificate authority {path} ({origin}) cannot be used: {why}", hint) from error


def _secure(sock: socket.socket, context: ssl.SSLContext, target: Target, route: Route, trust: str) -> ssl.SSLSocket:
    by = f", reached {route.text}," if route.proxy else ""
    try:
        return context.wrap_socket(sock, server_hostname=target.host)
    except ssl.SSLCertVerificationError as error:
        what = f"certificate of {target.place}{by} is not trusted: {error.verify_message}; trusted: {trust}"
        if error.verify_code == HOSTNAME_MISMATCH:
            raise StepError(what, "use the name that the certificate is made for") from error
        if error.verify_code in (NOT_YET_VALID, EXPIRED):
            raise StepError(what, "renew it, or set this machine's clock: timedatectl status") from error
        hint = "give its authority's PEM file as ca_file of the backend, or export SSL_CERT_FILE=/PATH/ca.pem"
        raise StepError(what, hint) from error
    except ssl.SSLError as error:
        what = f"no TLS with {target.place}{by}: {error.reason or type(error).__name__}"
        raise StepError(what, "if the server speaks plain HTTP, write http://") from error
    except (OSError, ValueError) as error:
        raise StepError(f"{target.place}{by} {_silence_of(error)} (TLS)", "is it an HTTPS server?") from error


def _exchange(
    sock: socket.socket,
    target: Target,
    route: Route,
    method: str,
    headers: Mapping[str, str],
    body: bytes | None,
) -> Answer:
    """The request and its answer over an open connection."""
    is_default_port = target.port == PORTS[target.scheme]
    host = target.place.rpartition(":")[0] if is_default_port else target.place
    sent = {"Host": host, "User-Agent": "verl-shipper-doctor", "Connection": "close"}
    path = target.path
    if route.proxy is not None and target.scheme == "http":
        path = f"http://{host}{target.path}"
        sent |= {"Proxy-Authorization": route.proxy.authorization} if route.proxy.authorization else {}
    sent |= {"Authorization": target.authorization} if target.authorization else {}
    who = f"proxy {route.proxy.place}" if path != target.path and route.proxy else target.place
    connection = http.client.HTTPConnection(target.host, target.port)
    connection.sock = sock
    try:
        connection.request(method, path, body, {**sent, **headers})
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        answer = Answer(response.status, found, _body(response, sock.gettimeout() or STEP_S))
    except (OSError, http.client.HTTPException) as error:
        raise StepError(f"{who} {_silence_of(error)}", f"look: curl -v {target.scheme}://{target.place}/") from error
    except ValueError as error:  # its text would show the header
        raise StepError("the key holds signs that no HTTP header can carry", "write it anew") from error
    finally:
        connection.close()
    if answer.status == 407 and route.proxy is not None:
        raise _wants_password(route, route.proxy)
    return answer


def _body(response: http.client.HTTPResponse, timeout_s: float) -> bytes:
    """The first bytes of the body: an answer may be a stream without end."""
    deadline_s = time.monotonic() + timeout_s
    content = b""
    while len(content) < BODY_BYTES_MAX and time.monotonic() < deadline_s:
        part = response.read1(BODY_BYTES_MAX - len(content))
        if not part:
            break
        content += part
    return content


def _silence_of(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "takes the connection and does not answer in time"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionError):
        return "closes the connection without an answer"
    if isinstance(error, http.client.HTTPException):
        return "answers something that is no HTTP"
    return f"cannot be talked to: {getattr(error, 'strerror', None) or type(error).__name__}"


def _told(url: str, answer: Answer, how: str) -> Finding:
    what = f"{shown(url)} answers {answer.status} {how}"
    if answer.status >= 500:
        return Finding(Level.WARN, what, "look again later; the daemon keeps everything and retries by itself")
    if 300 <= answer.status < 400:
        place = shown(urljoin(url, answer.headers.get("location", "")))
        return Finding(Level.WARN, f"{what} and sends us on to {place}", "configure that address instead")
    return Finding(Level.OK, what)
