"""Backend `console`: what verl's own console logger would print, one line a step.

    step:12 - actor/loss:0.25 - val/acc:0.5

Run start and finish, generations, texts and whole files get a short line, spans none. Each batch is one write. A
terminal cannot say what it has shown, so a batch that was printed right before a crash may appear twice.

Settings: `stream`, stdout (default) or stderr. Must not know: who reads it. On failure: a closed stream parks the lane.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

from verl_shipper.backends.base import Backend, Batch, Delivered, Item, Outcome, Park, Retry
from verl_shipper.errors import ConfigError
from verl_shipper.schema import Key, Kind
from verl_shipper.values import flatten_metrics, key_text, visible
from verl_shipper_spool.file_parts import is_last
from verl_shipper_spool.record import Record, RecordKind

STREAMS = ("stdout", "stderr")


class ConsoleBackend(Backend):
    """Prints the records of one run."""

    name: ClassVar[str] = "console"
    settings_known: ClassVar[tuple[str | Key, ...] | None] = (
        Key(
            "stream",
            Kind.CHOICE,
            "where the lines go",
            "standard output may be another program's input",
            "stderr",
            default="stdout",
            choices=STREAMS,
        ),
    )

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        if settings.get("stream", "stdout") not in STREAMS:
            raise ConfigError(
                f"the console backend cannot write to {settings['stream']!r}",
                where="backends.console.stream",
                hint="use stdout or stderr",
            )

    def open(self) -> Outcome | None:
        return None if self._descriptor() is not None else self._closed()

    def upload(self, batch: Batch) -> Outcome:
        fd = self._descriptor()
        if fd is None:
            return self._closed()
        ignored: Counter[str] = Counter()
        text = "".join(f"{line}\n" for item in batch.items for line in lines_of(item, batch.run.experiment, ignored))
        content = memoryview(text.encode())
        try:
            while content:
                content = content[os.write(fd, content) :]
        except BlockingIOError:
            return Retry(f"{self._stream()} takes nothing at the moment")
        except OSError:
            return self._closed()
        return Delivered(ignored=ignored)

    def watermark(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        """The stream is the process's, not ours."""

    def _stream(self) -> str:
        return str(self.settings.get("stream", "stdout"))

    def _descriptor(self) -> int | None:
        # Python sets the object to None when the process was started without the descriptor, whose number then belongs
        # to the first file that was opened.
        stream = sys.__stdout__ if self._stream() == "stdout" else sys.__stderr__
        return None if stream is None or stream.closed else stream.fileno()

    def _closed(self) -> Park:
        return Park(f"{self._stream()} is closed")


def lines_of(item: Item, experiment: str, ignored: Counter[str]) -> list[str]:
    """The printed lines of one record, none for kinds that a console does not show."""
    record = item.record
    who = f"[rank {item.rank}] " if item.rank else ""
    match record.kind:
        case RecordKind.METRICS:
            flat = flatten_metrics(record.body)
            ignored.update(flat.ignored)
            pairs = (f"{name}:{number!r}" for name, number in flat.numbers.items())
            return [who + printable(" - ".join((f"step:{record.step}", *pairs)))]
        case RecordKind.RUN_START | RecordKind.RUN_FINISH if record.body.get("forked"):
            return []  # a helper of the run
        case RecordKind.RUN_START:
            return [who + printable(f"run {experiment} started")]
        case RecordKind.RUN_FINISH:
            code = record.body.get("exit_code")
            return [who + printable(f"run {experiment} finished, exit code {'unknown' if code is None else code}")]
        case RecordKind.GENERATIONS:
            return [who + f"step:{record.step} - {printable(table_name(record))}:{row_count(record)}"]
        case RecordKind.TEXT:
            return [who + printable(f"step:{record.step} - text:{key}") for key in record.body]
        case RecordKind.FILE if is_last(record.body):
            told = f"{key_text(record.body.get('name') or 'file')}:{record.body.get('size')} bytes"
            return [who + printable(f"step:{record.step} - file:{told}")]
        case _:
            return []


def table_name(record: Record) -> str:
    return key_text(record.body.get("name") or "generations")


def row_count(record: Record) -> int:
    rows = record.body.get("rows")
    return len(rows) if isinstance(rows, list) else 0


def printable(text: str) -> str:
    """One line whatever a name holds: no newline, no terminal escape."""
    return "".join(sign if sign.isprintable() else "?" for sign in visible(text))
