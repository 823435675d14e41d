"""Where a tracker's key comes from. Read anew at every call, so that a key that was replaced is seen.

    1. setting `api_key_file`       a file of mode 0600 or 0400, ours or root's
    2. systemd credential           $CREDENTIALS_DIRECTORY/wandb_api_key for WANDB_API_KEY
    3. environment                  the first variable that is set
    4. netrc                        the password of the host, in $NETRC or ~/.netrc

Never a setting `api_key`: behind --set everybody on the machine could read it in `ps`, in the configuration it would
be copied along. A source that is there but cannot be used is an error, never passed over for the next one.

Must not know: trackers. On failure: ConfigError with the command that mends it; no text or repr shows a key.
"""

from __future__ import annotations

import netrc
import os
import pwd
import stat
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_shipper.checks import Finding, Level
from verl_shipper.errors import ConfigError

CREDENTIALS_VARIABLE = "CREDENTIALS_DIRECTORY"  # systemd's, see LoadCredential=
KEY_BYTES_MAX = 64 * 1024
PRIVATE_MODES = (0o600, 0o400)


@dataclass(frozen=True, slots=True)
class Key:
    """A secret and where it was found, the latter for people."""

    value: str = field(repr=False)
    origin: str


def find_key(env_names: Sequence[str], settings: Mapping[str, Any], netrc_host: str | None = None) -> Key | None:
    """The key, None when there is none anywhere. Raises ConfigError for a source that cannot be used."""
    if settings.get("api_key") is not None:
        hint = f"put it into a file of mode 0600 and set api_key_file, or into {env_names[0]}; and make a new key"
        raise ConfigError("a key does not belong into settings, where others can read it", where="api_key", hint=hint)
    if settings.get("api_key_file"):
        return _from_file(str(settings["api_key_file"]))
    return _from_systemd(env_names) or _from_environment(env_names) or _from_netrc(netrc_host)


def diagnose_key(
    env_names: Sequence[str], settings: Mapping[str, Any], netrc_host: str | None = None
) -> Generator[Finding, None, Key | None]:
    """One finding about the key; returns the key. Whether the tracker takes it is for the caller to ask."""
    try:
        key = find_key(env_names, settings, netrc_host)
    except ConfigError as error:
        place = f" [{error.where}]" if error.where else ""
        yield Finding(Level.FAIL, f"{error.what}{place}", error.hint)
        return None
    if key is None:
        yield Finding(Level.FAIL, "there is no key", f"export {env_names[0]}=…, or set api_key_file to a 0600 file")
    else:
        yield Finding(Level.OK, f"key found: {key.origin}")
    return key


def _from_file(path: str) -> Key:
    path = os.path.abspath(os.path.expanduser(path))
    return Key(_content(path, "api_key_file", private=True), f"file {path}")


def _from_systemd(env_names: Sequence[str]) -> Key | None:
    folder = os.environ.get(CREDENTIALS_VARIABLE)
    for name in map(str.lower, env_names) if folder else ():
        path = os.path.join(folder or "", name)
        if os.path.lexists(path):
            # systemd sees to owner and mode, by rules of its own.
            return Key(_content(path, CREDENTIALS_VARIABLE, private=False), f"systemd credential {name}")
    return None


def _from_environment(env_names: Sequence[str]) -> Key | None:
    for name in env_names:
        value = os.environ.get(name, "").strip()
        if value:
            return Key(value, f"environment {name}")
    return None


def _from_netrc(host: str | None) -> Key | None:
    path = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")
    if not host or not os.path.exists(path):
        return None
    try:
        entry = netrc.netrc(path).hosts.get(host)  # without `default`, which is not meant for us
    except netrc.NetrcParseError as error:  # its text quotes what it stumbled over
        raise ConfigError(f"netrc cannot be read, line {error.lineno}", where=path, hint="correct that line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("netrc cannot be read", where=path, hint=f"ls -l {path}") from error
    if entry is None or not entry[2]:
        return None
    _require_private(os.stat(path), path, "NETRC")
    return Key(entry[2], f"netrc {path}")


def secret_lines(path: str, where: str, *, private: bool = True) -> list[str]:
    """All lines of a file that holds secrets, without empty ones. Raises ConfigError for one that cannot be used."""
    content = _bytes_of(path, where, private=private).decode("utf-8", "replace")
    return [line.strip() for line in content.splitlines() if line.strip()]


def _content(path: str, where: str, *, private: bool) -> str:
    """The one line of a key file."""
    lines = _bytes_of(path, where, private=private).decode("utf-8", "replace").split()
    if len(lines) != 1 or not lines[0].isascii() or not lines[0].isprintable():
        what = "is empty" if not lines else "does not hold a key and nothing else"
        raise ConfigError(f"{path} {what}", where=where, hint="write the key into it, one line")
    return lines[0]


def _bytes_of(path: str, where: str, *, private: bool) -> bytes:
    """What a file with a secret holds; `private`: owner and mode must keep others out."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hold us up
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path} is no file", where=where, hint="give the path of a file that holds the key")
            if private:
                _require_private(found, path, where)
            return os.read(fd, KEY_BYTES_MAX)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", where=where, hint=f"ls -l {path}") from error


def _require_private(found: os.stat_result, path: str, where: str) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path} belongs to {_user(found.st_uid)}, who could read and change the key",
            where=where,
            hint=f"chown {_user(os.geteuid())} {path}",
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode not in PRIVATE_MODES:
        raise ConfigError(f"{path} has mode {mode:04o}, a key needs 0600", where=where, hint=f"chmod 600 {path}")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
