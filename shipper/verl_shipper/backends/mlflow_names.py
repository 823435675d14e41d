"""Names that MLflow takes. Pure, apart from the notes that keep a name the same over restarts.

MLflow refuses a whole request for one bad name. It takes letters, digits and `_ - . : space /` in at most 250
characters, and nothing that reads like another path (`a//b`, `/a`, `../a`, `a/`).

    val/pass@8      val/pass_at_8         @ is spelled out
    timing(s)/gen   timing_s_/gen         other signs become _
    /lead  ../up    lead  __/up           paths are straightened
    kkk… (300)      kkk…_1f3a5c7e         cut names end in a digest
    ""              unnamed

Two originals never share a name, not even in capitals (some databases compare without case): `a(b)` and `a[b]` both
want `a_b_`, the first gets it, the second becomes `a_b__<digest>`. Who was first is noted in the run's memory.

Must not know: requests. Never raises; beyond NAMES_MAX notes every changed name carries its digest and nothing more
is noted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping

NAME_CHARS_MAX = 250
NAMES_MAX = 10_000
DIGEST_DIGITS = 8

FORBIDDEN = re.compile(r"[^/\w.\- :]")


class Names:
    """The names of one kind (metrics, params) in one run. `notes()` goes to the memory whenever `is_changed`.

    Another tracker's rules: `clean_name`, and `fold`, which makes equal what the tracker does not tell apart."""

    def __init__(
        self,
        notes: Mapping[str, str] | None = None,
        *,
        clean_name: Callable[[str], str] | None = None,
        fold: Callable[[str], str] = str.casefold,
    ) -> None:
        self._clean = clean_name or clean
        self._fold = fold
        self._name_of: dict[str, str] = dict(notes or {})
        self._taken = {fold(name) for name in self._name_of.values()}
        self.is_changed = False

    def name(self, original: str) -> str:
        """MLflow's name for `original`, the same every time."""
        known = self._name_of.get(original)
        if known is not None:
            return known
        name = self._clean(original)
        if len(self._name_of) >= NAMES_MAX:
            return name if name == original else with_digest(name, original)
        if self._fold(name) in self._taken:
            name = with_digest(name, original)
        self._name_of[original] = name
        self._taken.add(self._fold(name))
        self.is_changed = True
        return name

    def notes(self) -> dict[str, str]:
        """What a later `Names` needs to give the same answers."""
        self.is_changed = False
        return dict(self._name_of)

    def renamed(self) -> dict[str, str]:
        """Originals that MLflow shows under another name."""
        return {original: name for original, name in self._name_of.items() if name != original}


def clean(original: str) -> str:
    """The nearest name that MLflow takes; different originals may come out the same."""
    name = FORBIDDEN.sub("_", original.replace("@", "_at_"))
    parts = [part for part in name.split("/") if part]
    name = "/".join("_" * len(part) if part in (".", "..") else part for part in parts)
    if len(name) > NAME_CHARS_MAX:
        return with_digest(name, original)
    return name or "unnamed"


def with_digest(name: str, original: str) -> str:
    digest = hashlib.sha256(original.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_DIGITS]
    return f"{name[: NAME_CHARS_MAX - DIGEST_DIGITS - 1].rstrip('/')}_{digest}"
