"""File events: a flag that says "look now". Polling stays the truth, so every failure here is only slower.

Must not know: what is in the folders. On failure (no inotify left, network file system): one line, then silence.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

CHANGES = ("created", "modified", "moved", "deleted")


CONFIG_MAP_LINK = "..data"  # what Kubernetes turns when a mounted configuration changes


class Watch:
    """Watches folders for new or gone stream folders (not for every append: the socket brings those), and one file,
    for which `on_file` is called in watchdog's thread."""

    def __init__(self, folders: list[str], file: str | None = None, on_file: Callable[[], None] | None = None) -> None:
        self._folders = folders
        self._file = os.path.abspath(file) if file else None
        self._on_file = on_file
        self._news = threading.Event()
        self._observer: Any = None

    def start(self) -> None:
        from watchdog.events import FileSystemEvent, FileSystemEventHandler
        from watchdog.observers import Observer

        news, on_file = self._news, self._on_file
        names = {os.path.basename(self._file or ""), CONFIG_MAP_LINK}

        class Handler(FileSystemEventHandler):
            def on_created(self, _event: object) -> None:
                news.set()

            def on_moved(self, _event: object) -> None:
                news.set()

        class FileHandler(FileSystemEventHandler):
            def on_any_event(self, event: FileSystemEvent) -> None:
                places = {os.path.basename(os.fsdecode(path)) for path in (event.src_path, event.dest_path)}
                # To open and to read is no change; we do that ourselves.
                if on_file and event.event_type in CHANGES and places & names:
                    on_file()

        try:
            observer = Observer()
            for folder in self._folders:
                if os.path.isdir(folder):
                    observer.schedule(Handler(), folder, recursive=False)
            if self._file and os.path.isdir(os.path.dirname(self._file)):
                observer.schedule(FileHandler(), os.path.dirname(self._file), recursive=False)
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
