"""Errors of the spool layer.

    SpoolError                what, where, why, what to type next
    ├── UsageError            the caller asked for something impossible (a path, a limit)
    └── CorruptionError       the disk holds something that cannot be read as format v1

Callers choose by type; nobody parses a message. Everything a program needs is in the fields.
"""

from __future__ import annotations


class SpoolError(Exception):
    """Base of the layer. `hint` is the next thing a person should type or change."""

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(self.line())

    def line(self) -> str:
        """One line for a person: what, where, what next."""
        place = f" [{self.where}]" if self.where else ""
        advice = f"; {self.hint}" if self.hint else ""
        return f"{self.what}{place}{advice}"


class UsageError(SpoolError):
    """The caller's mistake."""


class CorruptionError(SpoolError):
    """The disk's mistake: bytes that are not format v1."""
