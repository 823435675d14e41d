"""`verl-shipper doctor`: what stands between this machine's records and their trackers.

    spool  socket  state  daemon  disk        this file, folders.py
    verl                                      verl_check.py, when asked for
    file, console, mlflow, …                  each backend's own `diagnose`, with checks.py

Every finding is one line: level, topic, what is so, what to type next. Changes nothing; a check that breaks is itself a
finding, and the others go on.

Must not know: trackers, click. On failure: a Finding.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import zmq

from verl_shipper import verl_check
from verl_shipper.backends import load_backend
from verl_shipper.checks import Finding, Level
from verl_shipper.config import Config, check_backends
from verl_shipper.daemon import Places, places_of
from verl_shipper.errors import ConfigError
from verl_shipper.folders import cleaned_finding, device, disk_findings, folder_findings, user_name
from verl_shipper.listener import ipc_path
from verl_shipper.show import is_running
from verl_shipper.status import Report, report
from verl_shipper.store import open_store_read_only
from verl_shipper_spool.header import start_ticks
from verl_shipper_spool.location import SOCKET_PATH_BYTES_MAX, SPOOL_VARIABLE, is_private, spool_dir, state_dir
from verl_shipper_spool.redact import scrub
from verl_shipper_spool.wire import Data, Greet, pack, unpack_from_daemon

STATE_FILE = "daemon.sqlite3"
TOPICS = ("spool", "socket", "state", "daemon", "disk", "workers")
ANSWER_S = 3.0  # a daemon in the middle of a turn may take a while
# Bytes of a stream that nobody greeted: a daemon answers, and keeps nothing.
NO_STREAM = "0" * 32


@dataclass(frozen=True, slots=True)
class Line:
    """A finding under its topic."""

    topic: str
    finding: Finding

    def text(self, width: int) -> str:
        """The line for a person, without its level; `width` is that of the widest topic."""
        hint = f"; {self.finding.hint}" if self.finding.hint else ""
        return f"{self.topic:<{width}}  {self.finding.what}{hint}"

    def to_json(self) -> dict[str, str]:
        finding = self.finding
        return {"level": finding.level.value, "topic": self.topic, "what": finding.what, "hint": finding.hint}


def width_of(config: Config) -> int:
    """Width of the widest topic."""
    return max(map(len, (*TOPICS, *config.backends)))


def examine(config: Config, *, with_verl: bool = False) -> Iterator[Line]:
    """All findings, each as soon as it is known."""
    places, broken = _places(config)
    known = report(places.state_dir)
    checks: list[tuple[str, Iterator[Finding]]] = [
        ("spool", _spools(places)),
        ("socket", iter([broken]) if broken else _sockets(places)),
        ("state", _state(places, known)),
        ("daemon", _daemon(places, known)),
        ("disk", _disks(places, config.node_quota_bytes)),
        *(_verl(places) if with_verl else ()),
        *((name, _backend(name, config)) for name in config.backends),
    ]
    for topic, findings in checks:
        for finding in _safely(findings):
            yield Line(topic, Finding(finding.level, _plain(finding.what), _plain(finding.hint)))
    if not config.backends and not with_verl:
        hint = "verl-shipper doctor --backend NAME, or --config FILE"
        yield Line("backends", Finding(Level.WARN, "no backend is chosen, none was looked at", hint))


def _verl(places: Places) -> Iterator[tuple[str, Iterator[Finding]]]:
    yield "verl", verl_check.verl_findings()
    yield "driver", verl_check.driver_findings()
    yield "workers", verl_check.worker_findings()
    yield "asked", verl_check.asked_findings()
    yield "seen", verl_check.seen_findings(places.spool_dir, os.path.join(places.state_dir, STATE_FILE))


def _places(config: Config) -> tuple[Places, Finding | None]:
    """Places, and what is wrong with the socket's address when there are none for it."""
    try:
        return places_of(config), None
    except ConfigError as error:
        spool = spool_dir(config.spool_dir)
        roots = tuple(map(os.path.abspath, config.adopt)) or (spool,)
        return Places(state_dir(spool, config.state_dir), spool, roots, ()), _finding(error)


def _spools(places: Places) -> Iterator[Finding]:
    for root in dict.fromkeys((places.spool_dir, *places.adopt)):
        yield from folder_findings(root, private=True)
        danger = cleaned_finding(root)
        if danger is not None:
            yield replace(danger, hint=f"export {SPOOL_VARIABLE}=/PATH/THAT/STAYS for trainer and daemon")


def _state(places: Places, known: Report) -> Iterator[Finding]:
    yield from folder_findings(places.state_dir, private=True)
    danger = cleaned_finding(places.state_dir)
    if danger is not None:
        yield danger
    path = os.path.join(places.state_dir, STATE_FILE)
    if "state_error" in known.daemon or (os.path.exists(path) and not _is_database(path)):
        what = f"{path} cannot be read as a database"
        yield Finding(Level.FAIL, what, "run the daemon as its owner; it sets a damaged file aside and makes it anew")


def _is_database(path: str) -> bool:
    database = open_store_read_only(path)
    if database is not None:
        database.close()
    return database is not None


def _sockets(places: Places) -> Iterator[Finding]:
    for address in places.listen:
        path = ipc_path(address)
        if path:
            yield from _socket_file(path, places)
        else:
            yield Finding(Level.OK, f"{address} is an address on the network; whoever reaches it may send records")


def _socket_file(path: str, places: Places) -> Iterator[Finding]:
    if not is_private(path):
        folder = os.path.dirname(path)
        yield Finding(Level.FAIL, f"{folder} is not yours alone, no socket can be there", f"ls -ld {folder}")
        return
    danger = None if path.startswith(f"{places.spool_dir}/") else cleaned_finding(path)
    if danger is not None:
        yield danger
    length = len(os.fsencode(path))
    # The name asked for is not known here any more: a stand-in is recognised by its folder.
    is_stand_in = path.startswith("/dev/shm/verl-shipper-")  # noqa: S108 - asked whether it is private
    how = f"{path} ({length} bytes" + (
        f": stands in for a name above {SOCKET_PATH_BYTES_MAX}, for trainer and daemon alike)" if is_stand_in else ")"
    )
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        yield Finding(Level.OK, f"{how} is not there; the daemon makes it")
        return
    except OSError as error:
        yield Finding(Level.FAIL, f"{how} cannot be looked at: {error.strerror}", f"ls -l {path}")
        return
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISSOCK(found.st_mode):
        yield Finding(Level.FAIL, f"{how} is no socket", f"rm {path}")
    elif why := _why_no_connection(path):
        owner = user_name(found.st_uid)
        what = f"{how}, owner {owner}, mode {mode:04o}: {why}; trainers spool to disk meanwhile"
        yield Finding(Level.WARN, what, "start the daemon, as the trainer's user: verl-shipper run")
    elif mode & 0o077:
        yield Finding(Level.WARN, f"{how} has mode {mode:04o}: others may send records", f"chmod 600 {path}")
    else:
        yield Finding(Level.OK, f"{how} is private and somebody listens")


def _why_no_connection(path: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_S)
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            return "nobody listens, it was left behind"
        except OSError as error:
            return f"no connection: {error.strerror or error}"
    return ""


def _daemon(places: Places, known: Report) -> Iterator[Finding]:
    pid = known.daemon.get("pid", 0)
    answering = next((address for address in places.listen if _answers(address)), "")
    start = "verl-shipper run --backend NAME; until then records wait in the spool"
    if not known.daemon or (not is_running(known) and answering):
        if answering:
            what = f"a daemon answers at {answering}, with another state folder than {places.state_dir}"
            yield Finding(Level.WARN, what, "give --state-dir DIR as that daemon's first line names it")
        else:
            yield Finding(Level.WARN, f"none has run with {places.state_dir}", start)
        return
    heartbeat_s = max(time.time() - known.daemon.get("updated_ns", 0) / 1e9, 0.0)
    if not is_running(known) or (not answering and not start_ticks(pid)):
        yield Finding(Level.WARN, f"not running; pid {pid} was last seen {heartbeat_s:.0f} s ago", start)
        return
    since = _since(pid)
    if answering:
        yield Finding(Level.OK, f"pid {pid} runs{since} and answers at {answering}")
    elif known.daemon.get("socket"):
        what = f"pid {pid} runs{since}, and does not answer at {', '.join(places.listen)}"
        where = ", ".join(known.daemon["socket"])
        yield Finding(Level.FAIL, what, f"it listens at {where}; use that, or start it again: kill {pid}")
    else:
        yield Finding(Level.OK, f"pid {pid} runs{since}, without a socket (a flush)")
    for problem in known.daemon.get("problems", []):
        yield Finding(Level.WARN, f"it says: {problem}", "verl-shipper status")
    if known.daemon.get("unheard_sources"):
        what = f"{known.daemon['unheard_sources']} sources cannot reach the socket; they are read from disk"
        yield Finding(Level.WARN, what, f"compare {SPOOL_VARIABLE}, user and mounts of trainer and daemon")


def _answers(address: str) -> bool:
    """Whether a daemon speaks our protocol there."""
    path = ipc_path(address)
    if path and _why_no_connection(path):
        return False
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        with contextlib.suppress(zmq.ZMQError):
            dealer.connect(address)
            dealer.send_multipart(pack(Data(NO_STREAM, 0, gap=False, content=b"?")), zmq.NOBLOCK)
            if dealer.poll(int(ANSWER_S * 1000)):
                return isinstance(unpack_from_daemon(dealer.recv_multipart()), Greet)
    return False


def _since(pid: int) -> str:
    """When a process started; empty when it cannot be seen from here."""
    ticks = start_ticks(pid)
    try:
        with open("/proc/stat", encoding="ascii") as file:
            boot_s = next(int(line.split()[1]) for line in file if line.startswith("btime "))
    except (OSError, StopIteration, ValueError):
        return ""
    began_s = boot_s + ticks / os.sysconf("SC_CLK_TCK")
    return f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(began_s))}" if ticks else ""


def _disks(places: Places, quota_bytes: int) -> Iterator[Finding]:
    """One line per disk, not per folder: what one fills up, the other lacks."""
    wanted = {f"spool {root}": root for root in dict.fromkeys((places.spool_dir, *places.adopt))}
    wanted["state"] = places.state_dir
    disks: dict[int, list[str]] = {}
    for who, path in wanted.items():
        disks.setdefault(device(path), []).append(who)
    for names in disks.values():
        path = wanted[names[0]]
        if "state" in names:
            yield from disk_findings(places.state_dir, " and ".join(names), quota_bytes)
        else:
            yield from disk_findings(path, " and ".join(names))


def _backend(name: str, config: Config) -> Iterator[Finding]:
    settings: Mapping[str, Any] = config.backends[name]
    try:
        check_backends(replace(config, backends={name: settings}))
        backend = load_backend(name)
    except ConfigError as error:
        yield _finding(error)
        return
    decided = backend.decide(settings)
    yield from (Finding(Level.WARN, note) for note in decided.notes)
    yield from backend.diagnose(decided.settings)


def _finding(error: ConfigError) -> Finding:
    place = f" [{error.where}]" if error.where else ""
    return Finding(Level.FAIL, f"{error.what}{place}", error.hint)


def _safely(findings: Iterator[Finding]) -> Iterator[Finding]:
    """A check that breaks is a finding. Without the error's text, which may hold anything."""
    try:
        yield from findings
    except Exception as error:  # noqa: BLE001 - backends are other people's code too
        yield Finding(Level.FAIL, f"this check broke: {type(error).__name__}", "please report it")


def _plain(text: str) -> str:
    """One line, without terminal escapes and without anything that looks like a secret."""
    return scrub("".join(sign if sign.isprintable() else "?" for sign in text))
