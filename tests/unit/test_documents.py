"""The documents tell the truth: links, commands, variables, keys, numbers, files, tests and examples exist as written.

What a document says is compared with the code it speaks of; examples are run.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest

from support.batches import batch, metrics, run_info
from support.matrix import BEGIN, END, FAULTS, TRACKERS
from support.memory import FakeMemory
from support.site import Site
from verl_shipper import errors, serve
from verl_shipper.backends import BUILT_IN, load_backend
from verl_shipper.backends.base import Backend, Delivered
from verl_shipper.backends.mlflow_http import TIMEOUT_S
from verl_shipper.cli import main
from verl_shipper.config import check_backends, load_config
from verl_shipper.config_docs import BLOCK, filled, tables
from verl_shipper.config_keys import ENABLED, NODE_QUOTA_BYTES, RUN_MAY_CHOOSE, SAMPLING, TOP, TRAINER
from verl_shipper.config_source import overlay
from verl_shipper.config_watch import SYSTEM, WATCH
from verl_shipper.policy import delivery
from verl_shipper.schema import Key, Node, accept
from verl_shipper.show import record_lines, status_table, stream_folders
from verl_shipper.status import Account, Report, RunName
from verl_shipper_client import launcher, link
from verl_shipper_spool import location, wire

ROOT = Path(__file__).parents[2]
ROOTS = ("spool/verl_shipper_spool", "client/verl_shipper_client", "shipper/verl_shipper")
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
    if not path.relative_to(ROOT).parts[0].startswith((".", "demo-out", "build", "dist"))
)
MODULES = sorted(path for root in ROOTS for path in (ROOT / root).rglob("*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
UNITS = {
    "": 1,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "ms": 0.001,
    "s": 1,
    "h": 3600,
}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def everything(*, without: str = "") -> str:
    return "\n".join(text_of(str(path.relative_to(ROOT))) for path in DOCUMENTS if path.name != without)


def code_in(text: str) -> Iterator[str]:
    """Lines of fenced blocks, and inline code."""
    for _language, block in FENCE.findall(text):
        yield from block.replace("\\\n", " ").splitlines()
    for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        yield span.replace("\\|", "|")


def examples(name: str, language: str) -> list[str]:
    return [block for found, block in FENCE.findall(text_of(name)) if found == language]


def table_rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


# --- links and names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text(encoding="utf-8")))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), f"{path.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{path.name} links to {target}"


def test_every_python_file_that_is_named_exists() -> None:
    names = {path.name for path in [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]}

    for path in DOCUMENTS:
        for code in code_in(path.read_text(encoding="utf-8")):
            for name in re.findall(r"(?<![\w*])(\w+\.py)\b", code):
                assert name in names, f"{path.relative_to(ROOT)} names {name}"


def test_the_architecture_has_a_line_for_every_module() -> None:
    listed = [row[0].strip("`") for row in table_rows(text_of("ARCHITECTURE.md")) if row[0].endswith(".py`")]

    modules = [str(path.relative_to(ROOT)) for path in MODULES if path.name != "__init__.py"]
    assert sorted(listed) == sorted(modules)


def test_every_test_that_is_named_exists() -> None:
    written = list((ROOT / "tests").rglob("test_*.py"))
    known = {path.stem for path in written}
    for path in written:
        known.update(re.findall(r"^\s*def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))

    named = set(re.findall(r"`(?:[\w/]+(?:\.py)?::)?(test_\w+)`", everything(without="CHANGELOG.md")))

    assert len(named) > 40, "the pattern finds nothing any more"
    assert named <= known, sorted(named - known)


# --- command line and configuration ---------------------------------------------------------------------------


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def options_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts if name.startswith("--")}


def used_options(code: str) -> Iterator[tuple[str, set[str]]]:
    """Commands in a line of code, each with the options it is given."""
    for call in re.findall(r"verl-shipper\)? ([a-z].*)", code):
        own = re.split(r" -- | \| |;|$", call)[0]
        for name in sorted(dict(commands(main)), key=len, reverse=True):
            if own.startswith(name):
                yield name, set(re.findall(r"(?<!\S)\[?(--[a-z][a-z-]*)", own))
                break
        else:
            assert own.strip() == "dead-letters", f"no such command: verl-shipper {own}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_and_option_that_is_shown_exists(path: Path) -> None:
    known = {name: options_of(command) for name, command in commands(main)}

    for code in code_in(path.read_text(encoding="utf-8")):
        for name, used in used_options(code):
            assert used <= known[name] | {"--help", "--version"}, code


def test_the_readme_shows_every_command_with_all_its_options() -> None:
    shown: dict[str, set[str]] = {}
    for row in table_rows(text_of("README.md")):
        for name, used in used_options(row[0].replace("\\|", "|").strip("`")):
            shown.setdefault(name, set()).update(used)

    assert shown == {name: options_of(command) for name, command in commands(main)}


def test_the_readme_lists_every_exit_code() -> None:
    rows = [row for row in table_rows(text_of("README.md")) if row[0].isdigit()]

    kinds = (errors.ShipperError, errors.ConfigError, errors.HeldError)
    assert [int(row[0]) for row in rows] == [0, *(kind.exit_code for kind in kinds), serve.EXIT_REMAINS]


def test_environment_variables_are_those_of_the_code() -> None:
    ours = {value for name, value in vars(location).items() if name.endswith("_VARIABLE")}
    ranks = {*launcher.RANK_VARIABLES, *launcher.WORLD_VARIABLES}
    source = "".join(path.read_text(encoding="utf-8") for path in MODULES)

    for name in ("README.md", "docs/configuration.md"):
        assert set(re.findall(r"VERL_(?:SHIPPER_[A-Z_]+|PROJECT|EXPERIMENT)", text_of(name))) == ours, name
    assert set(re.findall(r"VERL_SHIPPER_[A-Z_]*[A-Z]", everything(without="CHANGELOG.md"))) - ours <= {
        "VERL_SHIPPER_TEST_SEED",
        "VERL_SHIPPER_TEST_LONG",
        "VERL_SHIPPER_MATRIX_DIR",
    }
    listed = {word for row in table_rows(text_of("docs/configuration.md")) for word in re.findall(r"`(\w+)`", row[0])}
    assert ranks <= listed
    for variable in set(re.findall(r"\bMLFLOW_[A-Z_]+[A-Z]\b", everything())):
        assert variable in source, f"{variable} is documented, no code speaks of it"


def test_configuration_keys_and_settings_are_those_of_the_code() -> None:
    text = text_of("docs/configuration.md")

    assert sorted(name for _, name, _ in BLOCK.findall(text)) == sorted(tables())
    assert text == filled(text), "run `make docs`"
    keys = {row[0].strip("`"): row[2] for row in table_rows(text) if len(row) == 6}
    settings = {f"backends.{name}.{key}" for name in BUILT_IN for key in load_backend(name).setting_names()}
    sampling = {f"sampling.{key.path}" for key in SAMPLING}
    own = {key.path for key in (*TOP, *SYSTEM, RUN_MAY_CHOOSE, *TRAINER)} | {f"watch.{key.path}" for key in WATCH}
    assert keys.keys() - {"key", "backends.NAME.enabled"} == settings | sampling | own
    assert quantity(keys["node_quota_bytes"]) == NODE_QUOTA_BYTES
    assert quantity(keys["backends.mlflow.timeout_s"]) == TIMEOUT_S


def declared_keys() -> Iterator[Key]:
    yield from (*TOP, *WATCH, *SYSTEM, *SAMPLING, RUN_MAY_CHOOSE, ENABLED, *TRAINER)
    for name in BUILT_IN:
        for key in load_backend(name).settings_known or ():
            assert isinstance(key, Key), f"{name} declares {key!r} by its name alone"
            yield key


@pytest.mark.parametrize("key", list(declared_keys()), ids=lambda key: key.path)
def test_every_key_is_declared_whole_and_takes_its_own_example_and_default(key: Key) -> None:
    for text in (key.meaning, key.reason, key.example):
        assert text
        assert "|" not in text
        assert "\n" not in text
    root = Node({}, "")
    overlay(root, f"key={key.example}")
    is_choice = len(key.choices) != 1
    assert (accept(key, root.value["key"]) != key.default) is is_choice, (
        "an example shows something else than the default"
    )
    if key.default is not None and not isinstance(key.default, list):
        overlay(root, f"key={key.default}")
        assert accept(key, root.value["key"]) == key.default
    assert (key.default is None) <= bool(key.otherwise), "what holds when nobody gives it?"
    if key.path.endswith("_s"):
        assert key.unit == "seconds"
    if key.path.endswith("_bytes"):
        assert key.unit == "bytes"


def test_the_sample_configuration_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    (sample,) = examples("docs/configuration.md", "yaml")
    (tmp_path / "config.yaml").write_text(sample, encoding="utf-8")

    config = load_config(str(tmp_path / "config.yaml"))

    check_backends(config)
    assert list(config.backends) == ["file", "mlflow"]


def test_reasons_for_drops_are_those_of_the_code() -> None:
    text = text_of("shipper/README.md").partition("### Reasons for drops")[2].partition("###")[0]
    reasons = {reason for row in table_rows(text) for reason in re.findall(r"`(\w+)`", row[0])}
    strings = {
        node.value
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }

    assert len(reasons) > 8
    assert reasons <= strings, sorted(reasons - strings)


def test_messages_of_the_wire_are_those_of_the_code() -> None:
    stream_id = "0" * 32
    messages: list[wire.FromClient | wire.FromDaemon] = [
        wire.Hello(stream_id, b"-"),
        wire.Welcome(stream_id, 0),
        wire.Data(stream_id, 0, False, b"-"),
        wire.Ack(stream_id, 0),
        wire.Greet(stream_id),
        wire.Refuse(stream_id, "-"),
    ]
    tags = [row[1][1:3] for row in table_rows(text_of("client/README.md")) if row[0] in ("client", "daemon")]

    assert tags == [wire.pack(message)[0].decode() for message in messages]


def test_numbers_are_those_of_the_code() -> None:
    found = 0
    for row in (row for path in DOCUMENTS for row in table_rows(path.read_text(encoding="utf-8"))):
        for written, cell in pairwise(row):
            named = re.fullmatch(r"`(\w+\.py) ([A-Z_]+)`", cell)
            if named is None:
                continue
            values = [value for module in MODULES if module.name == named[1] for value in constant(module, named[2])]
            assert values == pytest.approx([quantity(written)]), cell
            found += 1
    assert found > 20


def quantity(written: str) -> float:
    number, _, unit = written.partition(" ")
    return float(number) * UNITS[unit]


def constant(path: Path, name: str) -> list[float]:
    """The value of a constant of a module; nothing when it has none of that name."""
    relative = path.relative_to(ROOT).with_suffix("")
    if f"\n{name} = " not in path.read_text(encoding="utf-8"):
        return []
    return [float(getattr(importlib.import_module(".".join(relative.parts[1:])), name))]


# --- diagrams -------------------------------------------------------------------------------------------------


def diagram(table: Mapping[tuple[Enum, Enum], Enum]) -> str:
    """A state table as text: under each state its arrows, those to another state first."""
    arrows: dict[Enum, dict[Enum, list[str]]] = {}
    for (state, event), target in table.items():
        arrows.setdefault(state, {}).setdefault(target, []).append(event.name)
    labels = [", ".join(events) for targets in arrows.values() for events in targets.values()]
    state_width = max(len(state.name) for state in arrows)
    label_width = max(map(len, labels))
    lines = []
    for state, targets in arrows.items():
        name = state.name
        for target, events in sorted(targets.items(), key=lambda pair: pair[0] is state):
            label = ", ".join(events)
            lines.append(f"{name:<{state_width}} ── {label} {'─' * (label_width - len(label) + 2)}▶ {target.name}")
            name = ""
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("mark", "table"), [("link", link.TRANSITIONS), ("delivery", delivery.TRANSITIONS)])
def test_state_diagrams_are_drawn_from_the_tables(mark: str, table: Mapping[tuple[Enum, Enum], Enum]) -> None:
    expected = f"<!-- table: {mark} -->\n```\n{diagram(table)}```\n"

    assert expected in text_of("ARCHITECTURE.md"), f"put this into ARCHITECTURE.md:\n{expected}"


def test_the_status_in_the_readme_looks_like_the_real_one() -> None:
    from rich.console import Console

    waiting = Account(104, 40, pending=64, lag_s=9.0, last_error="[Errno 111] Connection refused")
    daemon: dict[str, Any] = {"state": "running", "pid": 14392, "updated_ns": 2**62, "backends": ["file", "mlflow"]}
    daemon |= {"open_streams": 2, "spool_bytes": 9564}
    report = Report(
        daemon, {"r1": RunName("p", "e", 0)}, {"file": {"r1": Account(104, 104)}, "mlflow": {"r1": waiting}}
    )
    console = Console(width=120, color_system=None, file=io.StringIO())

    with console.capture() as capture:
        console.print(status_table(report))

    real = [" ".join(line.split()) for line in capture.get().splitlines()]
    (shown,) = [block for block in examples("README.md", "console") if "verl-shipper status" in block]
    lines = [" ".join(line.split()) for line in shown.splitlines()[1:]]
    assert lines[0] == real[0]
    assert lines[2:5] == real[2:5]


# --- examples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("README.md", {"run_start": 1, "metrics": 100, "generations": 1, "span": 1, "run_finish": 1}),
        (
            "client/README.md",
            {"run_start": 1, "metrics": 1, "generations": 1, "text": 1, "file": 1, "span": 2, "run_finish": 1},
        ),
    ],
)
def test_the_clients_examples_run_and_log_what_they_say(site: Site, name: str, kinds: dict[str, int]) -> None:
    example, *_ = examples(name, "python")
    (site.root / "trace.json").write_text("[]")

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        env=site.env(),
        cwd=site.root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for folder in stream_folders(str(site.spool)) for line in record_lines(folder)]
    assert {kind: sum(f'"kind": "{kind}"' in line for line in lines) for kind in kinds} == kinds
    assert len(lines) == sum(kinds.values())


def test_the_example_of_a_backend_obeys_the_contract(tmp_path: Path) -> None:
    (example,) = examples("shipper/README.md", "python")
    space: dict[str, Any] = {}
    exec(compile(example, "example", "exec"), space)
    (kind,) = [each for each in space.values() if isinstance(each, type) and Backend in each.__bases__]
    memory = FakeMemory()
    backend = kind(run_info(), {"path": str(tmp_path / "tally.json")}, memory)

    assert backend.open() is None
    for _ in range(2):
        outcome = backend.upload(batch(metrics(0), metrics(1)))
        assert isinstance(outcome, Delivered)
        memory.remember(outcome.remember)

    assert sum(memory.get("seen").values()) == 2


def test_the_fault_matrix_is_whole_and_nothing_in_it_is_missing_or_doubled() -> None:
    block = text_of("docs/delivery-guarantees.md").partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.strip().splitlines()]
    assert rows[0] == ["fault", *(f"`{name}`" for name in TRACKERS)]
    assert [row[0] for row in rows[2:]] == [what for what, _ in FAULTS.values()]
    assert {cell for row in rows[2:] for cell in row[1:]} == {"0 missing, 0 doubled"}
