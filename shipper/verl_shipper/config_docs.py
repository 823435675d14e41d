"""The tables of docs/configuration.md, made from what is declared: `python -m verl_shipper.config_docs FILE`.

    <!-- keys: sampling -->
    (a table)
    <!-- end of keys -->

Must not know: the prose around them. On failure: ValueError for a table that nobody declares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from verl_shipper.backends import BUILT_IN, load_backend
from verl_shipper.config_keys import ALIASES, ENABLED, RUN_MAY_CHOOSE, SAMPLING, TOP, TRAINER
from verl_shipper.config_watch import SYSTEM, WATCH
from verl_shipper.schema import Key

BLOCK = re.compile(r"(<!-- keys: (\w+) -->\n).*?(<!-- end of keys -->)", re.DOTALL)
GIB = 1024**3
HEAD = ("key", "takes", "default", "meaning", "reason", "example")


def tables() -> dict[str, str]:
    """All tables by name."""
    found = {
        "top": _table(TOP),
        "sampling": _table([*(_at("sampling", key) for key in SAMPLING), RUN_MAY_CHOOSE]),
        "watch": _table(_at("watch", key) for key in WATCH),
        "system": _table(SYSTEM),
        "trainer": _table(TRAINER) + "\n" + _aliases(),
    }
    every = [_at("backends.NAME", ENABLED)]
    for name in BUILT_IN:
        declared = load_backend(name).settings_known or ()
        every += [_at(f"backends.{name}", key) for key in declared if isinstance(key, Key)]
    return found | {"backends": _table(every)}


def filled(document: str) -> str:
    """A document with all its tables brought up to date."""
    known = tables()

    def fill(block: re.Match[str]) -> str:
        if block[2] not in known:
            raise ValueError(f"no table {block[2]!r}")
        return f"{block[1]}{known[block[2]]}{block[3]}"

    return BLOCK.sub(fill, document)


def _table(keys: Iterable[Key]) -> str:
    rows: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD)]
    rows += [
        (f"`{key.path}`", key.takes, _default(key), key.meaning, key.reason, f"`{key.example}`".replace("|", "\\|"))
        for key in keys
    ]
    return "".join(f"| {' | '.join(row)} |\n" if row[0] != "---" else f"|{'|'.join(row)}|\n" for row in rows)


def _aliases() -> str:
    rows = [("`trainer.NAME.SETTING`", "`backends.NAME.SETTING`, for every backend NAME")]
    rows += [(f"`{alias}`", f"`{ours}`") for alias, ours in ALIASES.items()]
    return "| a trainer's key | means |\n|---|---|\n" + "".join(f"| {alias} | {ours} |\n" for alias, ours in rows)


def _default(key: Key) -> str:
    last = key.otherwise or _spelled(key.default, key.unit)
    return ", else ".join([", ".join(f"`{name}`" for name in key.variables), last] if key.variables else [last])


def _spelled(value: Any, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit == "bytes" and value % GIB == 0:
        return f"{value // GIB} GiB"
    if isinstance(value, (int, float)):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(f"`{each}`" for each in value)
    return f"`{value}`"


def _at(section: str, key: Key) -> Key:
    return replace(key, path=f"{section}.{key.path}")


def main() -> int:
    """Bring one file up to date."""
    (path,) = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        before = file.read()
    with open(path, "w", encoding="utf-8") as file:
        file.write(filled(before))
    return 0


if __name__ == "__main__":
    sys.exit(main())
