"""Files of one entry, a few at a time: a pass over folders that may be deep, huge, unreadable or not there yet.

    /data/rollouts              the files in it whose names fit the kind; with `recursive`, those below it
    /data/*/profile/**/*.json   a pattern; `**` is any number of folders
    /data/logs/run.jsonl        a file, by whatever name

Links are followed only where the path names them without a pattern, so that no loop is ever entered. Pipes, sockets
and devices are left alone.

Must not know: what is known of the files. On failure: a folder that cannot be read is a problem with a name; the rest
goes on.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from verl_shipper.config_watch import WatchEntry, base_of
from verl_shipper.policy.file_names import kind_of
from verl_shipper.policy.watching import Seen

DEPTH_MAX = 32  # folders below the entry's own
ANY_DEPTH = "**"


@dataclass(frozen=True, slots=True)
class Found:
    """A file that fits. `inner`: its path below the entry's folder."""

    path: str
    inner: str
    kind: str
    seen: Seen


def walk(entry: WatchEntry, tell: Callable[[str, OSError], None]) -> Iterator[Found | None]:
    """One pass; None for everything that was looked at and is nothing."""
    base, pattern = base_of(entry.path)
    if not pattern:
        try:
            found = os.stat(base)
        except FileNotFoundError:
            return
        except OSError as error:
            tell(base, error)
            return
        if not stat.S_ISDIR(found.st_mode):
            kind = kind_of(os.path.basename(base), entry.kind, is_named=True)
            if stat.S_ISREG(found.st_mode) and kind:
                yield Found(base, os.path.basename(base), kind, _seen(found))
            return
        pattern = [ANY_DEPTH, "*"] if entry.recursive else ["*"]
        yield from _below(base, base, pattern, entry, tell, is_named=False)
        return
    yield from _below(base, base, pattern, entry, tell, is_named=True)


def _below(
    base: str,
    folder: str,
    pattern: list[str],
    entry: WatchEntry,
    tell: Callable[[str, OSError], None],
    *,
    is_named: bool,
) -> Iterator[Found | None]:
    """A stack of our own instead of recursion. An item is a folder and what is still to match below it."""
    waiting = [(folder, pattern, 0)]
    while waiting:
        place, wanted, depth = waiting.pop()
        try:
            listing = os.scandir(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            tell(place, error)
            continue
        with listing:
            while True:
                try:
                    item = next(listing, None)
                    if item is None:
                        break
                    below = [rest for rest in _rests(item.name, wanted) if rest]
                    if below and depth < DEPTH_MAX and item.is_dir(follow_symlinks=False):
                        waiting += [(item.path, rest, depth + 1) for rest in below]
                        yield None
                        continue
                    yield _file(item, base, entry, is_named=is_named) if [] in _rests(item.name, wanted) else None
                except FileNotFoundError:
                    continue  # removed while we looked
                except OSError as error:
                    tell(place, error)
                    break


def _rests(name: str, wanted: list[str]) -> list[list[str]]:
    """What is left to match below `name`; an empty rest says that `name` itself fits."""
    if wanted[0] == ANY_DEPTH:
        return [wanted, *_rests(name, wanted[1:])] if len(wanted) > 1 else [wanted, []]
    hidden = name.startswith(".") and not wanted[0].startswith(".")
    return [wanted[1:]] if not hidden and fnmatch.fnmatchcase(name, wanted[0]) else []


def _file(item: os.DirEntry[str], base: str, entry: WatchEntry, *, is_named: bool) -> Found | None:
    kind = kind_of(item.name, entry.kind, is_named=is_named)
    if kind is None or not item.is_file(follow_symlinks=False):
        return None
    return Found(item.path, item.path[len(base.rstrip("/")) + 1 :], kind, _seen(item.stat(follow_symlinks=False)))


def seen_of(fd: int) -> Seen:
    return _seen(os.fstat(fd))


def _seen(found: os.stat_result) -> Seen:
    return Seen(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
