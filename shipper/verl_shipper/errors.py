"""Errors a person sees, each with its exit code. One line: what, where, why, what to type next.

ShipperError      1   something went wrong in the world
├── ConfigError   2   the configuration or the command line cannot work
└── HeldError     3   another daemon holds the spool, the state or the socket
(4: flush or drain ended and something remains, see cli.py)
"""

from __future__ import annotations


class ShipperError(Exception):
    """Base: `exit_code` is what the command line ends with."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(self.line())

    def line(self) -> str:
        place = f" [{self.where}]" if self.where else ""
        advice = f"; {self.hint}" if self.hint else ""
        return f"{self.what}{place}{advice}"


class ConfigError(ShipperError):
    """The configuration or the command line cannot work."""

    exit_code = 2


class HeldError(ShipperError):
    """Another daemon is at work there."""

    exit_code = 3
