"""Names of people's choosing made into path components. Pure.

A component that had to be changed carries a digest of its original, so that two originals never share a path.

Must not know: which tracker writes there. Never raises.
"""

from __future__ import annotations

import hashlib
import re

# What a component of a local path cannot or should not have: separators, control characters, halves of UTF-16 pairs.
LOCAL_FORBIDDEN = re.compile("[/\\\\\x00-\x1f\x7f\ud800-\udfff]")
# What travels unharmed through URLs, artifact stores and their path checks.
ARTIFACT_FORBIDDEN = re.compile(r"[^\w.\- ]")
DIGEST_DIGITS = 8


def component(name: str, forbidden: re.Pattern[str] = LOCAL_FORBIDDEN, *, bytes_max: int = 200) -> str:
    """`name` as one path component of at most `bytes_max` bytes of UTF-8: never empty, never "." or ".."."""
    clean = forbidden.sub("_", name)
    if not clean.strip(". "):
        clean = "_" * max(len(clean), 1)
    if clean == name and len(clean.encode()) <= bytes_max:
        return clean
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_DIGITS]
    head = clean.encode()[: bytes_max - DIGEST_DIGITS - 1].decode("utf-8", "ignore")
    return f"{head}-{digest}"
