"""The command line: every command has help with an example, every mistake is one line and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from support.spools import build_stream
from support.streams import Folder, frame, loss_frame, make_header
from unit.shipper.scripted import BACKEND, Bench, Tracker
from verl_shipper import __version__
from verl_shipper.backends.base import Delivered, Outcome, Reject
from verl_shipper.cli import main
from verl_shipper.letters import letters
from verl_shipper_client import Client
from verl_shipper_spool.location import SOCKET_VARIABLE, SPOOL_VARIABLE, STATE_VARIABLE
from verl_shipper_spool.record import Loss


def _commands(group: click.Group, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*prefix, name)
        if isinstance(command, click.Group):
            yield from _commands(command, (*prefix, name))


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SPOOL_VARIABLE, str(tmp_path / "spool"))
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def _one_line(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    (line,) = result.stderr.strip().splitlines()
    assert all(word in line for word in words), line


# Help


@pytest.mark.parametrize("path", [(), *_commands(main)], ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...]) -> None:
    for flag in ("-h", "--help"):
        result = _run(*path, flag)
        assert result.exit_code == 0
        assert "Usage:" in result.output
    if path:
        assert f"verl-shipper {' '.join(path)}" in result.output.replace("Usage: main", ""), "no example"


def test_the_version_is_the_packages() -> None:
    assert __version__ in _run("--version").output


def test_a_module_can_be_run_too() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "verl_shipper", "--version"], capture_output=True, text=True, check=True
    )
    assert __version__ in result.stdout


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run",), ("no backend", "--backend")),
        (("run", "--backend", "fiel"), ("'file'",)),
        (("run", "--backend", "file"), ("backends.file.dir",)),
        (("run", "--backend", "console", "--set", "x"), ("KEY=VALUE",)),
        (("run", "--config", "absent.yaml"), ("absent.yaml",)),
        (("run", "--backend", "console", "--socket", "htp://x"), ("htp://x",)),
        (("flush",), ("no backend",)),
    ],
)
def test_a_configuration_that_cannot_work_ends_with_2(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    _one_line(_run(*arguments), 2, *words)


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("run", "--nonsense"),
        ("cat",),
        ("dead-letters", "retry"),
        ("dead-letters", "retry", "5"),
        ("dead-letters", "discard", "--backend", "file", "five"),
        ("run", "--drain-timeout", "soon"),
    ],
)
def test_usage_that_cannot_be_understood_ends_with_2(arguments: tuple[str, ...]) -> None:
    result = _run(*arguments)

    assert result.exit_code == 2
    assert "Error" in result.stderr


def test_a_folder_that_is_not_there_ends_with_1(tmp_path: Path) -> None:
    _one_line(_run("flush", tmp_path / "absent", "--backend", "console"), 1, "absent")
    _one_line(_run("cat", tmp_path / "absent"), 1, "absent")


def test_what_the_system_refuses_is_one_line_and_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", "/root/spool")

    monkeypatch.setattr("verl_shipper.show.stream_folders", refuse)

    _one_line(_run("cat", tmp_path), 1, "Permission denied", "/root/spool")


def test_a_reader_that_left_is_no_mistake(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add_records(0, 5000)
    command = f"{sys.executable} -m verl_shipper cat {tmp_path} | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)

    assert result.returncode == 0
    assert result.stderr == ""
    assert json.loads(result.stdout)["seq"] == 0


# cat


def test_cat_prints_records_losses_damage_and_gaps_as_strict_json(tmp_path: Path) -> None:
    folder = Folder(tmp_path, make_header(run_id="run-7", rank=3))
    folder.add(frame(0) + b"garbage" + frame(2) + loss_frame(5, Loss(3, 5, "metrics", "disk_full")) + frame(5), 0)
    folder._offset += 100
    folder.add(frame(9), 9)

    for path in (folder.path, tmp_path):
        lines = [json.loads(line) for line in _run("cat", path).output.splitlines()]

        assert [line["kind"] for line in lines] == ["metrics", "damage", "metrics", "loss", "metrics", "gap", "metrics"]
        assert {line["stream"] for line in lines} == {folder.header.stream_id}
        assert (lines[0]["run_id"], lines[0]["rank"], lines[0]["data"]) == ("run-7", 3, {"n": 0})
        assert (lines[3]["records"], lines[3]["reason"]) == (2, "disk_full")


def test_cat_shows_how_large_a_part_of_a_file_is_and_not_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "trace.bin").write_bytes(bytes(range(256)) * 10)
    Client(spool_dir=tmp_path / "spool").log_file(tmp_path / "trace.bin", step=3)

    lines = [json.loads(line) for line in _run("cat", tmp_path / "spool").output.splitlines()]

    (part,) = [line for line in lines if line["kind"] == "file"]
    assert (part["step"], part["data"]["name"], part["data"]["data"]) == (3, "trace.bin", "2560 bytes")


def test_cat_reads_a_daemons_state_folder_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "state")
    bench.log(bench.stream(), 3)
    bench.close()

    assert len(_run("cat", tmp_path / "state").output.splitlines()) == 3


def test_cat_of_an_empty_spool_prints_nothing(tmp_path: Path) -> None:
    result = _run("cat", tmp_path)

    assert (result.exit_code, result.output) == (0, "")


# status and dead letters


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder with one delivered record and one dead letter."""
    answers: list[Outcome] = [Reject("odd", [0])]
    bench = Bench(tmp_path / "state", Tracker(lambda _batch: answers.pop() if answers else Delivered()))
    bench.log(bench.stream(run_id="run-7"), 2)
    bench.until_quiet()
    bench.close()
    return tmp_path / "state"


def test_status_of_nothing_says_how_to_begin(tmp_path: Path) -> None:
    result = _run("status", "--state-dir", tmp_path / "absent")

    assert result.exit_code == 0
    assert "verl-shipper run" in result.output
    assert json.loads(_run("status", "--json", "--state-dir", tmp_path / "absent").output)["backends"] == {}


def test_status_shows_the_account(state: Path) -> None:
    shown = json.loads(_run("status", "--json").output)
    assert shown["backends"][BACKEND]["dead_lettered"] == 1
    assert shown["backends"][BACKEND]["delivered"] == 1

    table = _run("status", "--state-dir", state).output
    assert BACKEND in table
    assert "dead letters" in table


def test_dead_letters_are_listed_for_people_and_programs(state: Path) -> None:
    result = _run("dead-letters", "list")
    assert "run-7 metrics step 0: odd" in result.stdout
    assert "1 dead letters" in result.stderr

    (letter,) = json.loads(_run("dead-letters", "list", "--json").stdout)
    assert (letter["run_id"], letter["step"], letter["reason"]) == ("run-7", 0, "odd")


@pytest.mark.parametrize(
    ("selection", "count"),
    [(("--all",), 1), (("--backend", BACKEND), 1), (("--backend", BACKEND, "1"), 1), (("--run", "other"), 0)],
)
def test_dead_letters_are_marked(state: Path, selection: tuple[str, ...], count: int) -> None:
    result = _run("dead-letters", "discard", *selection)

    assert result.exit_code == 0
    assert f"{count} dead letters marked to discard" in result.output
    assert [letter.wanted for letter in letters(str(state))] == ["discard" if count else None]


# flush


def test_flush_delivers_a_folder_and_ends_with_0(tmp_path: Path) -> None:
    spool = tmp_path / "offline"
    spool.mkdir()
    build_stream(spool, "run-7", records_per_segment=50)
    arguments: list[Any] = ["flush", spool, "--backend", "file", "--set", f"backends.file.dir={tmp_path / 'out'}"]
    for words in ("file: 50 records delivered", "file: nothing new"):
        result = subprocess.run(
            [sys.executable, "-m", "verl_shipper", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {STATE_VARIABLE: str(tmp_path / "flush-state")},
        )
        assert result.returncode == 0, result.stderr
        assert words in result.stderr

    (written,) = (tmp_path / "out").rglob("*.jsonl")
    assert len(written.read_text().splitlines()) == 50


# Configuration


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "shipper.yaml"
    path.write_text(f"backends:\n  file: {{dir: {tmp_path}/out}}\nsampling: {{log_frequency: 10}}\n")
    return path


def test_config_show_prints_what_is_in_effect(config: Path) -> None:
    result = _run("config", "show", "--config", config, "--set", "sampling.rank=all")

    assert result.exit_code == 0, result.output
    assert f"      log_frequency: 10  # {config}:3\n" in result.stdout
    assert "      rank: all  # --set sampling.rank=all\n" in result.stdout
    told = json.loads(_run("config", "show", "--config", config, "--json").stdout)
    assert told["backends.file.sampling.log_frequency"] == {"value": 10, "origin": f"{config}:3"}
    assert told["trainer.project_name"]["value"] is None


def test_config_check_says_all_that_is_wrong(config: Path) -> None:
    assert _run("config", "check", "--config", config).stdout == "ok: delivers to file\n"

    config.write_text("backends:\n  file: {dri: x}\nlog_level: loud\n")
    result = _run("config", "check", "--config", config, "--set", "sampling.rank=x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert [word in line for word, line in zip(("dri", "loud", "rank"), result.stderr.splitlines(), strict=True)] == [
        True,
        True,
        True,
    ]
    config.write_text("backends:\n  file: {}\n  mlflow: {tracking_uri: /folder}\n")
    result = _run("config", "check", "--config", config)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 2), "what the backends have against it, too"
    assert _run("config", "check", "--config", config.parent).exit_code == 2
    assert "no backend" in _run("config", "check").stderr


def test_help_loads_nothing_that_costs_time() -> None:
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom verl_shipper.cli import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "assert CliRunner().invoke(main, ['config', 'show', '--help']).exit_code == 0\n"
        "heavy = {'yaml', 'omegaconf', 'zmq', 'rich', 'watchdog', 'sqlite3', 'verl_shipper.backends'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert result.stdout == "[]\n"
