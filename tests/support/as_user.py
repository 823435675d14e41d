"""Runs a command as another user, in a mount namespace of its own. Needs root; runs as a program.

    as_user.py UID [--hide FOLDER]... -- COMMAND ARGS...

The interpreter and the packages under test may lie where other users cannot go (a home of mode 0700). Such a folder is
covered by an empty one in which only the needed trees are bound back. `--hide` covers a folder the same way, as
PrivateTmp= of systemd does. UID "-" keeps the user.

Must not know: what it runs. On failure: CalledProcessError or OSError, before the command begins.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CLONE_NEWNS = 0x00020000


def main() -> None:
    separator = sys.argv.index("--")
    user, *options = sys.argv[1:separator]
    command = sys.argv[separator + 1 :]
    hidden = {Path(folder) for folder in options if folder != "--hide"}
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    _mount("--make-rprivate", "/")
    trees = needed_trees()
    closed = {folder for tree in trees for folder in tree.parents if not folder.stat().st_mode & 0o001}
    outermost = {folder for folder in closed | hidden if not set(folder.parents) & (closed | hidden)}
    for folder in sorted(outermost):
        _cover(folder, [tree for tree in trees if folder in tree.parents])
    if user != "-":
        os.setgroups([])
        os.setgid(int(user))
        os.setuid(int(user))
    os.execv(command[0], command)


def needed_trees() -> list[Path]:
    """Folders that the interpreter and the packages under test are in."""
    paths = {Path(sys.prefix), Path(sys.base_prefix), *(Path(entry) for entry in sys.path if entry)}
    real = {path.resolve() for path in paths if path.is_dir()} | {path for path in paths if path.is_dir()}
    return sorted(path for path in real if not set(path.parents) & real)


def _cover(folder: Path, trees: list[Path]) -> None:
    aside = Path(tempfile.mkdtemp(prefix="aside-", dir="/dev/shm"))
    _mount("-t", "tmpfs", "tmpfs", str(aside))
    for number, tree in enumerate(trees):
        (aside / str(number)).mkdir()
        _mount("--bind", str(tree), str(aside / str(number)))
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(folder))
    for number, tree in enumerate(trees):
        tree.mkdir(parents=True)
        _mount("--bind", str(aside / str(number)), str(tree))
    subprocess.run(["umount", "--recursive", str(aside)], check=True)
    aside.rmdir()


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
