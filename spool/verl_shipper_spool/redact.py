"""Secrets out of everything that leaves the machine or is written down. Pure functions.

A key names a secret when its words say so (`api_key`, `WANDB_API_KEY`, `password`, `clientSecret`, `hf_token`, …). A
`token` that is counted or belongs to a vocabulary (`max_tokens`, `eos_token`, `token_id`) is none. Below a key that
names a secret every text and number is replaced. In texts, passwords inside URLs, `Bearer …` and well-known key shapes
are replaced wherever they stand.

Must not know: who writes what. On failure: nothing fails; what is not recognised stays.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"
DEPTH_MAX = 32

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
SECRET_WORDS = frozenset(
    {"apikey", "authorization", "cookie", "credential", "credentials", "passphrase"}
    | {"passwd", "password", "passwords", "secret", "secrets"}
)
SECRET_KEYS = frozenset({"access", "account", "api", "auth", "private", "ssh"})  # in front of "key"
# Tokens of a vocabulary, which the configuration of a language model is full of.
VOCABULARY = frozenset(
    {"audio", "begin", "bos", "cls", "end", "eos", "eot", "image", "img", "mask", "new", "pad", "per", "prefix"}
    | {"sep", "special", "start", "stop", "think", "unk", "video", "vision"}
)

SHAPES = re.compile(
    r"(?P<url>(?<=://)[^/\s:@]*:[^/\s@]+(?=@))"
    r"|(?P<bearer>(?<=\bBearer )[\w.~+/=-]{8,}|(?<=\bBasic )[\w+/=]{8,})"
    r"|\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{16}|wandb_v1_\w{16,}|dapi[0-9a-f]{32})"
)


def is_secret_key(key: str) -> bool:
    """Whether a key of this name holds a secret."""
    words = [word.lower() for word in WORD.findall(key)]
    if SECRET_WORDS.intersection(words):
        return True
    if any(last in ("key", "keys") and first in SECRET_KEYS for first, last in itertools.pairwise(words)):
        return True
    return words[-1:] == ["token"] and VOCABULARY.isdisjoint(words[-2:-1])


def redact(value: Any) -> Any:
    """A copy of a configuration (dicts, lists, plain values) without its secrets."""
    return _redact(value, secret=False, depth=0)


def scrub(text: str) -> str:
    """`text` without passwords in URLs, bearer tokens and keys of well-known shape: for messages and logs."""
    return SHAPES.sub(REDACTED, text)


def _redact(value: Any, *, secret: bool, depth: int) -> Any:
    if depth > DEPTH_MAX:
        return REDACTED
    if isinstance(value, Mapping):
        return {
            key: _redact(element, secret=secret or (isinstance(key, str) and is_secret_key(key)), depth=depth + 1)
            for key, element in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_redact(element, secret=secret, depth=depth + 1) for element in value]
    if isinstance(value, str):
        return REDACTED if secret and value else scrub(value)
    # A switch or a missing value under such a key (`use_auth_token: true`) tells nothing worth hiding.
    return value if value is None or isinstance(value, bool) or not secret else REDACTED
