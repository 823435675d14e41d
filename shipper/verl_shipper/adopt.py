"""Adopt: take streams from client spool folders through the same ingest as the socket, by the same offsets.

    writer dead             take all, seal, remove the folder (unless `keep`)
    writer alive, unheard   take what is complete; its own sender may come later, the offsets agree
    brought from elsewhere  the same

Only whole, valid frames are taken: bytes behind them may still be cut back by their writer. File events only hasten a
look; polling is the truth. Must not know: ZeroMQ, lanes. On failure: a folder that cannot be read is a problem with a
name, shown by `status`; the others go on.
"""

from __future__ import annotations

import errno
import logging
import os
import pwd
import shutil
import time
from dataclasses import dataclass, field

from verl_shipper.ingest import Ingest, IngestRefusedError
from verl_shipper.liveness import Life, judge, silent_s
from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.files import RealFiles
from verl_shipper_spool.header import ENDED_NAME, Process, StreamHeader, is_stream_id, read_header, this_process
from verl_shipper_spool.loss_journal import read_losses
from verl_shipper_spool.reader import Damage, Frame, StreamReader
from verl_shipper_spool.segment import RawReader, list_segments

log = logging.getLogger(__name__)

UNHEARD_S = 3.0  # a live writer that has more than we do, and sent nothing for so long, is read from disk
LOOK_BYTES_MAX = 4 * 1024 * 1024  # per stream and look, so that one big folder does not hold up the socket
REFUSED_PAUSE_S = 5.0
UNKNOWN_PAUSE_S = 20.0  # a writer on another machine is judged by its silence; minutes of it make no difference
STILL_NS = 2 * 10**9  # a folder's own time tells that nothing was made in it, once it is older than any clock is coarse
HEADER_GRACE_S = 60.0  # a folder without a readable header may be in the making


@dataclass(slots=True)
class Source:
    """A client's stream folder as we know it."""

    folder: str
    header: StreamHeader
    reader: StreamReader
    valid_end: int = 0
    refused_until_s: float = 0.0
    unheard: bool = False  # its live writer does not reach the socket
    stable_looks: int = 0  # looks at a dead writer's stream that found nothing more
    behind: bool = True  # the last look left something to take
    found_at_s: float = 0.0  # a live writer gets UNHEARD_S from here to speak for itself
    unknown_until_s: float = 0.0  # nobody can tell whether its writer lives; not asked again before
    last: tuple[int, int, str] | None = None  # the folder's time, offset and path of its last segment as it was found


@dataclass(slots=True)
class Adopt:
    """Looks after the folders in `roots`. `keep`: never remove anything (offline folders are someone's archive)."""

    ingest: Ingest
    roots: list[str]
    keep: bool = False
    ended: bool = False  # a file in the folder may say that nobody will add to it, though its process lives
    patient: bool = True  # live writers may speak for themselves first; pointless where no socket is
    sources: dict[str, Source] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    torn: int = 0
    looks: int = 0
    _done: set[str] = field(default_factory=set)
    _here: Process = field(default_factory=this_process)  # asked once: it is judged by for every source at every look

    def look(self, now_s: float) -> bool:
        """One look at all folders. True when there is more to take at once."""
        self._discover()
        self.looks += 1
        more = False
        for stream_id in list(self.sources):
            source = self.sources[stream_id]
            if now_s < source.refused_until_s:
                continue
            try:
                more = self._look_at(stream_id, source, now_s) or more
                if stream_id in self.sources:  # else what was told of its end stays
                    self.problems.pop(source.folder, None)
            except FileNotFoundError:
                self.sources.pop(stream_id, None)
            except IngestRefusedError as refusal:
                source.refused_until_s = now_s + REFUSED_PAUSE_S
                self._stuck(source, str(refusal))
            except OSError as error:
                self._stuck(source, f"cannot read: {error.strerror or error}")
            except Exception as error:
                log.exception("%s", source.folder)
                source.refused_until_s = now_s + REFUSED_PAUSE_S
                self._stuck(source, f"{type(error).__name__}: {error}")
        return more

    @property
    def unheard_count(self) -> int:
        """Live writers whose records came by disk because they do not reach the socket."""
        return sum(source.unheard for source in self.sources.values())

    def settled(self) -> bool:
        """Whether the folders hold nothing that the node spool lacks, and no dead writer waits to be sealed."""
        if not self.looks:
            return False
        for stream_id, source in self.sources.items():
            if source.behind or not self.ingest.known(stream_id) or source.valid_end > self.ingest.durable(stream_id):
                return False
            if self._life(source) is Life.GONE:
                return False  # not sealed yet: then it would be no source any more
        return True

    def _stuck(self, source: Source, why: str) -> None:
        source.behind = True
        self._problem(source.folder, why)

    def _discover(self) -> None:
        for key in [key for key in self.problems if not os.path.lexists(key)]:
            del self.problems[key]  # whoever removed it knows
        for root in self.roots:
            try:
                names = os.listdir(root)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._problem(root, f"cannot read spool {root} ({_owner(root)}): {error.strerror or error}")
                continue
            self.problems.pop(root, None)
            for name in names:
                if name not in self.sources and name not in self._done and is_stream_id(name):
                    self._add(os.path.join(root, name), name)

    def _add(self, folder: str, name: str) -> None:
        try:
            header = read_header(folder)
        except (OSError, CorruptionError) as error:
            if silent_s(folder, time.time()) > HEADER_GRACE_S or isinstance(error, PermissionError):
                why = error.strerror if isinstance(error, OSError) else str(error)
                self._problem(folder, f"cannot read spool {folder} ({_owner(folder)}): {why}")
            return
        if header.stream_id != name:
            self._problem(folder, f"folder {folder} holds another stream, {header.stream_id}: was it renamed?")
            return
        self.problems.pop(folder, None)
        self.sources[name] = Source(folder, header, StreamReader(folder), found_at_s=time.monotonic())

    def _look_at(self, stream_id: str, source: Source, now_s: float) -> bool:
        life = self._life(source)
        have = self.ingest.end(stream_id)
        on_disk = _end_on_disk(source)
        if on_disk <= have and life is not Life.GONE:
            source.unheard = source.behind = False
            source.valid_end = min(source.valid_end, have)
            return False
        heard = max(self.ingest.heard_at_s(stream_id), source.found_at_s)
        if self.patient and life is not Life.GONE and now_s - heard < UNHEARD_S:
            source.behind = True
            return False
        if not self.ingest.known(stream_id):
            self.ingest.greet(source.header)
        took = self._take(stream_id, source, have, final=life is Life.GONE)
        source.behind = took > 0
        if took:
            source.unheard = life is Life.ALIVE
            source.stable_looks = 0
            return took >= LOOK_BYTES_MAX
        if life is Life.GONE:
            self._seal(stream_id, source)
        return False

    def _take(self, stream_id: str, source: Source, have: int, *, final: bool) -> int:
        """Ingest complete frames behind `have`; returns the number of bytes taken."""
        raw = RawReader(RealFiles(), source.folder)
        taken = 0
        offset = have - self.ingest.pending(stream_id)
        while taken < LOOK_BYTES_MAX:
            found, end = source.reader.read(offset)
            frames = [finding for finding in found if isinstance(finding, Frame)]
            if not frames:
                if end == offset:
                    break
                offset = end  # a gap or damage: whatever valid follows is taken with the gap told
                continue
            until = frames[-1].end
            while have < until:
                start, content = raw.read(have, LOOK_BYTES_MAX, until)
                if not content or not self.ingest.take(stream_id, start, content, gap=start > have):
                    raise OSError(errno.EAGAIN, "changed while it was read; looking again")
                have = start + len(content)
                taken += len(content)
            offset = max(until, have)
        source.valid_end = max(source.valid_end, have)
        if final and taken == 0 and not source.stable_looks:
            self._tell_torn(source, offset)
        return taken

    def _tell_torn(self, source: Source, end: int) -> None:
        found, _ = source.reader.read(end, final=True)
        for finding in found:
            if isinstance(finding, Damage):
                self.torn += 1
                log.warning(
                    "%s: 1 torn record at offset %d (%d bytes), its writer died in the middle of it",
                    source.folder,
                    finding.start,
                    finding.end - finding.start,
                )

    def _seal(self, stream_id: str, source: Source) -> None:
        """A dead writer's stream is complete: seal our copy, then remove the folder."""
        source.stable_looks += 1
        if self.ingest.unsettled:
            return  # first everything durable, then the end
        self.ingest.seal(stream_id, read_losses(source.folder))
        del self.sources[stream_id]
        unread = unreadable_segments(source.folder)
        if unread:
            self._problem(source.folder, f"{unread[0]} cannot be read; the folder is kept, the rest of it was taken")
        elif not self.keep:
            shutil.rmtree(source.folder, ignore_errors=True)
        if os.path.exists(source.folder):
            self._done.add(stream_id)

    def _life(self, source: Source) -> Life:
        if self.ended and os.path.exists(os.path.join(source.folder, ENDED_NAME)):
            return Life.GONE
        now_s = time.monotonic()
        if now_s < source.unknown_until_s:
            return Life.UNKNOWN
        life = judge(source.header.process, self._here, silent_s(source.folder, time.time()))
        source.unknown_until_s = now_s + UNKNOWN_PAUSE_S if life is Life.UNKNOWN else 0.0
        return life

    def _problem(self, key: str, text: str) -> None:
        if self.problems.get(key) != text:
            log.warning("%s", text if key in text else f"{key}: {text}")
        self.problems[key] = text


def _end_on_disk(source: Source) -> int:
    """Offset behind a stream's last byte. A folder in which nothing was made is not listed again: there may be many."""
    try:
        time_ns = os.stat(source.folder).st_mtime_ns
        if source.last is not None and source.last[0] == time_ns:
            return source.last[1] + os.stat(source.last[2]).st_size
        segments = list_segments(RealFiles(), source.folder)
    except FileNotFoundError:
        segments = []
        time_ns = 0
    is_old = time.time_ns() - time_ns > STILL_NS
    source.last = (time_ns, segments[-1].first_offset, segments[-1].path) if segments and is_old else None
    return source.reader.end_offset()


def unreadable_segments(folder: str) -> list[str]:
    """Segments that cannot be opened: their records may still be saved by hand, so they are not ours to remove."""
    found = []
    for segment in list_segments(RealFiles(), folder):
        try:
            with open(segment.path, "rb"):
                continue
        except OSError:
            found.append(os.path.basename(segment.path))
    return found


def _owner(path: str) -> str:
    try:
        uid = os.stat(path).st_uid
    except OSError:
        return "owner unknown"
    try:
        return f"owner {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"owner {uid}"
