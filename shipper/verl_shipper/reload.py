"""A configuration that follows its file. Looked at in a thread, so that a slow disk holds up nobody.

    file changed (seen every LOOK_S, sooner after a file event), or SIGHUP ─▶ still for STILL_S ─▶ load ─▶ `take()`

The file is told from its former self by what `stat` says of the file behind its name: an editor's rename and a config
map whose link is turned look the same. One that cannot be used changes nothing but `problem`.

Must not know: what a configuration is good for. On failure: `problem` says it until it is mended; one line in the log.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from verl_shipper.config import Config, Request, check_backends
from verl_shipper.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 2.0
STILL_S = 0.4  # a file that is being written is not read in the middle
PAUSE_S = 0.1
Identity: TypeAlias = tuple[int, ...] | None


@dataclass(slots=True)
class Reload:
    """Watches one file for a daemon. `config` is what the daemon has.

    hasten()   look now: something happened in the file's folder
    ask()      load again whether it changed or not; both are safe in another thread, `ask` in a signal handler too
    take()     the new configuration, once
    """

    request: Request
    config: Config
    problem: str = ""
    _seen: Identity = None
    _seen_at_s: float = 0.0
    _loaded: Identity = None
    _asked: bool = False
    _new: deque[Config] = field(default_factory=lambda: deque(maxlen=1))  # from the thread to the daemon
    _wake: threading.Event = field(default_factory=threading.Event)
    _ended: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look. The first look loads what the daemon has already, or has changed since."""
        self._thread = threading.Thread(target=self._turn, name="reload", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)  # a disk that hangs holds the thread, not us

    def ask(self) -> None:
        self._asked = True  # nothing more: a signal handler may stand in the middle of anything

    def hasten(self) -> None:
        self._wake.set()

    def take(self) -> Config | None:
        try:
            return self._new.popleft()
        except IndexError:
            return None

    def look(self, now_s: float) -> bool:
        """Load if that is due. True while the file moves, so that the next look should come soon."""
        asked = self._asked
        present = _identity(self.request.path)
        if present != self._seen:
            self._seen, self._seen_at_s = present, now_s
        if not asked and present == self._loaded:
            return False
        if not asked and now_s - self._seen_at_s < STILL_S:
            return True
        self._asked = False
        self._loaded = present
        self._load()
        return False

    def _load(self) -> None:
        try:
            found = self.request.load()
            check_backends(found)
        except ConfigError as error:
            self._refuse(error.line())
        except Exception as error:
            log.exception("the new configuration cannot be used; the old one stays")
            self._refuse(f"{type(error).__name__}: {error}")
        else:
            if self.problem:
                log.warning("configuration: mended")
            self.problem = ""
            if found != self.config:
                self.config = found
                self._new.append(found)

    def _refuse(self, why: str) -> None:
        problem = f"configuration: {why}; the old one stays in use"
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem

    def _turn(self) -> None:
        look_s = 0.0
        while not self._ended:
            now_s = time.monotonic()
            if self._asked or self._wake.is_set() or now_s >= look_s:
                self._wake.clear()
                look_s = now_s + (STILL_S / 2 if self._safely_looks(now_s) else LOOK_S)
            self._wake.wait(min(max(look_s - time.monotonic(), 0.0), PAUSE_S * 3))

    def _safely_looks(self, now_s: float) -> bool:
        try:
            return self.look(now_s)
        except Exception:
            log.exception("cannot look at the configuration; going on")
            return False


def _identity(path: str | None) -> Identity:
    """What tells a file from another one of the same name; None when there is none."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
