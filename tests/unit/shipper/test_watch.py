"""File events: a flag that hastens a look, and nothing worse than slowness when there are none."""

from __future__ import annotations

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
