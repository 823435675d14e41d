"""Shipped files in a folder: each under its own name, whole or not at all, none in place of another.

    <folder>/profiles/step_40/trace.json.gz        names: file_names.py

A file is linked to its name, which fails when the name is taken, whoever took it and when: two daemons may write to
one folder. The same content under that name is the same file, come again; any other gets a name of its own.

Must not know: records, lines. On failure: OSError, and nothing stands under the name that should not.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil

from verl_shipper.backends.file_assembly import READ_BYTES, Whole
from verl_shipper.backends.file_names import path_of
from verl_shipper.backends.paths import LOCAL_FORBIDDEN
from verl_shipper_spool.files import RealFiles

FOLDER_MODE = 0o755
FILE_MODE = 0o644
NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
NO_FOLDER = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR})  # a file has the name of a folder, or the other way


def put(whole: Whole, folder: str) -> str:
    """Give a file its name below `folder`; answers the name. Durable when it returns."""
    os.chmod(whole.path, FILE_MODE)
    wanted = path_of(whole, LOCAL_FORBIDDEN)
    with contextlib.suppress(FileExistsError):
        _put_at(whole, os.path.join(folder, wanted))
        return wanted
    wanted = path_of(whole, LOCAL_FORBIDDEN, again=True)
    path = os.path.join(folder, wanted)
    try:
        _put_at(whole, path)
    except FileExistsError:
        os.unlink(path)  # the name holds this file's id: what is there is a copy of it that was torn
        _put_at(whole, path)
    return wanted


def make_folder(path: str) -> None:
    """Make a folder and what is missing above it, durably: power loss must not take the file's only name."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, FOLDER_MODE)
    RealFiles().sync_folder(parent)


def _put_at(whole: Whole, path: str) -> None:
    """Raises FileExistsError when another file is in the way."""
    try:
        make_folder(os.path.dirname(path))
        _link(whole.path, path)
    except OSError as error:
        if error.errno not in NO_FOLDER:
            raise
        if not _is_same(whole, path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
    RealFiles().sync_folder(os.path.dirname(path))


def _link(source: str, path: str) -> None:
    try:
        os.link(source, path)
        return
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    torn = f"{path}.incoming"
    shutil.copyfile(source, torn)
    RealFiles().sync_file(torn)
    os.rename(torn, path)


def _is_same(whole: Whole, path: str) -> bool:
    try:
        if os.path.getsize(path) != whole.size or not os.path.isfile(path):
            return False
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
    except OSError:
        return False
    return digest.hexdigest() == whole.sha256
