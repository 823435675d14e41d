"""File events: a flag that says "look now". Polling stays the truth, so every failure here is only slower.

    start                   a watch per folder that is there
    mend (every MEND_S)     one for each folder that came, or came anew, since

Linux bounds events per user, and reports that in words of other things: ENOSPC ("no space left on device") when the
watches are used up, EMFILE ("too many open files") when the instances are. Disks and files have nothing to do with it.

Must not know: what is in the folders. On failure (no inotify left, network file system): one line per cause, then
silence; what cannot be watched is polled.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

MEND_S = 60.0
CHANGES = ("created", "modified", "moved", "deleted")


CONFIG_MAP_LINK = "..data"  # what Kubernetes turns when a mounted configuration changes
LIMITS = {
    errno.ENOSPC: "inotify watches are used up; more: sysctl fs.inotify.max_user_watches",
    errno.EMFILE: "inotify instances or open files are used up; more: sysctl fs.inotify.max_user_instances, ulimit -n",
    errno.ENFILE: "open files are used up on this machine; more: sysctl fs.file-max",
}


class Watch:
    """Watches folders for new or gone stream folders (not for every append: the socket brings those), and one file,
    for which `on_file` is called in watchdog's thread. `appends`: every change in a folder is news."""

    def __init__(
        self,
        folders: list[str],
        file: str | None = None,
        on_file: Callable[[], None] | None = None,
        *,
        appends: bool = False,
    ) -> None:
        self._folders = folders
        self._file = os.path.abspath(file) if file else None
        self._on_file = on_file
        self._appends = appends
        self._news = threading.Event()
        self._observer: Any = None
        self._handlers: dict[str, Any] = {}
        self._watched: dict[str, tuple[tuple[int, int], Any]] = {}  # by folder: which one it was, and its watch
        self._mend_at_s = 0.0
        self._told: set[str] = set()

    def start(self) -> None:
        from watchdog.observers import Observer

        self._handlers = self._made_handlers()
        try:
            observer = Observer()
            observer.start()
        except (OSError, RuntimeError) as error:
            self._tell(error)
            return
        self._observer = observer
        self._watch_folders()

    def take_news(self) -> bool:
        """Whether something happened since the last call."""
        if self._news.is_set():
            self._news.clear()
            return True
        return False

    def mend(self, now_s: float) -> None:
        """Watch what could not be watched so far, or is another folder by now; now and then only."""
        if self._observer is not None and now_s >= self._mend_at_s:
            self._mend_at_s = now_s + MEND_S
            self._watch_folders()

    def stop(self) -> None:
        if self._observer is not None:
            with contextlib.suppress(RuntimeError):
                self._observer.stop()
                self._observer.join(timeout=2.0)

    def _made_handlers(self) -> dict[str, Any]:
        from watchdog.events import FileSystemEvent, FileSystemEventHandler

        news, on_file, changes = self._news, self._on_file, CHANGES if self._appends else ("created", "moved")
        names = {os.path.basename(self._file or ""), CONFIG_MAP_LINK}

        class Handler(FileSystemEventHandler):
            def on_any_event(self, event: FileSystemEvent) -> None:
                if event.event_type in changes:
                    news.set()

        class FileHandler(FileSystemEventHandler):
            def on_any_event(self, event: FileSystemEvent) -> None:
                places = {os.path.basename(os.fsdecode(path)) for path in (event.src_path, event.dest_path)}
                # To open and to read is no change; we do that ourselves.
                if on_file and event.event_type in CHANGES and places & names:
                    on_file()

        found: dict[str, Any] = {folder: Handler() for folder in self._folders}
        if self._file:
            # The file may lie in one of the folders, so that one folder has two meanings.
            found[os.path.join(os.path.dirname(self._file), "")] = FileHandler()
        return found

    def _watch_folders(self) -> None:
        for folder, handler in self._handlers.items():
            try:
                found = os.stat(folder)
            except OSError:
                continue  # not there yet
            identity = (found.st_dev, found.st_ino)
            before = self._watched.get(folder)
            if before is not None and before[0] == identity:
                continue
            if before is not None:
                del self._watched[folder]
                with contextlib.suppress(Exception):  # it ended with its folder
                    self._observer.unschedule(before[1])
            try:
                self._watched[folder] = (identity, self._observer.schedule(handler, folder, recursive=False))
            except OSError as error:
                self._tell(error)
            else:
                if before is not None:
                    self._news.set()

    def _tell(self, error: Exception) -> None:
        number = error.errno if isinstance(error, OSError) else None
        why = LIMITS.get(number or 0) or (isinstance(error, OSError) and error.strerror) or str(error)
        if why not in self._told:
            log.warning("no file events (%s); polling instead", why)
            self._told.add(why)
