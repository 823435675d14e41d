"""File events: a flag that hastens a look, and nothing worse than slowness when there are none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from support.processes import wait_for
from verl_shipper.watch import Watch


@pytest.mark.parametrize("event", ["made", "moved"])
def test_a_new_folder_is_news_once(tmp_path: Path, event: str) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "before").mkdir()
    watch = Watch([str(tmp_path / "spool")])
    watch.start()
    try:
        assert not watch.take_news()
        if event == "made":
            (tmp_path / "spool" / "new").mkdir()
        else:
            (tmp_path / "before").rename(tmp_path / "spool" / "moved")
        wait_for(watch.take_news, 20.0, "the event comes")
    finally:
        watch.stop()


@pytest.mark.parametrize("change", ["written", "replaced", "link turned"])
def test_a_change_of_the_one_file_is_told(tmp_path: Path, change: str) -> None:
    folder = tmp_path / "etc"
    (folder / "one").mkdir(parents=True)
    (folder / "..data").symlink_to("one")
    (folder / "config.yaml").write_text("a")
    heard: list[bool] = []
    watch = Watch([], str(folder / "config.yaml"), lambda: heard.append(True))
    watch.start()
    try:
        (folder / "config.yaml").read_text()
        (folder / "something else").write_text("x")
        if change == "written":
            (folder / "config.yaml").write_text("b")
        elif change == "replaced":
            (tmp_path / "new").write_text("b")
            (tmp_path / "new").rename(folder / "config.yaml")
        else:
            (folder / "..next").symlink_to("two")
            (folder / "..next").rename(folder / "..data")
        wait_for(lambda: heard, 20.0, "the event comes")
        assert not watch.take_news(), "it is no stream"
    finally:
        watch.stop()


def test_reading_the_one_file_and_its_neighbours_are_no_news(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "spool").mkdir()
    file = tmp_path / "etc" / "config.yaml"
    file.write_text("a")
    heard: list[bool] = []
    watch = Watch([str(tmp_path / "spool")], str(file), lambda: heard.append(True))
    watch.start()
    try:
        file.read_text()
        (tmp_path / "etc" / "other.yaml").write_text("x")
        (tmp_path / "spool" / "new").mkdir()
        wait_for(watch.take_news, 20.0, "the event behind them comes")
        assert heard == []
    finally:
        watch.stop()


def test_appends_are_no_news(tmp_path: Path) -> None:
    stream = tmp_path / "stream"
    stream.mkdir()
    watch = Watch([str(tmp_path)])
    watch.start()
    try:
        (stream / "0.seg").write_bytes(b"x" * 1000)
        (tmp_path / "new").mkdir()
        wait_for(watch.take_news, 20.0, "the event behind it comes")
        assert not watch.take_news()
    finally:
        watch.stop()


@pytest.mark.parametrize("error", [OSError(28, "inotify watch limit reached"), OSError(24, "inotify instance limit")])
def test_a_machine_without_events_left_is_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: OSError
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("watchdog.observers.Observer.start", refuse)
    watch = Watch([str(tmp_path)])
    watch.start()

    assert not watch.take_news()
    assert "polling instead" in caplog.text
    watch.stop()


def test_folders_that_are_not_there_yet_are_left_out(tmp_path: Path) -> None:
    watch = Watch([str(tmp_path / "absent"), str(tmp_path)])
    watch.start()
    (tmp_path / "new").mkdir()

    wait_for(watch.take_news, 20.0, "the event comes")
    watch.stop()
    watch.stop()


def test_a_folder_that_comes_later_or_anew_is_watched_from_then_on(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    watch = Watch([str(folder)])
    watch.start()
    try:
        for number in range(2):
            folder.mkdir()
            watch.mend(1000.0 * (number + 1))
            watch.take_news()
            (folder / "new").mkdir()
            wait_for(watch.take_news, 20.0, "the event comes")
            folder.rename(tmp_path / f"old{number}")
    finally:
        watch.stop()


@pytest.mark.parametrize(
    ("number", "words"), [(28, "max_user_watches"), (24, "max_user_instances"), (5, "Input/output error")]
)
def test_each_cause_is_told_once_in_words_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, words: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("watchdog.observers.Observer.schedule", refuse)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    watch = Watch([str(tmp_path / "a"), str(tmp_path / "b")])
    watch.start()
    watch.mend(1000.0)
    watch.stop()

    (record,) = caplog.records
    assert words in record.getMessage()
    assert "space" not in record.getMessage()
