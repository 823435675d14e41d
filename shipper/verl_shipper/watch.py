"""File events: a flag that says "look now". Polling stays the truth, so every failure here is only slower.

Must not know: what is in the folders. On failure (no inotify left, network file system): one line, then silence.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any

log = logging.getLogger(__name__)


class Watch:
    """Watches folders for new or gone stream folders (not for every append: the socket brings those)."""

    def __init__(self, folders: list[str]) -> None:
        self._folders = folders
        self._news = threading.Event()
        self._observer: Any = None

    def start(self) -> None:
        from watchdog.events import FileSystemEventHandler
        from watchdog.observers import Observer

        news = self._news

        class Handler(FileSystemEventHandler):
            def on_created(self, _event: object) -> None:
                news.set()

            def on_moved(self, _event: object) -> None:
                news.set()

        try:
            observer = Observer()
            for folder in self._folders:
                if os.path.isdir(folder):
                    observer.schedule(Handler(), folder, recursive=False)
            observer.start()
        except OSError as error:
            # ENOSPC and EMFILE here speak of inotify limits, not of disks or files.
            log.warning("no file events (inotify limit or file system: %s); polling instead", error.strerror or error)
            return
        self._observer = observer

    def take_news(self) -> bool:
        """Whether something happened since the last call."""
        if self._news.is_set():
            self._news.clear()
            return True
        return False

    def stop(self) -> None:
        if self._observer is not None:
            with contextlib.suppress(RuntimeError):
                self._observer.stop()
                self._observer.join(timeout=2.0)
