"""How this process is about to end, for a run that nobody finished by hand.

An uncaught exception leaves `sys.last_type`; the code of `sys.exit` is lost before anybody may ask, so `watch` puts a
thin wrapper around it that remembers the code and calls the original. `raise SystemExit(3)` and `os._exit` stay
unseen: the first counts as 0, after the second the daemon ends the run as "unknown".

Must not know: clients. Never raises anything but what `sys.exit` raises.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

_asked: list[object] = []
_original: list[Callable[..., NoReturn]] = []


def watch() -> None:
    """Begin to remember what `sys.exit` is called with. Once is enough; more often is harmless."""
    if not _original:
        _original.append(sys.exit)
        sys.exit = _exit


def seen() -> int:
    """The exit code as far as it can be known: 1 after an uncaught exception, else what `sys.exit` was asked for."""
    if getattr(sys, "last_type", None) is not None:
        return 1
    return as_code(_asked[-1]) if _asked else 0


def as_code(status: Any) -> int:
    """What the system makes of the argument of `sys.exit`: None is 0, a number itself, anything else 1."""
    if status is None:
        return 0
    return status if isinstance(status, int) else 1


def _exit(status: Any = None, /) -> NoReturn:
    if threading.current_thread() is threading.main_thread():  # elsewhere it ends a thread, not the process
        _asked.append(status)
        del _asked[:-1]
    _original[0](status)
