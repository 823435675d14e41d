"""Secrets stay out of everything we write: values under keys that look like credentials are replaced.

Applied to a run's configuration before it enters the spool, so that no later stage has a secret to leak.
Must not know: files, trackers. Never raises.
"""

from __future__ import annotations

import re
from typing import Any

REDACTED = "[redacted]"
_SECRET_KEY = re.compile(
    r"api[_-]?key|access[_-]?key|secret|passw(or)?d|passphrase|credential|private[_-]?key|auth(orization)?$"
    r"|(^|[_-])(token|pwd)$",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(?P<front>\w+://[^/\s:@]*:)[^/\s@]+@")
_DEPTH_MAX = 64


def redact(value: Any, depth: int = 0) -> Any:
    """A copy of a plain nested value without secrets: by key name, and passwords inside URLs."""
    if isinstance(value, dict) and depth < _DEPTH_MAX:
        return {key: _entry(key, item, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and depth < _DEPTH_MAX:
        return [redact(item, depth + 1) for item in value]
    if isinstance(value, str):
        return _URL_PASSWORD.sub(rf"\g<front>{REDACTED}@", value)
    return value


def is_secret_key(key: object) -> bool:
    """Whether a key names a credential."""
    return isinstance(key, str) and bool(_SECRET_KEY.search(key))


def _entry(key: object, item: Any, depth: int) -> Any:
    if is_secret_key(key) and item is not None and not isinstance(item, (dict, bool, int, float)):
        return REDACTED
    return redact(item, depth + 1)
