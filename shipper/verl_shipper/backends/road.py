"""The way to one tracker over HTTP, the same for our own questions, its package in a child, and uploads.

    trusted    what the environment names (REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE, SSL_CERT_FILE), else the authorities of
               the system and of certifi; and beside them the setting `ca_file`
    proxy      the one that was given, else the environment's, unless NO_PROXY names the host (route.py)

Python's `requests`, Go's net/http and MLflow each read these in a dialect of their own; here they are read once, and
told to each in its own words. Certificates are always verified.

Must not know: which tracker. On failure: ConfigError for files that cannot be used; `culprit` turns what a request
raised into one line that names proxy, certificate or name lookup, without passwords.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.checks import CA_VARIABLES
from verl_shipper.errors import ConfigError
from verl_shipper.route import Route, StepError, Target, bypasses, environment_proxy, no_proxy_list, route_to, target_of

# Where systems keep all their authorities in one file, as Go looks for them.
SYSTEM_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
CHILD_VARIABLES = (*CA_VARIABLES, "AWS_CA_BUNDLE")
CERTIFICATE = re.compile(
    rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----.+?-----END (?:TRUSTED )?CERTIFICATE-----", re.DOTALL
)
TUNNEL = re.compile(r"Tunnel connection failed: (\d{3})")
LINKS_MAX = 50
BUNDLE = "authorities-"


@dataclass(frozen=True, slots=True)
class Culprit:
    """What stands in the way. `is_lasting`: the operator must act, waiting alone will not help."""

    text: str
    is_lasting: bool


@dataclass(frozen=True, slots=True)
class Road:
    """How to get to a tracker. `where` is the section of its settings, `folder` a place for a file of authorities."""

    where: str
    ca_file: str = ""
    proxy: str = field(default="", repr=False)
    proxy_key: str = ""
    folder: str = ""
    base_files: tuple[str, ...] = ()  # trusted beside the environment's: a tracker's own variable

    def arguments(self, url: str) -> dict[str, Any]:
        """What `requests` is to be told for this address, on which its own environment has no say."""
        route = self._route(url)
        proxy = route.proxy_url if route is not None else ""
        return {"verify": self.authorities(url) or True, "proxies": {"http": proxy, "https": proxy}}

    def probing(self) -> dict[str, Any]:
        """The same for checks.probe."""
        given = {"proxy": self.proxy, "proxy_key": f"{self.where}.{self.proxy_key}"} if self.proxy else {}
        return given | ({"more_ca": self.ca_file, "more_ca_key": f"{self.where}.ca_file"} if self.ca_file else {})

    def environment(self, url: str) -> dict[str, str]:
        """What a process is to find in its environment to take the same way. An empty value: as if it were not set."""
        told = self._proxy_environment(url)
        path = self.authorities(url)
        if path is not None:
            told |= dict.fromkeys(CHILD_VARIABLES, path)
            if os.path.isdir(path):
                del told["SSL_CERT_FILE"]
                told["SSL_CERT_DIR"] = path
        return told

    def authorities(self, url: str) -> str | None:
        """The file (or the environment's folder) with all that is trusted; None where nobody is asked."""
        if not url.startswith("https://"):
            return None
        named = self._named()
        if len(named) == 1 and not self.ca_file:
            return named[0]
        files = (named or _usual_files()) + ([self.ca_file] if self.ca_file else [])
        return _bundle(files, self.folder) if files else None

    def trusted(self) -> str:
        """The same in words."""
        ours = os.path.join(self.folder, BUNDLE)
        named = ["those of the environment" if path.startswith(ours) else path for path in self._named()]
        named = named or ["the system's authorities"]
        return " and ".join(named + ([f"{self.ca_file} ({self.where}.ca_file)"] if self.ca_file else []))

    def culprit(self, error: BaseException, url: str) -> Culprit | None:
        """Who is to blame for what a request to `url` raised; None when it is none of these."""
        asked = getattr(getattr(error, "request", None), "url", None)
        try:
            target = target_of(asked if isinstance(asked, str) else url)
            route = route_to(target, self.proxy or None)
        except StepError as broken:
            return Culprit(f"{broken.what}; {broken.hint}", is_lasting=True)
        for link in _links(error):
            found = self._blamed(link, target, route)
            if found is not None:
                return found
        return None

    def refusal(self, status: int, url: str) -> Culprit | None:
        """The same for an answer: 407 is a proxy's, never a tracker's."""
        route = self._route(url)
        return self._wants_password(route) if status == 407 and route is not None and route.proxy is not None else None

    def _blamed(self, link: BaseException, target: Target, route: Route) -> Culprit | None:
        proxy = route.proxy
        if isinstance(link, ssl.SSLCertVerificationError):
            by = f", reached {route.text}," if proxy else ""
            hint = f"give its authority's PEM file as {self.where}.ca_file"
            what = f"certificate of {target.place}{by} is not trusted: {link.verify_message}; trusted: {self.trusted()}"
            return Culprit(f"{what}; {hint}", is_lasting=True)
        first, who = proxy or target, f"proxy {proxy.place}" if proxy else target.place
        if isinstance(link, socket.gaierror):
            for_whom = f" (for {who}{self._named_by(route)})" if proxy else ""
            return Culprit(f"name lookup of {first.host} failed{for_whom}: {link.strerror or link}", is_lasting=False)
        tunnel = TUNNEL.search(str(link)) if isinstance(link, OSError) and proxy else None
        if tunnel is not None and tunnel[1] == "407":
            return self._wants_password(route)
        if tunnel is not None:
            what = f"{who} does not connect us to {target.place}: it answers {tunnel[1]}"
            return Culprit(f"{what}; let its owner allow it, or name the host in NO_PROXY", is_lasting=False)
        if isinstance(link, ConnectionRefusedError) and proxy:
            return Culprit(f"nothing listens at {who}{self._named_by(route)} (connection refused)", is_lasting=False)
        if type(link).__name__ in ("ConnectTimeoutError", "ConnectTimeout") and proxy:
            return Culprit(f"no connection to {who}{self._named_by(route)} in time", is_lasting=False)
        if type(link).__name__ == "ProxyError" and proxy and not list(_links(link))[1:]:
            return Culprit(f"{who}{self._named_by(route)} does not let us through", is_lasting=False)
        return None

    def _named(self) -> list[str]:
        """What the environment trusts, each once."""
        return list(dict.fromkeys(filter(None, (*map(os.environ.get, CA_VARIABLES), *self.base_files))))

    def _wants_password(self, route: Route) -> Culprit:
        assert route.proxy is not None, "asked for a proxy only"
        what = "refuses its user and password" if route.proxy.authorization else "wants a user and a password"
        name = route.variable or f"{self.where}.{self.proxy_key}"
        hint = f"set {name} to http://USER:PASSWORD@{route.proxy.place}"
        return Culprit(f"proxy {route.proxy.place} {what} (407); {hint}", is_lasting=True)

    def _named_by(self, route: Route) -> str:
        return f" ({route.variable or f'{self.where}.{self.proxy_key}'})"

    def _route(self, url: str) -> Route | None:
        try:
            return route_to(target_of(url), self.proxy or None)
        except StepError:
            return None  # the request itself will say so

    def _proxy_environment(self, url: str) -> dict[str, str]:
        told: dict[str, str] = {}
        for scheme in ("http", "https"):
            found = self.proxy or environment_proxy(scheme)[1]
            if found:
                told |= {f"{scheme}_proxy": found, f"{scheme.upper()}_PROXY": found}
        if not told:
            return {}
        told |= {"all_proxy": "", "ALL_PROXY": ""}
        names = [] if self.proxy else [part for part in no_proxy_list().replace(" ", "").split(",") if part]
        with contextlib.suppress(StepError):
            target = target_of(url)
            if bypasses(target.host, target.port, ",".join(names)) and target.host not in names:
                names.append(target.host)  # by name, which every dialect knows
        return told | {"no_proxy": ",".join(names), "NO_PROXY": ",".join(names)}


def road_of(name: str, settings: Mapping[str, Any], *, proxy_key: str = "") -> Road:
    """The way to backend `name` by its settings. Raises ConfigError for a `ca_file` that cannot be used."""
    where = f"backends.{name}"
    given = settings.get("ca_file")
    if given is not None and (not isinstance(given, str) or not given):
        raise ConfigError(f"ca_file is {given!r}", where=f"{where}.ca_file", hint="give the path of a PEM file")
    ca_file = os.path.abspath(os.path.expanduser(given)) if given else ""
    if ca_file:
        _require_pem(ca_file, f"{where}.ca_file")
    folder = settings.get("work_dir") or settings.get("lock_dir")
    folder = folder or os.path.join(os.path.expanduser("~"), ".cache", "verl-shipper")
    proxy = str(settings.get(proxy_key) or "") if proxy_key else ""
    if proxy:
        _require_proxy(proxy, f"{where}.{proxy_key}")
    return Road(where, ca_file, proxy, proxy_key, str(folder))


def _require_pem(path: str, where: str) -> None:
    hint = f"look: openssl x509 -noout -subject -in {path}"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{path} holds no certificate in PEM form", where=where, hint=hint) from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", where=where, hint=f"ls -l {path}") from error


def _require_proxy(proxy: str, where: str) -> None:
    try:
        target_of(proxy, "http")
    except StepError as error:
        hint = "write http://[USER:PASSWORD@]HOST:PORT"
        raise ConfigError(f"the proxy cannot be used: {error.what}", where=where, hint=hint) from error


def _usual_files() -> list[str]:
    """What is trusted when nobody says whom."""
    usual = [path for path in SYSTEM_FILES if os.path.exists(path)][:1]
    with contextlib.suppress(ImportError):
        usual.append(str(importlib.import_module("certifi").where()))
    return usual


def _bundle(files: list[str], folder: str) -> str:
    """One file with the certificates of all, named by its content."""
    sources = tuple(source for path in files for source in _sources(path))
    path = _bundled(sources, folder)
    if not os.path.exists(path):  # somebody has swept the folder
        _bundled.cache_clear()
        path = _bundled(sources, folder)
    return path


def _sources(path: str) -> Iterator[tuple[str, bool, tuple[int, ...]]]:
    """The files behind a name: path, whether it was given itself, and what tells its content from an earlier one."""
    is_folder = os.path.isdir(path)
    for full in [os.path.join(path, name) for name in sorted(os.listdir(path))] if is_folder else [path]:
        identity: tuple[int, ...] = ()
        with contextlib.suppress(OSError):  # reading it will say so
            found = os.stat(full)
            identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        yield full, not is_folder, identity


@functools.lru_cache(maxsize=32)  # asked for before every request; reading takes milliseconds
def _bundled(sources: tuple[tuple[str, bool, tuple[int, ...]], ...], folder: str) -> str:
    found: dict[bytes, None] = {}
    for path, is_given, _ in sources:
        try:
            with open(path, "rb") as file:
                found |= dict.fromkeys(CERTIFICATE.findall(file.read()))
        except OSError as error:
            if is_given:
                why = f"certificate authority {path} cannot be read: {error.strerror}"
                raise ConfigError(why, hint=f"ls -l {path}") from error
    content = b"\n".join([*found, b""])
    path = os.path.join(folder, f"{BUNDLE}{hashlib.sha256(content).hexdigest()[:16]}.pem")
    if not os.path.exists(path):
        os.makedirs(folder, 0o700, exist_ok=True)
        torn = f"{path}.{os.getpid()}"
        with open(torn, "wb") as file:
            file.write(content)
        os.replace(torn, path)
    return path


def _links(error: BaseException) -> Iterator[BaseException]:
    """An error and everything it carries or came from, outermost first."""
    waiting: list[BaseException] = [error]
    seen: list[BaseException] = []
    while waiting and len(seen) < LINKS_MAX:
        link = waiting.pop(0)
        if any(link is each for each in seen):
            continue
        seen.append(link)
        yield link
        inner = (*link.args, getattr(link, "reason", None), getattr(link, "original_error", None), link.__cause__)
        waiting += [each for each in (*inner, link.__context__) if isinstance(each, BaseException)]
