"""Which way a request to a tracker goes: what an address means, and which proxy it passes.

A proxy that was given, else `https_proxy`, `http_proxy`, `all_proxy` (small letters first), unless NO_PROXY names the
host: the rules that the trackers' own packages share.

Must not know: sockets. On failure: StepError, whose text shows no user, password or query.
"""

from __future__ import annotations

import base64
import ipaddress
import os
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

PORTS = {"http": 80, "https": 443}


class StepError(Exception):
    """A step on the way failed: what is so, and what to type next."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Target:
    scheme: str
    host: str
    port: int
    path: str  # with its query
    authorization: str = field(repr=False, default="")

    @property
    def place(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Route:
    """The way to a target. `text` tells it to a person; `variable` named the proxy (empty: the caller did), by
    `proxy_url`."""

    proxy: Target | None
    text: str
    variable: str = ""
    proxy_url: str = field(repr=False, default="")


def shown(url: str) -> str:
    """`url` as it may be printed: no user, password, query or fragment."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "[not an address]"
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"


def bypasses(host: str, port: int, no_proxy: str) -> bool:
    """Whether a NO_PROXY list names the host: *, names with all below them, addresses, networks, each with a port."""
    for entry in no_proxy.replace(" ", "").lower().split(","):
        if entry == "*":
            return True
        name, _, wanted_port = entry.rpartition(":") if entry.count(":") == 1 else (entry, "", "")
        if not name or (wanted_port and wanted_port != str(port)):
            continue
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(name.strip("[]"), strict=False):
                return True
        except ValueError:
            bare = name.lstrip("*").lstrip(".")
            if host.lower() == bare or host.lower().endswith(f".{bare}"):
                return True
    return False


def target_of(url: str, default_scheme: str = "") -> Target:
    text = url if "://" in url or not default_scheme else f"{default_scheme}://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port or PORTS.get(parts.scheme, 1080)
        host = parts.hostname
    except ValueError:
        raise StepError("the address cannot be read", "write http(s)://HOST[:PORT]") from None
    if not host or (parts.scheme not in PORTS and not default_scheme):
        raise StepError(f"{shown(text)} is no web address", "write http(s)://HOST[:PORT]")
    path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    return Target(parts.scheme, host, port, path, _basic(parts))


def route_to(target: Target, given: str | None) -> Route:
    if given:
        proxy = target_of(given, "http")
        return Route(proxy, f"by proxy {proxy.place}", proxy_url=_with_scheme(given))
    found, url = environment_proxy(target.scheme)
    if not url:
        return Route(None, "directly")
    if bypasses(target.host, target.port, no_proxy_list()):
        return Route(None, "directly (NO_PROXY)")
    proxy = target_of(url, "http")
    return Route(proxy, f"by proxy {proxy.place} ({found})", found, url)


def environment_proxy(scheme: str) -> tuple[str, str]:
    """The variable that names the proxy for a scheme, and the proxy; both empty when there is none."""
    for name in (f"{scheme}_proxy", "all_proxy"):
        found = next((each for each in (name, name.upper()) if each in os.environ), None)
        if found is not None and os.environ[found].strip():
            return found, _with_scheme(os.environ[found].strip())
    return "", ""


def no_proxy_list() -> str:
    return os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))


def _with_scheme(proxy: str) -> str:
    return proxy if "://" in proxy else f"http://{proxy}"


def _basic(parts: SplitResult) -> str:
    if not parts.username:
        return ""
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"
