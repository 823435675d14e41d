"""Settings of the backend `otlp`, declared, and what they and OpenTelemetry's own variables make together.

    endpoint      setting (a base, /v1/traces is added), OTEL_EXPORTER_OTLP_TRACES_ENDPOINT (as it is),
                  OTEL_EXPORTER_OTLP_ENDPOINT (a base), http://localhost:4318
    headers       setting for those that are no secret; and beside them the first of: setting `headers_file`, systemd's
                  credential otel_exporter_otlp_headers, OTEL_EXPORTER_OTLP_TRACES_HEADERS, OTEL_EXPORTER_OTLP_HEADERS
    authorities   setting `ca_file`, and OTEL_EXPORTER_OTLP_[TRACES_]CERTIFICATE

Must not know: spans, requests. On failure: ConfigError, in which no value of a header stands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl_shipper.backends.road import Road, road_of
from verl_shipper.backends.sdk.settings import ca_file_setting
from verl_shipper.backends.secrets import CREDENTIALS_VARIABLE, secret_lines
from verl_shipper.errors import ConfigError
from verl_shipper.schema import Key, Kind, pairs_of
from verl_shipper_spool.redact import is_secret_key

WHERE = "backends.otlp"
TIMEOUT_S = 10.0  # OpenTelemetry's own default
TIMEOUT_S_MAX = 60.0
DEFAULT_ENDPOINT = "http://localhost:4318"
PATH = "/v1/traces"
SERVICE = "verl"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
COMPRESSIONS = ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION")
CERTIFICATES = ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CREDENTIAL = HEADERS[1].lower()
OURS = frozenset({"content-type", "content-encoding", "content-length", "transfer-encoding", "host"})
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE = re.compile(r"[\x20-\x7e\t]*")
HEADER_LINE = re.compile(r"([^:=\s]+)\s*[:=]\s*(.*)")
KEY_HINT = f"set headers_file, or {HEADERS[1]}"

SETTINGS = (
    Key(
        "endpoint",
        Kind.URL,
        "a collector's base address for OTLP over HTTP; `/v1/traces` is added",
        "4318 is the port of OTLP/HTTP, 4317 that of gRPC, which is not spoken",
        "https://otel.example.com:4318",
        default=DEFAULT_ENDPOINT,
        variables=ENDPOINTS,
    ),
    Key(
        "headers",
        Kind.PAIRS,
        "headers of every request; names of secrets are refused here",
        "a tenant or a data set is told by a header",
        "{X-Scope-OrgID: rl-team}",
        otherwise="none",
    ),
    Key(
        "headers_file",
        Kind.PATH,
        "file with secret headers, of mode 0600, a line `Name: value` for each",
        "a key in a setting could be read by everybody on the machine",
        "/etc/verl-shipper/otlp.headers",
        otherwise="`OTEL_EXPORTER_OTLP_TRACES_HEADERS`, `OTEL_EXPORTER_OTLP_HEADERS`",
    ),
    Key(
        "service_name",
        Kind.TEXT,
        "`service.name` of the traces",
        "pages of traces are sorted by it",
        "verl-grpo",
        default=SERVICE,
        variables=("OTEL_SERVICE_NAME",),
    ),
    Key(
        "resource_attributes",
        Kind.PAIRS,
        "more attributes of the resource",
        "to find the traces of one cluster or team",
        "{deployment.environment.name: prod}",
        otherwise="none",
        variables=("OTEL_RESOURCE_ATTRIBUTES",),
    ),
    Key(
        "compression",
        Kind.CHOICE,
        "of requests",
        "texts shrink to a third, token ids to a half",
        "none",
        default="gzip",
        choices=("gzip", "none"),
        variables=COMPRESSIONS,
    ),
    Key(
        "capture_content",
        Kind.FLAG,
        "`no` leaves out inputs and outputs: messages, arguments, results, token ids; counted as `content`",
        "a collector may belong to others than those who may read the data",
        "no",
        default=True,
    ),
    Key(
        "timeout_s",
        Kind.NUMBER,
        "limit of one request",
        "a collector that is silent for longer is asked again later",
        "30",
        default=TIMEOUT_S,
        unit="seconds",
        low=1,
        high=TIMEOUT_S_MAX,
    ),
    ca_file_setting(),
)


def endpoint_of(settings: Mapping[str, Any]) -> str:
    """The address that spans are posted to. Raises ConfigError for what is none."""
    given = str(settings.get("endpoint") or "")
    exact = "" if given else _variable(ENDPOINTS[:1])
    url = exact or given or _variable(ENDPOINTS[1:]) or DEFAULT_ENDPOINT
    if not re.fullmatch(r"https?://[^\s/?#][^\s?#]*", url, re.IGNORECASE):
        where = f"{WHERE}.endpoint" if given else ENDPOINTS[0] if exact else ENDPOINTS[1]
        raise ConfigError(
            "the endpoint is no http:// or https:// address", where=where, hint=f"write {DEFAULT_ENDPOINT}"
        )
    if exact:
        return url
    return url.rstrip("/") + ("" if url.rstrip("/").endswith(PATH) else PATH)


def headers_of(settings: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """All headers, and where the secret ones are from (empty: there are none). Read anew at every call, so that a key
    that was replaced is seen."""
    plain = settings.get("headers") or {}
    if not isinstance(plain, Mapping):
        raise ConfigError("headers is no map of names to texts", where=f"{WHERE}.headers", hint="{NAME: value}")
    for name in map(str, plain):
        if is_secret_key(name):
            hint = f"put it into a file of mode 0600 and set headers_file, or into {HEADERS[1]}; and make a new key"
            what = f"the header {name} holds a secret, which does not belong into settings, where others can read it"
            raise ConfigError(what, where=f"{WHERE}.headers", hint=hint)
    secret, origin, where = _secret_headers(settings)
    found = {str(name): str(value) for name, value in plain.items()}
    _require_headers(found, f"{WHERE}.headers")
    _require_headers(secret, where)
    return found | secret, origin


def resource_attributes(settings: Mapping[str, Any]) -> dict[str, str]:
    """What the settings say of who speaks. The setting before the variable, the name of the service in any case."""
    variable = os.environ.get("OTEL_RESOURCE_ATTRIBUTES") or ""
    found = _pairs(variable, "OTEL_RESOURCE_ATTRIBUTES")
    found |= {str(name): str(value) for name, value in (settings.get("resource_attributes") or {}).items()}
    name = settings.get("service_name") or os.environ.get("OTEL_SERVICE_NAME") or found.get("service.name") or SERVICE
    return {"service.name": str(name)} | {each: value for each, value in found.items() if each != "service.name"}


def is_compressed(settings: Mapping[str, Any]) -> bool:
    """Raises ConfigError for a compression that nobody here knows."""
    word = str(settings.get("compression") or _variable(COMPRESSIONS) or "gzip").strip().lower()
    if word not in ("gzip", "none"):
        raise ConfigError(f"compression is {word[:20]!r}", where=f"{WHERE}.compression", hint="write gzip or none")
    return word == "gzip"


def timeout_of(settings: Mapping[str, Any]) -> float:
    timeout_s = settings.get("timeout_s", TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 1 <= timeout_s <= TIMEOUT_S_MAX:
        hint = f"give a number from 1 to {TIMEOUT_S_MAX:g}"
        raise ConfigError(f"timeout_s is {timeout_s!r}", where=f"{WHERE}.timeout_s", hint=hint)
    return float(timeout_s)


def captures_content(settings: Mapping[str, Any]) -> bool:
    return settings.get("capture_content") is not False


def otlp_road(settings: Mapping[str, Any]) -> Road:
    """The way to the collector; OpenTelemetry's own variable for authorities counts, too."""
    road = road_of("otlp", settings)
    own = _variable(CERTIFICATES)
    return replace(road, base_files=(own,)) if own else road


def protocol_note(settings: Mapping[str, Any]) -> str:
    """A line for the operator whose variables are made for another protocol; empty when there is nothing to say."""
    protocol = _variable(PROTOCOLS)
    if settings.get("endpoint") or protocol in ("", "http/protobuf"):
        return ""
    return (
        f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol[:20]}, spoken is http/protobuf: give its address as {WHERE}.endpoint"
    )


def _secret_headers(settings: Mapping[str, Any]) -> tuple[dict[str, str], str, str]:
    """Secret headers, where they are from for people, and for an error about them."""
    path, where = str(settings.get("headers_file") or ""), f"{WHERE}.headers_file"
    if path:
        path = os.path.abspath(os.path.expanduser(path))
        return _lines(secret_lines(path, where), path, where), f"file {path}", where
    folder = os.environ.get(CREDENTIALS_VARIABLE)
    path = os.path.join(folder or "", CREDENTIAL)
    if folder and os.path.lexists(path):
        found = _lines(secret_lines(path, CREDENTIALS_VARIABLE, private=False), path, CREDENTIALS_VARIABLE)
        return found, f"systemd credential {CREDENTIAL}", CREDENTIALS_VARIABLE
    for name in HEADERS:
        if os.environ.get(name, "").strip():
            return _pairs(os.environ[name], name), f"environment {name}", name
    return {}, "", where


def _lines(lines: list[str], path: str, where: str) -> dict[str, str]:
    """Headers of a file. Its lines may be secrets: none is told."""
    found = [HEADER_LINE.fullmatch(line) for line in lines]
    if not lines or not all(found):
        which = next((number for number, line in enumerate(found, 1) if line is None), 0)
        what = f"line {which} of {path} is no header" if which else f"{path} is empty"
        raise ConfigError(what, where=where, hint="write a line for each header: Name: value")
    return {line[1]: line[2] for line in found if line is not None}


def _pairs(text: str, where: str) -> dict[str, str]:
    try:
        return pairs_of(text)
    except ValueError as error:
        raise ConfigError(f"{where} is {error}", where=where, hint="write k=v,k2=v2, other signs as %XX") from None


def _require_headers(headers: Mapping[str, str], where: str) -> None:
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name) or not HEADER_VALUE.fullmatch(value):
            raise ConfigError("a header has signs that no HTTP header can carry", where=where, hint="write it anew")
        if name.lower() in OURS:
            raise ConfigError(f"the header {name} is not yours to set", where=where, hint="leave it out")


def _variable(names: tuple[str, ...]) -> str:
    return next((os.environ[name].strip() for name in names if os.environ.get(name, "").strip()), "")
