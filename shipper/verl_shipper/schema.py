"""A key of the configuration: its name, what it takes, what it means and why. And a value as somebody wrote it.

    Key     declared by config_keys.py and by every backend for its own settings
    Node    a value of a file or of `--set`, with the place it comes from
    accept  Key + Node → a plain value that JSON can carry, or WrongValueError

People write what YAML 1.1 makes something else of (`on`, `010`, `1e-3`), and `${oc.env:…}` always gives text. So a
scalar keeps its own text, and what it means is decided by the key that it is for.

Must not know: files, YAML, where values go. Loaded in lanes, so it imports nothing heavy.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import unquote

from verl_shipper_spool.redact import REDACTED, is_secret_key, redact, scrub

ALL = "all"
SHOWN_CHARS_MAX = 60  # of a wrong value, in the message about it


class Kind(Enum):
    """What a key takes; the value is how a document calls it."""

    TEXT = "text"
    PATH = "path"
    URL = "URL"
    FLAG = "yes, no"
    COUNT = "whole number"
    NUMBER = "number"
    CHOICE = "choice"
    TEXTS = "list of texts"
    PATHS = "list of paths"
    PATTERNS = "list of patterns"
    PAIRS = "map of names to texts, or `NAME=VALUE,…`"
    FREQUENCY = "whole number, or map of patterns to such"
    ROWS = "whole number, or `all`"
    WISHES = "`all`, `none`, or list of names"


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `path` is dotted, relative to the section it is declared in.

    default     what holds when nobody gives it; `otherwise` says it in words where it is no plain value
    variables   environment variables that are asked before the default, first one first
    """

    path: str
    kind: Kind
    meaning: str
    reason: str
    example: str
    default: Any = None
    otherwise: str = ""
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    @property
    def takes(self) -> str:
        """Type, range and unit in words."""
        if self.kind is Kind.CHOICE:
            return ", ".join(f"`{choice}`" for choice in self.choices)
        words = self.kind.value
        if self.kind is Kind.WISHES:
            words += f": {', '.join(f'`{choice}`' for choice in self.choices)}"
        limits = ", ".join(part for part in (self.unit, _range(self)) if part)
        return f"{words} ({limits})" if limits else words


@dataclass(slots=True)
class Node:
    """A value as it was written: a scalar, or a list or map of nodes. `text` is a scalar's own spelling."""

    value: Any
    origin: str
    text: str | None = None
    by_command: bool = False  # given on the command line, where everything is text

    @property
    def commanded(self) -> bool:
        """Whether the command line gave it, or a part of it."""
        children = self.value.values() if isinstance(self.value, dict) else ()
        return self.by_command or any(child.commanded for child in children)

    def plain(self) -> Any:
        """Without places; what JSON does not know stays as it is spelled."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        known = self.value is None or isinstance(self.value, (str, bool, int, float))
        return self.value if known else self.text

    def describe(self, key: str) -> str:
        """For a message: short, on one line, without secrets."""
        if is_secret_key(key):
            return REDACTED
        plain = redact(self.plain())
        shown = str(plain) if self.text is None or isinstance(self.value, str) else scrub(self.text)
        shown = repr(shown) if isinstance(self.value, str) else shown
        return shown if len(shown) <= SHOWN_CHARS_MAX else f"{shown[:SHOWN_CHARS_MAX]}…"


def node_of(value: Any, origin: str, *, by_command: bool = False) -> Node:
    """A node of a plain value, for what came out of an interpolation."""
    if isinstance(value, Mapping):
        children = {str(key): node_of(child, origin, by_command=by_command) for key, child in value.items()}
        return Node(children, origin, by_command=by_command)
    if isinstance(value, (list, tuple)):
        return Node([node_of(child, origin, by_command=by_command) for child in value], origin, by_command=by_command)
    return Node(value, origin, text=None if value is None else str(value), by_command=by_command)


class WrongValueError(Exception):
    """What a key does not take. `what` ends the sentence "KEY is …", `hint` says what to write."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


def accept(key: Key, node: Node) -> Any:
    """The value a key has when somebody wrote `node`. Raises WrongValueError."""
    try:
        return _ACCEPT[key.kind](key, node)
    except ValueError:
        wanted = {Kind.CHOICE: f"one of {', '.join(key.choices)}", Kind.FLAG: "yes or no"}.get(key.kind)
        asked = (wanted or key.takes).replace("`", "")
        article = "" if wanted or key.kind is Kind.WISHES else "a "
        raise WrongValueError(
            f"{node.describe(key.path)}, not {article}{asked}", f"write for example {key.example}"
        ) from None


def _range(key: Key) -> str:
    if key.low is not None and key.high is not None:
        return f"{key.low:g} to {key.high:g}"
    if key.low is not None:
        return f"{key.low:g} or more"
    return ""


def _text(_key: Key, node: Node) -> str:
    if isinstance(node.value, str):
        return node.value
    if node.value is None or isinstance(node.value, (dict, list)) or node.text is None:
        raise ValueError
    return node.text


def _path(key: Key, node: Node) -> str:
    """A number or a `yes` in a file is no path that anybody wanted."""
    if not node.by_command and not isinstance(node.value, str):
        raise ValueError
    return _text(key, node)


def _flag(_key: Key, node: Node) -> bool:
    if isinstance(node.value, bool):
        return node.value
    word = str(node.value).lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ValueError


def _number(key: Key, node: Node) -> float:
    """Read from its own spelling: to YAML 1.1 `010` is eight, `1:30` ninety and `1e-3` a text."""
    number = float(_spelled(node).replace("_", ""))
    if not math.isfinite(number) or not _within(key, number):
        raise ValueError
    return number


def _count(key: Key, node: Node) -> int:
    spelled = _spelled(node).replace("_", "")
    number = int(spelled) if re.fullmatch(r"[+-]?\d+", spelled) else float(spelled)
    if not math.isfinite(number) or number != int(number) or not _within(key, number):
        raise ValueError
    return int(number)


def _within(key: Key, number: float) -> bool:
    return (key.low is None or number >= key.low) and (key.high is None or number <= key.high)


def _spelled(node: Node) -> str:
    if isinstance(node.value, (dict, list, bool)) or node.value is None:
        raise ValueError
    return (node.text if node.text is not None else str(node.value)).strip()


def _choice(key: Key, node: Node) -> str:
    word = _text(key, node).strip()
    for choice in key.choices:
        if word.lower() == choice.lower():
            return choice
    raise ValueError


def _texts(key: Key, node: Node) -> list[str]:
    """A list, a text with commas, or the text of a list as a shell passes it."""
    if isinstance(node.value, str):
        node = _unfolded(node)
    is_list = isinstance(node.value, list)
    found = [_item(key, child) for child in node.value] if is_list else _text(key, node).split(",")
    return list(dict.fromkeys(item.strip() for item in found if item.strip()))


def _item(key: Key, node: Node) -> str:
    return "null" if node.value is None else _text(key, node)


def _paths(key: Key, node: Node) -> list[str]:
    found = node.value if isinstance(node.value, list) else [node]
    return [os.path.expanduser(_path(key, child)) for child in found]


def _frequency(key: Key, node: Node) -> int | dict[str, int]:
    node = _unfolded(node)
    if isinstance(node.value, dict):
        return {pattern: _count(key, child) for pattern, child in node.value.items()}
    return _count(key, node)


def _rows(key: Key, node: Node) -> int | str:
    return ALL if str(node.value).strip().lower() == ALL else _count(key, node)


def _wishes(key: Key, node: Node) -> list[str]:
    word = str(node.value).strip().lower()
    if word in (ALL, "true", "yes", "on"):
        return list(key.choices)
    if word in ("none", "false", "no", "off"):
        return []
    found = _texts(key, node)
    if not set(found) <= set(key.choices):
        raise ValueError
    return found


def _pairs(key: Key, node: Node) -> dict[str, str]:
    """A map, or what OpenTelemetry's variables hold: `k=v,k2=v2`, with %XX. A value may be a secret: none is told."""
    node = _unfolded(node)
    try:
        if isinstance(node.value, dict):
            return {name: _text(key, child) for name, child in node.value.items()}
        return pairs_of(_text(key, node))
    except ValueError:
        raise WrongValueError(f"not a {key.takes.replace('`', '')}", f"write for example {key.example}") from None


def pairs_of(text: str) -> dict[str, str]:
    """The pairs of `k=v,k2=v2`, as OpenTelemetry's variables have them (W3C Baggage). Raises ValueError."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise ValueError("not of the form NAME=VALUE,NAME=VALUE")
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}


def _unfolded(node: Node) -> Node:
    """The list or map that a text spells, as from an environment variable; any other node as it is."""
    if not isinstance(node.value, str) or node.value.strip()[:1] not in ("[", "{"):
        return node
    import yaml

    try:
        return node_of(yaml.safe_load(node.value), node.origin, by_command=node.by_command)
    except yaml.YAMLError as error:
        raise ValueError from error


_ACCEPT: dict[Kind, Callable[[Key, Node], Any]] = {
    Kind.TEXT: _text,
    Kind.PATH: _path,
    Kind.URL: _path,
    Kind.FLAG: _flag,
    Kind.COUNT: _count,
    Kind.NUMBER: _number,
    Kind.CHOICE: _choice,
    Kind.TEXTS: _texts,
    Kind.PATHS: _paths,
    Kind.PATTERNS: _texts,
    Kind.PAIRS: _pairs,
    Kind.FREQUENCY: _frequency,
    Kind.ROWS: _rows,
    Kind.WISHES: _wishes,
}
