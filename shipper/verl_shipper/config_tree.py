"""From the tree as written to values by key: every leaf checked, every alias resolved to what it stands for.

    Gathered.found      dotted key → candidates, the strongest first: command line before file, then the narrower
                        section before the wider, our own name before a trainer's
    Gathered.problems   everything that is wrong, in the order of reading

Must not know: what values are good for. On failure: nothing is raised; problems are collected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from verl_shipper import config_names
from verl_shipper.backends import known_names, load_backend
from verl_shipper.config_keys import ALIASES, ENABLED, MODEL_PATH, OWN_SECTIONS, RUN_MAY_CHOOSE, SAMPLING, TOP, TRAINER
from verl_shipper.config_source import Interpolations
from verl_shipper.config_watch import SECTION, SYSTEM, WATCH
from verl_shipper.errors import ConfigError
from verl_shipper.schema import Key, Kind, Node, WrongValueError, accept

MISSING = "???"  # OmegaConf's word for a value that somebody still has to give
ANYTHING = Key("", Kind.TEXT, "", "", "")  # a setting of a backend that declares none


@dataclass(frozen=True, slots=True)
class Found:
    """A value that somebody gave. `rank`: the smaller the stronger."""

    value: Any
    origin: str
    rank: tuple[int, int]


@dataclass(slots=True)
class Gathered:
    """What a tree holds."""

    found: dict[str, list[Found]] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)  # names of backends that have a section → its place
    problems: list[ConfigError] = field(default_factory=list)
    faults: dict[str, list[ConfigError]] = field(default_factory=dict)  # those of them in a backend's own section

    def best(self, *dotted: str) -> Found | None:
        """The strongest value of the first key, or of one that it falls back to."""
        candidates = [
            (each.rank[0], place, each.rank[1], each)
            for place, key in enumerate(dotted)
            for each in self.found.get(key, ())
        ]
        return min(candidates, key=lambda each: each[:3])[3] if candidates else None

    def wrong(self, what: str, origin: str, dotted: str, hint: str) -> None:
        where = origin if origin.startswith("--") or not dotted else f"{origin}: {dotted}"
        self.add(ConfigError(what, where=where, hint=hint), dotted)

    def add(self, error: ConfigError, dotted: str) -> None:
        self.problems.append(error)
        parts = dotted.split(".")
        if parts[0] == "backends" and len(parts) > 2:
            self.faults.setdefault(parts[1], []).append(error)


def gather(root: Node, problems: Sequence[ConfigError] = ()) -> Gathered:
    """Read a whole tree."""
    gathered = Gathered(problems=list(problems))
    _Walk(gathered, Interpolations(root)).whole(root)
    for candidates in gathered.found.values():
        candidates.sort(key=lambda each: each.rank)
    return gathered


def backend_keys(name: str) -> dict[str, Key] | None:
    """Everything that may stand in a backend's section; None when it declares no settings and so takes all."""
    keys = {ENABLED.path: ENABLED} | {f"sampling.{key.path}": key for key in SAMPLING}
    declared = load_backend(name).settings_known
    if declared is None:
        return None
    return keys | {(known if isinstance(known, str) else known.path): _as_key(known) for known in declared}


def _as_key(known: str | Key) -> Key:
    return ANYTHING if isinstance(known, str) else known


@dataclass(slots=True)
class _Walk:
    """One walk over a tree."""

    gathered: Gathered
    interpolations: Interpolations
    known: set[str] = field(default_factory=set)  # all dotted names that could have been meant

    def whole(self, root: Node) -> None:
        own = {key.path: key for key in (*TOP, *SYSTEM, RUN_MAY_CHOOSE)} | {
            f"sampling.{key.path}": key for key in SAMPLING
        }
        trainer = {key.path: key for key in TRAINER} | {alias: _key_of(ours) for alias, ours in ALIASES.items()}
        self.known = {*own, *trainer, "backends", SECTION, *OWN_SECTIONS, *_sections_of(own)}
        backends = root.value.get("backends")
        sections = backends.value if backends is not None and isinstance(backends.value, dict) else {}
        keys = {name: keys for name in sections if (keys := self._keys(name, sections[name]))}
        for name, paths in keys.items():
            section = {f"backends.{name}.{path}" for path in paths}
            self.known |= section | _sections_of(section) - {f"backends.{name}"}
        for name, node in root.value.items():
            if name == "backends":
                self._backends(node, keys)
            elif name == SECTION:
                self._watch(node)
            elif name in OWN_SECTIONS:
                self._section((name,), node, trainer | self._for_backends(node), is_foreign=True)
            else:
                self._child((name,), node, own, is_foreign=False)

    def _keys(self, name: str, node: Node) -> dict[str, Key] | None:
        if name not in known_names():
            return None
        try:
            return backend_keys(name)
        except Exception as error:  # noqa: BLE001 - a third party's package fails in its own ways
            self.gathered.wrong(f"backend {name!r} cannot be loaded: {error}", node.origin, "", "mend its package")
            return None

    def _for_backends(self, trainer: Node) -> dict[str, Key]:
        """What may stand in `trainer.NAME` for the backends that have such a section there."""
        keys: dict[str, Key] = {}
        for name in trainer.value if isinstance(trainer.value, dict) else ():
            for path, key in (self._keys(name, trainer) or {}).items() if name in known_names() else ():
                if "." not in path and key is not ENABLED:
                    keys[f"trainer.{name}.{path}"] = key
        self.known.update(keys)
        return keys

    def _backends(self, node: Node, keys: Mapping[str, dict[str, Key]]) -> None:
        if node.value is None:
            return
        if not isinstance(node.value, dict):
            hint = "write backends: {file: {dir: ./records}}"
            self.gathered.wrong("`backends` is not a map of names", node.origin, "", hint)
            return
        for name, section in node.value.items():
            self.gathered.sections[name] = section.origin
            if name not in known_names():
                continue  # told when backends are chosen
            prefix = ("backends", name)
            if section.value is not None and not isinstance(section.value, dict):
                hint = f"write backends: {{{name}: {{}}}}"
                self.gathered.wrong(f"`backends.{name}` is not a map of settings", section.origin, "", hint)
            elif name in keys:
                self._section(prefix, section, {f"backends.{name}.{path}": key for path, key in keys[name].items()})
            else:
                self._undeclared(prefix, section)

    def _watch(self, node: Node) -> None:
        """A list of entries, a map of them by name, or a single one."""
        entries = node.value
        if isinstance(entries, dict) and "path" in entries:
            entries = [node]
        if isinstance(entries, list):
            entries = {str(index): each for index, each in enumerate(entries)}
        if entries is None:
            return
        if not isinstance(entries, dict):
            hint = "write watch: [{path: /data/rollouts, kind: generations}]"
            self.gathered.wrong("`watch` is not a list of entries", node.origin, "", hint)
            return
        places: dict[tuple[object, object], str] = {}
        for name, entry in entries.items():
            dotted = f"{SECTION}.{name}"
            keys = {f"{dotted}.{key.path}": key for key in WATCH}
            self.known.update(keys)
            before = len(self.gathered.problems)
            self._section((SECTION, name), entry, keys)
            if len(self.gathered.problems) > before:
                continue
            path, kind = self.gathered.best(f"{dotted}.path"), self.gathered.best(f"{dotted}.kind")
            if path is None:
                self.gathered.wrong(f"`{dotted}` names no path", entry.origin, "", "write path: /data/rollouts")
                continue
            same = places.setdefault((path.value, kind and kind.value), dotted)
            if same != dotted:
                self.gathered.wrong(f"`{dotted}` is the same as `{same}`", entry.origin, "", "keep one of them")

    def _undeclared(self, prefix: tuple[str, ...], section: Node) -> None:
        """A backend without declarations: its settings are its own business, sampling is not."""
        shared = {f"sampling.{key.path}": key for key in SAMPLING} | {ENABLED.path: ENABLED}
        own = {f"{'.'.join(prefix)}.{path}": key for path, key in shared.items()}
        for name, node in (section.value or {}).items():
            dotted = ".".join((*prefix, name))
            if dotted in own or name == "sampling":
                self._child((*prefix, name), node, own, is_foreign=False)
            else:
                self._leaf((*prefix, name), node, ANYTHING)

    def _section(
        self, prefix: tuple[str, ...], node: Node, keys: Mapping[str, Key], *, is_foreign: bool = False
    ) -> None:
        if node.value is None:
            return
        if not isinstance(node.value, dict):
            dotted = ".".join(prefix)
            self.gathered.wrong(f"`{dotted}` is not a map", node.origin, "", f"write keys of {dotted} below it")
            return
        for name, child in node.value.items():
            self._child((*prefix, name), child, keys, is_foreign=is_foreign)

    def _child(self, names: tuple[str, ...], node: Node, keys: Mapping[str, Key], *, is_foreign: bool) -> None:
        dotted = ".".join(names)
        if dotted in keys:
            self._leaf(names, node, keys[dotted])
        elif dotted in _sections_of(keys):
            is_ours = is_foreign and len(names) == 2 and names[1] in known_names()
            self._section(names, node, keys, is_foreign=is_foreign and not is_ours)
        elif not is_foreign:
            self._unknown(names, node)
        else:
            self._perhaps_meant(names, node, keys)

    def _unknown(self, names: tuple[str, ...], node: Node) -> None:
        dotted = ".".join(names)
        near = config_names.nearest(dotted, self.known)
        if names[0] == "backends" and len(names) == 3:
            what = f"unknown setting {names[2]!r} of backend {names[1]!r}"
        else:
            what = f"unknown key {dotted!r}"
        section = dotted.rpartition(".")[0]
        siblings = sorted(each for each in self.known if each.rpartition(".")[0] == section)
        hint = f"did you mean {near}?" if near else f"known keys: {', '.join(siblings)}"
        if "." in "".join(names):
            hint = "write it as sections, one name a level"
        self.gathered.wrong(what, node.origin, dotted, hint)

    def _perhaps_meant(self, names: tuple[str, ...], node: Node, keys: Collection[str]) -> None:
        """A trainer's key that is not ours, unless it can only be a misspelled one of ours."""
        section = ".".join(names[:-1])
        level = len(names)
        ours = {each.split(".")[level - 1] for each in keys if each.startswith(f"{section}.")}
        if names[:-1] == OWN_SECTIONS[:1]:
            ours.update(known_names())
        near = config_names.near_miss(names[-1], ours)
        if near is not None:
            self.gathered.wrong(
                f"unknown key {'.'.join(names)!r}", node.origin, ".".join(names), f"did you mean {section}.{near}?"
            )

    def _leaf(self, names: tuple[str, ...], node: Node, key: Key) -> None:
        dotted = ".".join(names)
        try:
            plain = self.interpolations.resolved(names, node)
        except ConfigError as error:
            self.gathered.add(error, dotted)
            return
        if plain.value is None or plain.value == "":
            return
        if plain.value == MISSING:
            self.gathered.wrong(f"`{dotted}` has no value yet", node.origin, dotted, f"set it: --set {dotted}=…")
            return
        try:
            value = plain.plain() if key is ANYTHING else accept(key, plain)
        except WrongValueError as error:
            self.gathered.wrong(f"`{dotted}` is {error.what}", node.origin, dotted, error.hint)
            return
        ours, is_alias = _canonical(dotted)
        if is_alias and ours == "sampling.log_val_generations" and value == 0:
            return  # verl's own default: nobody asked for anything
        rank = (0 if node.commanded else 1, int(is_alias))
        self.gathered.found.setdefault(ours, []).append(Found(value, node.origin, rank))


def model_path(root: Node) -> Found | None:
    """Where the trainer's model is, with its tokenizer; asked only by who needs it."""
    node = root
    for name in MODEL_PATH.split("."):
        if not isinstance(node.value, dict) or name not in node.value:
            return None
        node = node.value[name]
    try:
        plain = Interpolations(root).resolved(MODEL_PATH.split("."), node)
    except ConfigError:
        return None  # it is the trainer's own, and may make sense only there
    return Found(plain.value, node.origin, (1, 1)) if isinstance(plain.value, str) else None


def _canonical(dotted: str) -> tuple[str, bool]:
    """The key that this one stands for, and whether it is another."""
    if dotted in ALIASES:
        return ALIASES[dotted], True
    parts = dotted.split(".")
    if parts[0] == "trainer" and len(parts) == 3:
        return f"backends.{parts[1]}.{parts[2]}", True
    return dotted, False


def _key_of(ours: str) -> Key:
    """The key at a dotted name of ours."""
    if ours.startswith("backends."):
        _, name, path = ours.split(".", 2)
        return (backend_keys(name) or {})[path]
    return next(key for key in SAMPLING if f"sampling.{key.path}" == ours)


def _sections_of(keys: Collection[str]) -> set[str]:
    return {section for key in keys for section in list(accumulate(key.split("."), lambda a, b: f"{a}.{b}"))[:-1]}
