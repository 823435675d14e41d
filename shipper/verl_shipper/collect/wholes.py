"""Files that are shipped as they are: profiler traces, memory snapshots. Parts are records, see file_parts.py.

Trackers show a file when its last part is there, and parts of one file stand in one stream. So only the last part needs
an intent: a file that was interrupted begins again under another id, and what was sent of it before is never completed.

Must not know: when a file is complete. On failure: as work.py says.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator

from verl_shipper.collect.ledger import TAKEN, File, Mark, key_of
from verl_shipper.collect.lines import TOO_LARGE
from verl_shipper.collect.walk import Found
from verl_shipper.collect.work import FILES, RECORDS, NotNowError, RefusedError, Work, blocks, must_be, opened
from verl_shipper.config_watch import WatchEntry
from verl_shipper.policy.file_names import is_plain_json, purpose_of, step_in
from verl_shipper.policy.watching import time_of
from verl_shipper_spool.file_parts import FILE_BYTES_MAX, FileTooLargeError, is_last, parts_of
from verl_shipper_spool.record import RecordKind


def take_whole(work: Work, entry: WatchEntry, file: File, found: Found) -> Iterator[int]:
    """Yields bytes that were dealt with; 0 while there is no room."""
    is_packed = is_plain_json(found.path)
    if found.seen.size > FILE_BYTES_MAX and not is_packed:
        raise RefusedError(TOO_LARGE)
    with opened(found) as fd:
        must_be(fd, found.seen)
        content = hashlib.sha256()
        for block in blocks(fd, 0, found.seen.size):
            content.update(block)
            yield len(block)
        file.run = []  # other content may be another run's
        run = work.run_of(entry, file, found)
        step = step_in(found.inner)
        key = key_of(run.run_id, "file", os.path.basename(found.path), step, content.digest())
        fields = {"state": TAKEN, "seen": found.seen.values()}
        if work.ledger.knows(key):
            work.ledger.put(file, Mark(fields, {"known": 1}))
            return
        time_ns = time_of(found.seen, time.time_ns())
        purpose = entry.purpose or purpose_of(found.path)
        stream_id, count = "", 0
        with os.fdopen(os.dup(fd), "rb") as source:
            try:
                for body in parts_of(source, found.inner, purpose, compress=is_packed):
                    count += 1
                    if is_last(body):
                        must_be(fd, found.seen)
                    else:
                        yield from work.wait_for_room(len(body["data"]))
                    now_id, _ = work.streams.next(run, RecordKind.FILE, time.monotonic())
                    if now_id != (stream_id or now_id):
                        raise NotNowError("its stream ended")
                    stream_id = now_id
                    if is_last(body):
                        mark = Mark(fields, {FILES: 1, RECORDS: count}, key)
                        yield from work.keep(file, run, RecordKind.FILE, time_ns, [(step, body)], [mark])
                        return
                    payload = work.streams.encode(run, RecordKind.FILE, step, time_ns, body)
                    if not work.streams.append(run, RecordKind.FILE, payload):
                        raise NotNowError("the spool took no record")
                    yield len(payload)
            except FileTooLargeError as error:
                raise RefusedError(TOO_LARGE) from error
