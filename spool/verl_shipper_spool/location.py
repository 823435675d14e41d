"""Where things are when nobody says so. Trainer and daemon compute the same places from the same few facts.

    spool   argument → VERL_SHIPPER_SPOOL_DIR → <home>/.local/state/verl-shipper/<node>/spool
    socket  argument → VERL_SHIPPER_SOCKET    → <spool>/run/ingest.sock, or a short stand-in for it
    state   argument → VERL_SHIPPER_STATE_DIR → <home>/.local/state/verl-shipper/<node>/state, or beside a given
                                                spool: <spool>.state

The spool is the meeting point: whoever agrees on it agrees on the socket. Never in /tmp (cleaners remove it, services
with a private /tmp do not see it); per node, since a home may be shared between nodes; per user by its modes. A path
too long for a unix socket is replaced by a digest of it below /dev/shm/verl-shipper-<uid>, the same in both processes.

Must not know: who asks. On failure: UsageError for an address that cannot work.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import stat

from verl_shipper_spool.errors import UsageError

SPOOL_VARIABLE = "VERL_SHIPPER_SPOOL_DIR"
SOCKET_VARIABLE = "VERL_SHIPPER_SOCKET"
STATE_VARIABLE = "VERL_SHIPPER_STATE_DIR"
RUN_ID_VARIABLE = "VERL_SHIPPER_RUN_ID"
PROJECT_VARIABLE = "VERL_PROJECT"  # the guide's own name, so that one variable serves trainer and shipper
EXPERIMENT_VARIABLE = "VERL_EXPERIMENT"
TAKEOVER_VARIABLE = "VERL_SHIPPER_TAKEOVER"  # a verl job's own trackers are shipped, not called
UNNAMED = "default"  # project or experiment that nobody has named

# A folder of its own: who removes a stale socket together with its folder removes no records.
SOCKET_BELOW_SPOOL = ("run", "ingest.sock")

# sun_path holds 108 bytes with its final NUL; ZeroMQ needs a few of its own on some platforms.
SOCKET_PATH_BYTES_MAX = 100


def spool_dir(given: str | os.PathLike[str] | None = None) -> str:
    """Folder of the client spools, absolute."""
    chosen = os.fspath(given) if given else os.environ.get(SPOOL_VARIABLE) or _default_base("spool")
    return os.path.abspath(os.path.expanduser(chosen))


def state_dir(spool: str, given: str | os.PathLike[str] | None = None) -> str:
    """Folder of the daemon's own spool and state, absolute."""
    chosen = os.fspath(given) if given else os.environ.get(STATE_VARIABLE)
    if not chosen:
        parent = os.path.dirname(spool)
        chosen = os.path.join(parent, "state") if spool == _default_base("spool") else f"{spool.rstrip('/')}.state"
    return os.path.abspath(os.path.expanduser(chosen))


def socket_address(spool: str, given: str | None = None) -> str:
    """ZeroMQ address of the daemon that serves `spool`. Raises UsageError for an address of an unknown form."""
    chosen = given or os.environ.get(SOCKET_VARIABLE) or os.path.join(spool, *SOCKET_BELOW_SPOOL)
    scheme, separator, rest = chosen.partition("://")
    if not separator:
        return "ipc://" + short_socket_path(os.path.abspath(os.path.expanduser(chosen)))
    if scheme == "ipc" and rest:
        return "ipc://" + short_socket_path(os.path.abspath(rest))
    if scheme == "tcp" and rest.rpartition(":")[2].isdigit():
        return chosen
    raise UsageError(
        f"socket address {chosen!r} is neither a path, ipc://PATH nor tcp://HOST:PORT",
        where=f"--socket or {SOCKET_VARIABLE}",
        hint="give a path such as /run/verl-shipper/ingest.sock",
    )


def short_socket_path(path: str) -> str:
    """`path`, or its stand-in when a unix socket cannot have a name that long."""
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:24]
    return f"/dev/shm/verl-shipper-{os.getuid()}/{digest}.sock"  # noqa: S108 - private folder, checked by its users


def is_private(path: str) -> bool:
    """Whether the folder of a socket may be trusted: /dev/shm is everybody's, a stand-in there must be ours alone."""
    folder = os.path.dirname(path)
    if not folder.startswith("/dev/shm/"):  # noqa: S108 - checked right here
        return True
    try:
        found = os.stat(folder, follow_symlinks=False)
    except FileNotFoundError:
        return True  # nobody's yet
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _default_base(leaf: str) -> str:
    return os.path.join(_home(), ".local", "state", "verl-shipper", os.uname().nodename, leaf)


def _home() -> str:
    home = os.environ.get("HOME")
    if home and os.path.isabs(home):
        return home
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container user without a name
        return f"/var/tmp/verl-shipper-{os.getuid()}"  # noqa: S108 - the last resort, made private by its creator
