"""Running the daemon for a person: in the foreground, beside a command, or until a folder is flushed.

    serve        until SIGTERM, SIGINT or SIGUSR1; SIGHUP loads the configuration again
    beside       start, run the command, drain, end with the command's exit code; signals go to the command
    flush        read folders, deliver, end when nothing remains

Must not know: click. On failure: ShipperError for the command line to print.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from verl_shipper import status
from verl_shipper.command import additions
from verl_shipper.config import Config, Request, check_backends
from verl_shipper.daemon import Daemon, Places, opened, places_of
from verl_shipper.errors import HeldError, ShipperError
from verl_shipper.reload import Reload
from verl_shipper_spool.location import SOCKET_VARIABLE, SPOOL_VARIABLE, STATE_VARIABLE

EXIT_REMAINS = 4
LOOK_S = 0.2
END = (signal.SIGTERM, signal.SIGINT)
END_OF_A_STEP = signal.SIGUSR1  # what Slurm's srun passes on; of a SIGTERM it makes a SIGKILL for its step
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # a trainer's own: "write a checkpoint", for one
FORWARD_GRACE_S = 10.0  # a command that was told to end has so long before it is killed


def serve(config: Config, request: Request | None = None) -> int:
    """Run the daemon until a signal."""
    check_backends(config)
    reload = _reload(config, request)
    with (
        _told_to_end((*END, END_OF_A_STEP)) as told,
        _hung_up(reload),
        opened(config, places_of(config), reload) as daemon,
    ):
        _say_ready(daemon)
        daemon.run(until=told)
    return 0


def beside(config: Config, command: Sequence[str], drain_timeout_s: float, request: Request | None = None) -> int:
    """Run a command with the daemon beside it. Returns the command's exit code (128 + n for signal n)."""
    check_backends(config)
    places = places_of(config)
    reload = _reload(config, request)
    with _told_to_end() as told, _hung_up(reload), opened(config, places, reload) as daemon:
        _say_ready(daemon)
        environment = os.environ | additions(os.environ) | {SPOOL_VARIABLE: places.spool_dir}
        if daemon.listener.bound:
            environment[SOCKET_VARIABLE] = daemon.listener.bound[0]
        try:
            process = subprocess.Popen(list(command), env=environment)
        except OSError as error:
            raise ShipperError(
                f"cannot run {command[0]}: {error.strerror}", hint="check the command after --"
            ) from error
        told_s = [0.0]

        def pass_on(number: int) -> None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

        def forward(number: int) -> None:
            told_s[0] = told_s[0] or time.monotonic()
            pass_on(number)

        with _signals(forward, END), _signals(pass_on, PASSED_ON):
            if told():  # before there was anybody to tell
                forward(signal.SIGTERM)
            daemon.run(until=lambda: _ended(process, told_s[0]))
        code = process.returncode
        if not told():
            _drain(daemon, drain_timeout_s, told)
        _say_remaining(daemon)
    return code if code >= 0 else 128 - code


def flush(config: Config, folders: Sequence[str], patience_s: float, on_turn: Callable[[status.Report], None]) -> int:
    """Deliver what is in `folders`, or, without any, what the user's daemon has not delivered yet.

    Returns 0 when nothing remains, EXIT_REMAINS when `patience_s` passed without progress, an operator is needed, or
    a signal came.
    """
    check_backends(config)
    places = _flush_places(config, folders) if folders else replace(places_of(config), listen=())
    pace = _Pace(patience_s)
    try:
        with _told_to_end() as told, opened(config, places) as daemon:

            def finished() -> bool:
                if told():
                    return True
                if not pace.due():
                    return False
                report = status.report(places.state_dir, config.backends)
                on_turn(report)
                return daemon.drained() or _only_parked(daemon) or pace.stalled(report)

            daemon.run(until=finished)
            report = status.report(places.state_dir, config.backends)
            on_turn(report)
            settled = daemon.adopt.settled() and daemon.collecting.settled()
            return 0 if report.pending == 0 and settled else EXIT_REMAINS
    except HeldError:
        if folders:
            raise
        return _follow(places.state_dir, pace, on_turn)


def _reload(config: Config, request: Request | None) -> Reload | None:
    return None if request is None else Reload(request, config)


@dataclass(slots=True)
class _Pace:
    """How often a flush looks, and when it gives up."""

    patience_s: float
    looked_s: float = 0.0
    moved_s: float = field(default_factory=time.monotonic)
    done: int = -1

    def due(self) -> bool:
        now_s = time.monotonic()
        if now_s - self.looked_s < LOOK_S:
            return False
        self.looked_s = now_s
        return True

    def stalled(self, report: status.Report) -> bool:
        """Whether nothing has been delivered for longer than the patience."""
        done = sum(report.total(name).logged for name in report.backends) - report.pending
        if done != self.done:
            self.done, self.moved_s = done, time.monotonic()
        return time.monotonic() - self.moved_s > self.patience_s


def _follow(state_dir: str, pace: _Pace, on_turn: Callable[[status.Report], None]) -> int:
    """A daemon is at work on it already: look on until it is done, with what lies in its watched folders by now."""
    began_ns = time.monotonic_ns()
    with _told_to_end() as told:
        while not told():
            report = status.report(state_dir)
            on_turn(report)
            collected_ns = report.daemon.get("collected_ns")
            collected = collected_ns is None or collected_ns >= began_ns
            settled = report.daemon.get("settled", False) and collected and report.pending == 0
            if settled or pace.stalled(report):
                return 0 if settled else EXIT_REMAINS
            time.sleep(LOOK_S)
    return EXIT_REMAINS


def _flush_places(config: Config, folders: Sequence[str]) -> Places:
    """State lies inside the first folder (unless told otherwise), so that it travels with what it describes."""
    roots = tuple(os.path.abspath(folder) for folder in folders)
    for root in roots:
        if not os.path.isdir(root):
            raise ShipperError(f"no such folder: {root}", hint="give a spool folder, see `verl-shipper flush --help`")
    chosen = config.state_dir or os.environ.get(STATE_VARIABLE) or os.path.join(roots[0], ".flush-state")
    return Places(os.path.abspath(chosen), roots[0], roots, (), keep_sources=True)


def _ended(process: subprocess.Popen[bytes], told_s: float) -> bool:
    if process.poll() is not None:
        return True
    if told_s and time.monotonic() - told_s > FORWARD_GRACE_S:
        process.kill()
    return False


def _drain(daemon: Daemon, timeout_s: float, told: Callable[[], bool]) -> None:
    """Go on until everything is delivered, time is over, or only an operator could help."""
    deadline_s = time.monotonic() + timeout_s
    daemon.collecting.finish()
    daemon.adopt.look(time.monotonic())
    look_s = 0.0

    def finished() -> bool:
        nonlocal look_s
        now_s = time.monotonic()
        if told() or now_s < look_s:
            return told()
        look_s = now_s + 0.1
        daemon.adopt.look(now_s)
        return now_s >= deadline_s or daemon.drained() or _only_parked(daemon)

    daemon.run(until=finished)


def _only_parked(daemon: Daemon) -> bool:
    """Whether all that remains waits for an operator."""
    if not (daemon.adopt.settled() and daemon.collecting.settled()):
        return False
    found = status.report(daemon.places.state_dir, daemon.config.backends)
    waiting = [account for runs in found.backends.values() for account in runs.values() if account.pending]
    return bool(waiting) and all(account.parked for account in waiting)


def _say_ready(daemon: Daemon) -> None:
    where = ", ".join(daemon.listener.bound or daemon.places.adopt)
    names = ", ".join(daemon.config.backends)
    _say(f"verl-shipper: ready on {where}; delivering to {names}; state in {daemon.places.state_dir}")


def _say_remaining(daemon: Daemon) -> None:
    found = status.report(daemon.places.state_dir, daemon.config.backends)
    for name in found.backends:
        total = found.total(name)
        if total.pending:
            why = f" ({total.last_error})" if total.last_error else ""
            _say(
                f"verl-shipper: {total.pending} of {total.logged} records are not at {name} yet{why}; "
                f"they are kept: `verl-shipper run` or `verl-shipper flush` delivers them"
            )
    for place in found.watch:
        if waiting := place.get("figures", {}).get("waiting", 0):
            _say(
                f"verl-shipper: {waiting} or more files in {place.get('path')} are not taken yet; "
                f"`verl-shipper run` or `verl-shipper flush` with the same `watch` takes them"
            )


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


@contextlib.contextmanager
def _hung_up(reload: Reload | None) -> Iterator[None]:
    """SIGHUP loads the configuration again inside the block."""
    if reload is None:
        yield
        return
    with _signals(lambda _number: reload.ask(), (signal.SIGHUP,)):
        yield


@contextlib.contextmanager
def _signals(act: Callable[[int], None], numbers: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Signals do `act` inside the block."""
    before = [signal.signal(number, lambda received, _frame: act(received)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _told_to_end(numbers: tuple[signal.Signals, ...] = END) -> Iterator[Callable[[], bool]]:
    """Whether one of these signals came since the block began. Begins before the daemon and ends behind it: a signal in
    the middle of its start or its end is heard, and leaves nothing half done."""
    came: list[int] = []
    with _signals(came.append, numbers):
        yield lambda: bool(came)
