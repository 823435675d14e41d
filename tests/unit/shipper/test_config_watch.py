"""Watched folders in the configuration: entries as values, mistakes told with place and nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.configs import FILE, load, refused, without_variables
from verl_shipper.config import Request
from verl_shipper.config_show import effective, lines_of
from verl_shipper.config_watch import WatchEntry


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    without_variables(monkeypatch)


def test_one_line_is_enough(tmp_path: Path) -> None:
    found = load(tmp_path, f"{FILE}watch: [{{path: /data/rollouts, kind: generations}}]\n")

    assert found.watch == (WatchEntry("/data/rollouts", "generations"),)
    assert found.watch[0].table_name == "rollouts"
    assert found.system_metrics
    assert found.system_interval_s == 15


@pytest.mark.parametrize(
    "text",
    [
        "watch: [{path: /a, stable_s: 7}, {path: /b}]",
        "watch: {0: {path: /a, stable_s: 7}, other: {path: /b}}",
        "watch:\n  - path: /a\n    stable_s: 7\n  - path: /b\n",
    ],
)
def test_a_list_and_a_map_of_entries_mean_the_same(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, f"{FILE}{text}\n").watch == (WatchEntry("/a", stable_s=7.0), WatchEntry("/b"))


def test_a_single_entry_needs_no_list_and_the_command_line_changes_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)

    assert load(tmp_path, FILE, "watch={path: ~/x}").watch[0].path == "/home/me/x"
    assert load(tmp_path, FILE, "watch=[{path: x}]").watch[0].path == str(tmp_path / "x")
    found = load(tmp_path, f"{FILE}watch: [{{path: '${{oc.env:HOME}}/r'}}]\n", "watch.0.kind=file", "watch.b.path=/b")
    assert found.watch == (WatchEntry("/home/me/r", "file"), WatchEntry("/b"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("watch: [{path: /a, stabel_s: 1}]", ("watch.0.stabel_s", "did you mean watch.0.stable_s?", ":2")),
        ("watch: [{path: /a, kind: rollouts}]", ("watch.0.kind", "'rollouts'", "generations")),
        ("watch: [{kind: file}]", ("watch.0", "no path")),
        ("watch: [/a]", ("watch.0", "not a map")),
        ("watch: 7", ("watch", "not a list")),
        ("watch: [{path: /a}, {path: /a}]", ("watch.1", "watch.0")),
        ("watsh: [{path: /a}]", ("watsh", "watch")),
        ("system_metrics: {interval_s: 0.5}", ("system_metrics.interval_s", "1 to 3600")),
        ("watch: [{path: ./, recursive: yes}]", ("backends.file.dir", "watched")),
        ("watch: [{path: ./records/p}]", ("backends.file.dir", "watched")),
    ],
)
def test_a_mistake_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(tmp_path, f"{FILE}{text}\n")

    for word in words:
        assert word in line


def test_what_is_in_effect_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{FILE}watch: [{{path: /a, recursive: yes}}]\nsystem_metrics: {{enabled: no}}\n")

    shown = list(lines_of(effective(Request(str(path)).load())))

    assert f"watch: [{{path: /a, recursive: true}}]  # {path}:2" in shown
    assert f"  enabled: false  # {path}:3" in shown
