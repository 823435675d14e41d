"""Secrets out of everything that leaves the machine or is written down. Pure functions.

    a key names a secret      its words say so: `api_key`, `WANDB-API-KEY`, `clientSecret`, `hf_token`, `pgpass`, …
                              everything below it is replaced, but switches and nothing
    a pair names a secret     ["Authorization", …], {"name": "API_KEY", "value": …}, "--api-key", …
    a text holds a secret     password or user of a URL, `?token=…`, `API_KEY=…`, `Authorization: …`, `Bearer …`,
                              private keys (PEM), tokens of well-known shape

A `token` that is counted or belongs to a vocabulary (`max_tokens`, `eos_token`, `token_id`) is none.

Promises: what was redacted stays as it is when redacted again; nothing is raised, whatever the value; the time is
linear in its size. Must not know: who writes what. What is not recognised stays.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"
DEPTH_MAX = 32
ROUNDS_MAX = 8

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
SECRET_WORDS = frozenset(
    {"accesskey", "accesstoken", "apikey", "apitoken", "authkey", "authorization", "authtoken", "cookie", "cookies"}
    | {"credential", "credentials", "htpasswd", "jwt", "netrc", "passcode", "passphrase", "passwd", "password"}
    | {"passwords", "pgpass", "privatekey", "pwd", "secret", "secretkey", "secrets"}
)
# In front of "key".
SECRET_KEYS = frozenset(
    {"access", "account", "api", "auth", "deploy", "encryption", "license", "master", "private", "shared", "signing"}
    | {"ssh", "storage", "subscription"}
)
# In front of "tokens": several of a kind. Otherwise that word is a count.
SECRET_TOKENS = frozenset({"access", "api", "auth", "bearer", "refresh", "session"})
# In front of "pass", which alone is a password and otherwise a pass over the data.
PASS_OF = frozenset({"db", "ftp", "my", "pg", "proxy", "smtp", "user"})
# In front of "token": those of a vocabulary, which the configuration of a language model is full of, and counts.
VOCABULARY = frozenset(
    {"audio", "begin", "bos", "cls", "end", "eod", "eom", "eos", "eot", "fim", "first", "image", "img", "last", "mask"}
    | {"max", "min", "new", "next", "num", "pad", "padding", "per", "prefix", "prompt", "reasoning", "response", "sep"}
    | {"special", "start", "stop", "suffix", "think", "thinking", "tool", "unk", "unknown", "video", "vision", "vocab"}
)
# Parameters of signed addresses that no word gives away.
QUERY_SECRETS = frozenset(
    {"code", "key", "sig", "sign", "signature", "xamzsignature", "xamzcredential", "xgoogsignature"}
)

SHAPES = re.compile(
    # user:password or a mere user, up to the last @ before the path. git@… and the like are names of services.
    r"(?P<url>(?<=://)(?!USER:PASSWORD@)(?:[^/\s:@\"'<>?#]*:[^/\s\"'<>?#]+|[^/\s:@\"'<>?#]{17,})(?=@))"
    r"|(?P<web>(?<=\bhttp://)[^/\s:@\"'<>?#]+(?=@)|(?<=\bhttps://)[^/\s:@\"'<>?#]+(?=@))"
    r"|(?P<scheme>(?i:(?<=\bbearer )|(?<=\bbasic ))(?=[a-z]*[A-Z0-9+/=._-])[\w.~+/=-]{8,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[^-]|-(?!----END))*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
    r"|(?<=\bhooks\.slack\.com/services/)[\w/]+"
    r"|\b(?:sk-(?=[\w-]{0,64}\d)[\w-]{16,}|hf_\w{16,}|api_org_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|A[KS]IA[0-9A-Z]{16}\b|AIza[\w-]{35}|ya29\.[\w.-]{16,}|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}"
    r"|wandb_v1_\w{16,}|dapi[0-9a-f]{32}|nvapi-[\w-]{16,}|gsk_\w{20,}|npm_\w{30,}|pypi-[\w-]{40,}"
    r"|eyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*)"
)
# A name in front of its value: `?token=…`, `API_KEY=…`, `"password": "…"`, `--api-key …`.
NAMED = re.compile(
    r"(?<![\w.-])(?P<name>-{0,2}[A-Za-z][\w.-]{1,63})"
    r"(?P<sep>\\?[\"']?(?: ?= ?|: ?)(?:\\?[\"'])?|[\"'], ?[\"']| (?=[^\s-]))"
)
VALUE = re.compile(r"\[redacted\]|[^\s\"'\\,;&{}()\[\]]+")
QUOTED = {sign: re.compile(rf"[^{sign}\\\r\n]+") for sign in "\"'"}
# What a header carries to the end of its line or quotes.
HEADER = re.compile(
    r"(?i:\b(?P<name>(?:proxy-)?authorization|(?:set-)?cookie)(?P<sep>[\"']?[:,] ?[\"']?))"
    r"(?P<value>(?:\[redacted\]|[^\"'\r\n}\]])+)"
)
NO_SECRETS = frozenset({"true", "false", "none", "null", "yes", "no", REDACTED})
PLACE_WORDS = frozenset({"dir", "file", "folder", "path"})  # at the end: where a secret is, not the secret


def is_secret_key(key: str) -> bool:
    """Whether a key of this name holds a secret."""
    words = [word.lower() for word in WORD.findall(key)]
    if not words or words[-1] in PLACE_WORDS:
        return False
    if not SECRET_WORDS.isdisjoint(words):
        return True
    if any(last in ("key", "keys") and first in SECRET_KEYS for first, last in itertools.pairwise(words)):
        return True
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    return (
        (last == "token" and before not in VOCABULARY)
        or (last == "tokens" and before in SECRET_TOKENS)
        or (last == "pass" and (not before or before in PASS_OF))
        or last == "auth"
    )


def redact(value: Any) -> Any:
    """A copy of a configuration (dicts, lists, plain values) without its secrets."""
    return _redact(value, secret=False, depth=0)


def scrub(text: str) -> str:
    """`text` without passwords in URLs, bearer tokens and keys of well-known shape: for messages and logs."""
    for _ in range(ROUNDS_MAX):
        clean = _scrubbed(text)
        if clean == text:
            break
        text = clean  # what stands beside a gap may now read otherwise
    return text


def _scrubbed(text: str) -> str:
    text = SHAPES.sub(_shape, text)
    if ":" in text or "=" in text or "-" in text or "," in text:
        text = _without_named(HEADER.sub(_header, text))
    return text


def _shape(found: re.Match[str]) -> str:
    return found[0] if found[0] == REDACTED else REDACTED


def _header(found: re.Match[str]) -> str:
    return f"{found['name']}{found['sep']}{REDACTED}"


def _without_named(text: str) -> str:
    """`text` without the values behind names of secrets."""
    parts, done = [], 0
    for found in NAMED.finditer(text):
        if found.start() < done or not _names_value(found, text):
            continue
        sign = found["sep"][-1]
        value = QUOTED.get(sign, VALUE).match(text, found.end())
        if value is None or value[0].lower() in NO_SECRETS or not _is_assignment(found["name"], found["sep"], value[0]):
            continue
        parts += [text[done : found.end()], REDACTED]
        done = value.end()
    return "".join([*parts, text[done:]])


def _names_value(found: re.Match[str], text: str) -> bool:
    name = found["name"]
    if is_secret_key(name):
        return True
    return text[found.start() - 1 : found.start()] in ("?", "&") and _bare(name) in QUERY_SECRETS


def _is_assignment(name: str, sep: str, value: str) -> bool:
    """Whether it is no mere sentence ("each token: the smallest part")."""
    if sep == " ":
        return name.startswith("-")
    return "=" in sep or sep[-1] in "\"'" or len(WORD.findall(name)) > 1 or not value.isalpha()


def _bare(name: str) -> str:
    return "".join(sign for sign in name.lower() if sign.isalpha())


def _redact(value: Any, *, secret: bool, depth: int) -> Any:
    if depth > DEPTH_MAX:
        return REDACTED
    if isinstance(value, Mapping):
        return _redact_map(value, secret=secret, depth=depth)
    if isinstance(value, (list, tuple)):
        return [
            _redact(element, secret=secret or _announces(value, place), depth=depth + 1)
            for place, element in enumerate(value)
        ]
    if isinstance(value, str):
        return REDACTED if secret and value else scrub(value)
    # A switch or a missing value under such a key (`use_auth_token: true`) tells nothing worth hiding.
    return value if value is None or isinstance(value, bool) or not secret else REDACTED


def _redact_map(value: Mapping[Any, Any], *, secret: bool, depth: int) -> dict[Any, Any]:
    told = next((value[word] for word in ("name", "key", "Name", "Key") if isinstance(value.get(word), str)), "")
    is_pair = bool(told) and is_secret_key(told)
    result: dict[Any, Any] = {}
    for key, element in value.items():
        is_text = isinstance(key, str)
        hides = secret or (is_text and (is_secret_key(key) or (is_pair and key.lower() == "value")))
        clean = scrub(key) if is_text else key
        while is_text and clean != key and (clean in result or clean in value):
            clean += "'"
        result[clean] = _redact(element, secret=hides, depth=depth + 1)
    return result


def _announces(values: Any, place: int) -> bool:
    """Whether the element before this one names it as a secret: a pair, or an option of a command line."""
    before = values[place - 1] if place else None
    if not isinstance(before, str) or not (before.startswith("-") or (len(values) == 2 and place == 1)):
        return False
    return "=" not in before and is_secret_key(before)
