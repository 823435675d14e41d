"""A child for the tests of sdk/child.py: answers, fails, sleeps, talks and dies as it is told."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from verl_shipper.backends.sdk.serve import serve


def echo(value: Any) -> Any:
    return value


def fail(text: str) -> None:
    raise LookupError(text)


def leave() -> None:
    raise SystemExit(3)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def die(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def helper() -> int:
    """A process of the SDK's own, in the same session."""
    return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")


serve({"echo": echo, "fail": fail, "leave": leave, "sleep": sleep, "die": die, "helper": helper})
