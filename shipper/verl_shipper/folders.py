"""Whether a folder can hold what is to be kept there: who may read it, who owns it, its disk and how much is free.

Being writable is tried, with a file that has no name: mode bits say little about root, read-only mounts, quotas and
network file systems. A folder that does not exist yet is judged by the one it will be made in.

Must not know: what is kept there. On failure: a Finding; nothing is raised, nothing is left behind.
"""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Iterator

from verl_shipper.checks import Finding, Level

DISK_FULL_BYTES = 64 * 1024**2
DISK_LOW_BYTES = 1024**3
FILES_FULL, FILES_LOW = 100, 10_000
TRIAL_BYTES = 4096  # one block: a disk that has none left says so
# Cleaners remove what nobody read for 10 (30) days there, and services may have one of their own.
CLEANED = ("/tmp", "/var/tmp")  # noqa: S108 - named as a danger
NETWORK_KINDS = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "gpfs", "lustre", "nfs", "nfs4", "smb3")
MEMORY_KINDS = ("ramfs", "tmpfs")


def folder_findings(path: str, *, private: bool) -> Iterator[Finding]:
    """Problems of a folder, a line each; one good line when there are none. `private`: nobody else's business."""
    path = os.path.abspath(path)
    found = list(_problems(path, private=private))
    if found:
        yield from found
    elif os.path.isdir(path):
        yield Finding(Level.OK, f"{path} is {'private and ' if private else ''}writable")
    else:
        yield Finding(Level.OK, f"{path} does not exist yet and can be made")


def cleaned_finding(path: str) -> Finding | None:
    """A warning for a path that cleaners of temporary files visit."""
    for place in {os.path.abspath(path), os.path.realpath(path)}:
        for root in CLEANED:
            if place.startswith(f"{root}/"):
                what = f"{path} is below {root}: cleaners remove it after days, services with a private {root} miss it"
                return Finding(Level.WARN, what, "choose a place that stays, for example below ~/.local/state")
    return None


def disk_findings(path: str, who: str, wanted_bytes: int = DISK_LOW_BYTES) -> Iterator[Finding]:
    """The disk that `path` is or will be on: `who` lives there and may want `wanted_bytes`."""
    place = existing(path)
    kind = file_system(place)
    try:
        disk = os.statvfs(place)
    except OSError as error:
        yield Finding(Level.FAIL, f"{who}: the disk does not answer: {error.strerror}", f"df -h {place}")
        return
    free_bytes = disk.f_bavail * disk.f_frsize
    free = f"{who} on {kind}: {_size(free_bytes)} free"
    look = f"free some; look: du -xh --max-depth=1 {place} | sort -h | tail"
    if free_bytes < DISK_FULL_BYTES:
        yield Finding(Level.FAIL, free, look)
    elif free_bytes < wanted_bytes:
        yield Finding(Level.WARN, f"{free}, {_size(wanted_bytes)} may be wanted", look)
    else:
        yield Finding(Level.OK, free)
    if disk.f_files and disk.f_favail < FILES_LOW:  # file systems without a limit say 0
        level = Level.FAIL if disk.f_favail < FILES_FULL else Level.WARN
        yield Finding(level, f"{who} on {kind}: room for {disk.f_favail} more files (inodes)", f"df -i {place}")
    if kind in NETWORK_KINDS:
        what = f"{who} is on a network ({kind}): when it hangs, writers hang"
        yield Finding(Level.WARN, what, "choose a folder on a local disk")
    elif kind in MEMORY_KINDS:
        yield Finding(Level.WARN, f"{who} is in memory ({kind}): a reboot loses it", "choose a folder on a disk")


def existing(path: str) -> str:
    """`path`, or the nearest folder above it that exists."""
    path = os.path.abspath(path)
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def device(path: str) -> int:
    """Number of the disk that `path` is or will be on; -1 when nobody can tell."""
    try:
        return os.stat(existing(path)).st_dev
    except OSError:
        return -1


def file_system(path: str) -> str:
    """Kind of the file system at `path`, as the kernel names it."""
    place, best, kind = os.path.realpath(path), "", "an unknown file system"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return kind
    for line in lines:
        mount, _, source = line.partition(" - ")
        point = mount.split()[4].encode().decode("unicode_escape") if "\\" in mount else mount.split()[4]
        if len(point) >= len(best) and (place == point or place.startswith(point.rstrip("/") + "/")):
            best, kind = point, source.split()[0]
    return kind


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _problems(path: str, *, private: bool) -> Iterator[Finding]:
    place = existing(path)
    try:
        found = os.stat(place)
    except OSError as error:
        yield Finding(Level.FAIL, f"{place} cannot be looked at: {error.strerror}", f"ls -ld {place}")
        return
    if not stat.S_ISDIR(found.st_mode):
        yield Finding(Level.FAIL, f"{place} is no folder", f"move it away: mv {place} {place}.old")
        return
    if place == path:
        yield from _rights(path, found, private=private)
    why = _why_not_writable(place)
    if why:
        what = f"{path} cannot be written" if place == path else f"{path} does not exist and cannot be made in {place}"
        yield Finding(Level.FAIL, f"{what}: {why}", f"ls -ld {place}; id")


def _rights(path: str, found: os.stat_result, *, private: bool) -> Iterator[Finding]:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o002 and (private or not mode & stat.S_ISVTX):
        yield Finding(Level.FAIL, f"{path} has mode {mode:04o}: everybody may write there", f"chmod go-w {path}")
    elif private and mode & 0o077:
        yield Finding(Level.WARN, f"{path} has mode {mode:04o}: others may look into it", f"chmod 700 {path}")
    if private and found.st_uid != os.geteuid():
        owner = user_name(found.st_uid)
        what = f"{path} belongs to {owner}, and you are {user_name(os.geteuid())}"
        yield Finding(Level.WARN, what, f"run the daemon as the trainer's user: sudo -u {owner} verl-shipper run")


def _why_not_writable(path: str) -> str:
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(TRIAL_BYTES))
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _size(size_bytes: float) -> str:
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024:
            break
        size_bytes, unit = size_bytes / 1024, larger
    return f"{size_bytes:.0f} {unit}" if size_bytes >= 10 or unit == "B" else f"{size_bytes:.1f} {unit}"
