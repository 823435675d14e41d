"""Small training programs in processes of their own, and what they write down about what they logged.

A ledger has one line per `log()` call that has *returned*. It is written without fsync into a file on another
disk than the spool: it survives every kill of a process, and is what the oracle holds the product to.

Must not know: daemons. On failure: AssertionError with the program's standard error.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import final

from support.processes import kill, wait_for
from support.site import Site

TESTS = Path(__file__).parents[1]  # for programs that import from support
COUNTING = Path(__file__).with_name("counting_trainer.py")
AS_USER = Path(__file__).with_name("as_user.py")


class Ledger:
    """Values whose `log()` has returned, with the wall time of the return, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def entries(self) -> list[tuple[int, float]]:
        """(value, time in seconds) of every complete line."""
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        pairs = [line.split() for line in whole.splitlines()]
        return [(int(value), float(time_s)) for value, time_s in pairs]

    def values(self) -> list[int]:
        return [value for value, _ in self.entries()]

    def last(self) -> int:
        values = self.values()
        return values[-1] if values else -1

    def wait_for(self, value: int, timeout_s: float = 30.0) -> None:
        """Wait until `value` has been logged."""
        wait_for(lambda: self.last() >= value, timeout_s, f"the trainer logs {value}")


@final
class Trainer:
    """One training process: a script with arguments in the environment of a site."""

    def __init__(self, site: Site, script: Path, *arguments: object, env: Mapping[str, str] | None = None) -> None:
        self.errors = site.root / f"trainer-{time.monotonic_ns()}.log"
        with open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *(str(argument) for argument in arguments)],
                env=site.env(**(env or {})),
                cwd=site.root,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        kill(self.pid, signal.SIGKILL)
        self.process.wait(timeout=10)

    def wait(self, timeout_s: float = 60.0) -> None:
        """Wait for its end, which must be exit code 0."""
        try:
            code = self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"trainer hangs:\n{self.words()}") from None
        assert code == 0, f"trainer ended with {code}:\n{self.words()}"

    def words(self) -> str:
        return self.errors.read_text(errors="replace")

    def close(self) -> None:
        if self.is_running():
            self.kill()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def counting_trainer(
    site: Site,
    ledger: Ledger,
    *,
    project: str = "count",
    run_id: str = "r1",
    first: int = 0,
    count: int = 1_000_000_000,
    pace_s: float = 0.002,
    pad_bytes: int = 0,
    env: Mapping[str, str] | None = None,
) -> Trainer:
    """A trainer that logs `{"n": i}` at step i from `first` on, and notes each return in the ledger.

    `pad_bytes` makes each record that much longer by a text among its values.
    """
    return Trainer(site, COUNTING, project, run_id, first, count, pace_s, ledger.path, pad_bytes, env=env)


def write_script(site: Site, source: str, name: str = "train") -> Path:
    """Put a program into the site."""
    path = site.root / f"{name}-{time.monotonic_ns()}.py"
    path.write_text(source)
    return path


def run_script(
    site: Site,
    source: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    code: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Run a program of a few lines to its end; its exit code must be `code` (None: whatever)."""
    result = subprocess.run(
        [sys.executable, str(write_script(site, source)), *(str(argument) for argument in arguments)],
        env=site.env(**(env or {})),
        cwd=site.root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if code is not None:
        assert result.returncode == code, f"exit code {result.returncode}:\n{result.stdout}\n{result.stderr}"
    return result


def usable_root() -> bool:
    """Whether we may mount, set user ids and the like."""
    return os.geteuid() == 0


def as_user(uid: int | str, *hidden: str) -> list[str]:
    """Words to put in front of a command so that it runs as another user ("-": as this one), see as_user.py."""
    options = [word for folder in hidden for word in ("--hide", folder)]
    return [sys.executable, str(AS_USER), str(uid), *options, "--"]
