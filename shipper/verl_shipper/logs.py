"""What we log, and what packages log and raise in our processes: to stderr, without secrets.

Every line passes `scrub` as it is printed, with its traceback, so that no caller has to think of it. An exception that
nobody catches is a line of the log, too.

Must not know: who logs. Never raises.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType

from verl_shipper_spool.redact import scrub

log = logging.getLogger("verl_shipper")


class ScrubbedFormatter(logging.Formatter):
    """A formatter whose lines hold no secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return scrub(super().format(record))


def log_to_stderr(level: str, form: str) -> None:
    """Have this process log to stderr, and tell what nobody caught."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ScrubbedFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("watchdog").setLevel(logging.WARNING)  # at DEBUG it tells of every file that is opened
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def _uncaught(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, at)
        return
    log.critical("ended by an error of ours; please report it", exc_info=(kind, error, at))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread is not None else "a thread"
        log.critical("%s ended", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))
