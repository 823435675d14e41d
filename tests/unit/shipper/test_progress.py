"""Progress of a flush: lines where there is no terminal, bars where there is one, and what remains at the end."""

from __future__ import annotations

from collections import Counter

import pytest

from verl_shipper import progress
from verl_shipper.progress import Progress
from verl_shipper.status import Account, Report


def _report(**backends: Account) -> Report:
    return Report(backends={name: {"run": account} for name, account in backends.items()})


def _summary(capsys: pytest.CaptureFixture[str], *reports: Report) -> list[str]:
    with Progress() as shown:
        for report in reports:
            shown.show(report)
    capsys.readouterr()
    shown.summary()
    return capsys.readouterr().err.splitlines()


def test_what_was_delivered_is_counted_from_where_it_began(capsys: pytest.CaptureFixture[str]) -> None:
    began = _report(file=Account(logged=10, delivered=4, pending=6))
    ended = _report(file=Account(logged=12, delivered=12))

    assert _summary(capsys, began, ended) == ["file: 8 records delivered"]


def test_nothing_new_is_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    done = _report(file=Account(logged=10, delivered=10))

    assert _summary(capsys, done, done) == ["file: nothing new"]


def test_what_remains_is_told_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    account = Account(logged=10, delivered=2, dead_lettered=1, dropped=Counter(a=1, b=2), pending=4, last_error="503")

    (line,) = _summary(capsys, _report(file=Account(logged=10, pending=10)), _report(file=account))

    assert "1 dead letters" in line
    assert "3 dropped" in line
    assert "4 remain (503)" in line


def test_without_a_report_there_is_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert _summary(capsys) == []


def test_a_pipe_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_PAUSE_S", 0.0)
    with Progress() as shown:
        shown.show(_report(file=Account(logged=10, delivered=4, pending=6)))

    assert capsys.readouterr().err == "file: 4 of 10 records done\n"


def test_a_terminal_gets_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with Progress() as shown:
        shown.show(_report(file=Account(logged=10, delivered=4, pending=6)))
        shown.show(_report(file=Account(logged=10, delivered=10)))

    assert "10/10" in capsys.readouterr().err
