"""Where values are written: a YAML file and `--set KEY=VALUE`, as one tree in which everything knows its place.

    read_file(path)      → Node, places are FILE:LINE
    overlay(root, text)  puts one `--set` on top, its place is the option itself
    Interpolations       what `${…}` stands for, through OmegaConf as in verl's own configuration, one value at a time

One at a time, since a trainer's own section may hold a hundred `${…}` that mean nothing outside of the trainer.

Must not know: which keys there are. On failure: ConfigError with the place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_shipper.errors import ConfigError
from verl_shipper.schema import SHOWN_CHARS_MAX, Node, node_of
from verl_shipper_spool.redact import REDACTED, is_secret_key, scrub

MARK = "${"
UNSET = re.compile(r"Environment variable '([^']+)' not found")
PATTERN_SECTION = "log_frequency"  # below it a key is a pattern, in which dots are dots
DEPTH_MAX = 64


def read_file(path: str, problems: list[ConfigError]) -> Node:
    """The tree of a file. Keys that stand twice are put into `problems`; anything worse is raised."""
    import yaml

    text = ""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        root = _composed(text, lambda line: f"{path}:{line}", problems)
    except OSError as error:
        raise ConfigError(f"cannot read configuration: {error.strerror}", where=path, hint="check --config") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        is_marked = mark is not None and MARK in "".join(text.splitlines()[mark.line : mark.line + 1])
        hint = "put quotes around ${…} inside of brackets" if is_marked else "check indentation, brackets and quotes"
        raise ConfigError(f"not valid YAML: {problem}", where=place, hint=hint) from error
    if root is None or root.value is None:
        return Node({}, path)
    if not isinstance(root.value, dict):
        kind = "list" if isinstance(root.value, list) else "text"
        raise ConfigError(
            f"the file holds a {kind}, not a map of keys",
            where=path,
            hint="write for example backends: {file: {dir: ./records}}",
        )
    return root


def overlay(root: Node, override: str) -> None:
    """Put KEY=VALUE on top of a tree. A plus in front, as Hydra wants it for new keys, changes nothing."""
    import yaml

    dotted, separator, text = override.partition("=")
    names = dotted.strip().lstrip("+").split(".")
    if PATTERN_SECTION in names:
        place = names.index(PATTERN_SECTION) + 1
        names = [*names[:place], *([".".join(names[place:])] if names[place:] else [])]
    if not separator or not all(names):
        raise ConfigError(
            f"--set {_shown(dotted, text, separator)!r} is not KEY=VALUE",
            hint="for example --set backends.file.dir=./records",
        )
    origin = f"--set {_shown(dotted, text)}"
    try:
        node = _composed(text, lambda _line: origin, [])
    except (yaml.YAMLError, ValueError) as error:
        problem = str(getattr(error, "problem", None) or "it is no value").splitlines()[0]
        raise ConfigError(
            f"{dotted.strip()} cannot be read: {problem}", where=origin, hint="put quotes around the value"
        ) from error
    node = node or Node(None, origin)
    _by_command(node)
    section = root
    for name in names[:-1]:
        child = section.value.get(name)
        if child is not None and isinstance(child.value, list):  # the first of a list is its 0
            child.value = {str(index): each for index, each in enumerate(child.value)}
        if child is None or not isinstance(child.value, dict):
            child = section.value[name] = Node({}, origin)
        section = child
    section.value[names[-1]] = node


class Interpolations:
    """Knows what `${…}` in a tree stands for."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._config: Any = None

    def resolved(self, names: Sequence[str], node: Node) -> Node:
        """`node`, which stands at `names`, without interpolations. Raises ConfigError."""
        if not _is_marked(node):
            return node
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            if self._config is None:
                self._config = OmegaConf.create(_parsable(self._root.plain()))
            place = self._config
            for name in names[:-1]:
                place = place[int(name) if OmegaConf.is_list(place) else name]
            if OmegaConf.is_missing(place, names[-1]):  # a text that is no interpolation, see `_parsable`
                OmegaConf.create({names[-1]: node.plain()})
            value = place[names[-1]]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, ValueError, TypeError, KeyError, RecursionError) as error:
            raise _unresolved(".".join(names), node, error) from error
        return node_of(value, node.origin, by_command=node.commanded)


def _composed(text: str, place: Any, problems: list[ConfigError]) -> Node | None:
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        return None if root is None else _node(loader, root, place, problems, 0)
    finally:
        loader.dispose()


def _node(loader: Any, found: Any, place: Any, problems: list[ConfigError], depth: int) -> Node:
    import yaml

    origin = place(found.start_mark.line + 1)
    if depth > DEPTH_MAX:
        raise yaml.YAMLError("a map holds itself, or is nested too deep")
    if isinstance(found, yaml.MappingNode) and found.tag == "tag:yaml.org,2002:map":
        _find_twice(found, place, problems)
        loader.flatten_mapping(found)
        children: dict[str, Node] = {}
        for key, value in found.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            child = children[name] = _node(loader, value, place, problems, depth + 1)
            if isinstance(value, yaml.ScalarNode) or not child.value:
                continue
            child.origin = place(key.start_mark.line + 1)  # a section is where its name stands
        return Node(children, origin)
    if isinstance(found, yaml.SequenceNode) and found.tag == "tag:yaml.org,2002:seq":
        return Node([_node(loader, value, place, problems, depth + 1) for value in found.value], origin)
    return Node(loader.construct_object(found, deep=True), origin, text=getattr(found, "value", None))


def _find_twice(mapping: Any, place: Any, problems: list[ConfigError]) -> None:
    lines: dict[str, int] = {}
    for key, _value in mapping.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines and name != "<<":
            problems.append(
                ConfigError(
                    f"key {name!r} stands twice, in lines {lines[name]} and {line}",
                    where=place(line),
                    hint="keep one of them",
                )
            )
        lines.setdefault(name, line)


def _by_command(node: Node) -> None:
    node.by_command = True
    children = node.value.values() if isinstance(node.value, dict) else node.value
    for child in children if isinstance(node.value, (dict, list)) else ():
        _by_command(child)


def _shown(dotted: str, text: str, separator: str = "=") -> str:
    """An override for a message, without the secret that should not have been in it."""
    value = REDACTED if is_secret_key(dotted) and text else scrub(text)
    value = value if len(value) <= SHOWN_CHARS_MAX else f"{value[:SHOWN_CHARS_MAX]}…"
    return " ".join(f"{dotted.strip()}{separator}{value}".split())


def _is_marked(node: Node) -> bool:
    if isinstance(node.value, dict):
        return any(map(_is_marked, node.value.values()))
    if isinstance(node.value, list):
        return any(map(_is_marked, node.value))
    return isinstance(node.value, str) and MARK in node.value


def _parsable(value: Any) -> Any:
    """Without texts that are no interpolation though they look like one: each would spoil the whole tree."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(value, dict):
        return {key: _parsable(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_parsable(child) for child in value]
    if isinstance(value, str) and MARK in value:
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException:
            return "???"
    return value


def _unresolved(dotted: str, node: Node, error: Exception) -> ConfigError:
    unset = UNSET.search(str(error))
    if unset:
        return ConfigError(
            f"environment variable {unset[1]} is not set, {dotted} needs it",
            where=node.origin,
            hint=f"export {unset[1]}=…, or write ${{oc.env:{unset[1]},DEFAULT}}",
        )
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(
        f"{dotted} cannot be resolved: {scrub(first)}", where=node.origin, hint="check its ${...}, brackets and quotes"
    )
