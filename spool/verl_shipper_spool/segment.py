"""Segments: the files of one stream, and reading a stream as one line of bytes.

    <stream folder>/
      stream                               header, see header.py
      losses                               loss journal, see loss_journal.py
      0000000000000000-0000000000000000.seg
      0000000000800123-00000000000011d7.seg
      └ first offset ──┘└ first ordinal ─┘     both hexadecimal

Offsets count the bytes of the whole stream from 0; a frame never spans two segments. Bytes at an offset never
change once a frame there is complete, whoever holds the copy: that is what makes re-sending harmless.
A name says where a segment begins and how many records came before, so that a missing one is an exact gap.

Must not know: what is in a payload. On failure: an unreadable segment becomes a gap, and reading goes on. OSError when
the folder cannot be listed, or when this process is out of descriptors or memory (that is no gap: look again later).
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass

from verl_shipper_spool.files import Files

SEGMENT_NAME = re.compile(r"^([0-9a-f]{16})-([0-9a-f]{16})\.seg$")

# 8 MiB: small enough that a quota or an acknowledgement frees space soon, large enough that a roll is rare.
SEGMENT_BYTES_MAX = 8 * 1024 * 1024
SEGMENT_BYTES_MIN = 64 * 1024
DISK_PARTS = 16  # a segment is at most this part of the disk it lies on


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """One file of a stream: where it begins, and its path."""

    first_offset: int
    first_ordinal: int
    path: str


def segment_bytes_for(folder: str, wanted: int) -> int:
    """Size of a segment on the file system of `folder`: at most `wanted`, and a small part of a small disk.

    Only whole segments can be given back, so a disk that one segment fills could never be freed by what is delivered.
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return wanted
    return min(wanted, max(found.f_blocks * found.f_frsize // DISK_PARTS, SEGMENT_BYTES_MIN))


def segment_name(first_offset: int, first_ordinal: int) -> str:
    return f"{first_offset:016x}-{first_ordinal:016x}.seg"


def list_segments(files: Files, folder: str) -> list[Segment]:
    """Segments in order of their offsets. Names that are none of ours are left alone."""
    segments = []
    for name in files.names(folder):
        match = SEGMENT_NAME.match(name)
        if match:
            path = os.path.join(folder, name)
            segments.append(Segment(int(match[1], 16), int(match[2], 16), path))
    segments.sort()
    return segments


def segment_at(segments: list[Segment], offset: int) -> int:
    """Index of the last segment that begins at or before `offset`; -1 when there is none."""
    low, high = 0, len(segments)
    while low < high:
        middle = (low + high) // 2
        if segments[middle].first_offset <= offset:
            low = middle + 1
        else:
            high = middle
    return low - 1


class RawReader:
    """Reads a stream as bytes, for those who pass them on unread. Remembers the folder's listing."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = folder
        self._segments: list[Segment] = []

    def read(self, offset: int, bytes_max: int, until: int) -> tuple[int, bytes]:
        """Bytes from `offset` on, at most `bytes_max`, none at or behind `until`, never across two segments.

        Returns (start, bytes); start > offset when the bytes in between are gone. (offset, b"") when there is nothing.
        """
        index = segment_at(self._segments, offset)
        if index < 0 or index + 1 >= len(self._segments):
            self._segments = list_segments(self._files, self._folder)
            index = segment_at(self._segments, offset)
        segments = self._segments
        start = offset
        while True:
            behind = segments[index + 1].first_offset if index + 1 < len(segments) else until
            end = min(behind, until)
            if index >= 0 and start < end:
                data = self._try(segments[index], start, min(bytes_max, end - start))
                if data:
                    return start, data
            if index + 1 >= len(segments) or behind >= until:
                return offset, b""
            index += 1
            start = max(start, behind)

    def _try(self, segment: Segment, offset: int, size_bytes: int) -> bytes:
        try:
            return self._files.read(segment.path, offset - segment.first_offset, size_bytes)
        except FileNotFoundError:
            self._segments = []  # removed while we looked; the next call sees the folder as it is
            return b""
        except OSError as error:
            if is_our_own_trouble(error):
                raise
            return b""


def is_our_own_trouble(error: OSError) -> bool:
    """Whether a read failed for want of descriptors or memory in this process: says nothing about the file."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
