"""What a person sees: the accounting table, records as JSON lines, dead letters. Rich is loaded only here.

Must not know: processes. On failure: a closed pipe ends quietly.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

from verl_shipper.errors import ShipperError
from verl_shipper.lane_store import SAMPLED_OUT
from verl_shipper.status import Account, Report
from verl_shipper.values import to_json
from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.frame import Kind
from verl_shipper_spool.header import HEADER_NAME, StreamHeader, read_header
from verl_shipper_spool.reader import Damage, Frame, Gap, StreamReader
from verl_shipper_spool.record import KIND_NAME, Record, RecordKind, decode_loss, decode_record

RUNS_SHOWN_MAX = 20
RETRYING_LAG_S = 5.0
RENAMED_SHOWN_MAX = 5
NAME_CHARS_SHOWN_MAX = 40
FRESH_S = 30.0  # notes older than this are of a daemon that is gone


def status_table(report: Report) -> Any:
    """A rich renderable of the whole account."""
    from rich.console import Group
    from rich.text import Text

    tables = [_run_table(report, run_id) for run_id in _shown_runs(report)]
    if len(report.runs) != len(tables) or len(report.runs) > 1:
        tables.append(_run_table(report, None))
    return Group(*map(Text, daemon_lines(report)), *tables, *map(Text, watch_lines(report)), *map(Text, notes(report)))


def _shown_runs(report: Report) -> list[str]:
    """The youngest runs, those with something pending first; a node may have thousands of finished ones."""

    def pending(run_id: str) -> bool:
        return any(runs[run_id].pending > 0 for runs in report.backends.values() if run_id in runs)

    young = sorted(report.runs, key=lambda run_id: (pending(run_id), report.runs[run_id].created_ns), reverse=True)
    return young[:RUNS_SHOWN_MAX]


def _run_table(report: Report, run_id: str | None) -> Any:
    """One row per backend of a run, or of all runs together."""
    from rich.table import Table
    from rich.text import Text

    run = report.runs[run_id] if run_id else None
    title = f"{run.project}/{run.experiment}  {run_id}" if run else f"all {len(report.runs)} runs"
    table = Table(
        title=Text(title), title_justify="left", title_style="bold", header_style="", box=None, pad_edge=False
    )
    table.add_column("backend")
    for name in ("logged", "delivered", "sampled", "dead", "dropped", "pending", "lag"):
        table.add_column(name, justify="right")
    table.add_column("state", overflow="fold")
    for backend, runs in sorted(report.backends.items()):
        account = runs.get(run_id) if run_id else report.total(backend)
        if account is not None:
            table.add_row(backend, *_numbers(account), Text(_state(report, backend, account)))
    return table


def daemon_lines(report: Report) -> list[str]:
    """How the daemon is, in a line or two."""
    daemon = report.daemon
    if not daemon:
        return ["no daemon has run here yet; start one with `verl-shipper run`"]
    age_s = (time.time_ns() - daemon.get("updated_ns", 0)) / 1e9
    running = is_running(report)
    state = f"running, pid {daemon.get('pid')}" if running else f"not running (last seen {age_s:.0f} s ago)"
    return [
        f"daemon {state}; {daemon.get('open_streams', 0)} open streams, {daemon.get('spool_bytes', 0)} bytes spooled"
    ]


def watch_lines(report: Report) -> list[str]:
    """Each watched folder: what was taken, what waits, what could not be taken and why."""
    lines = []
    for place in report.watch:
        figures = dict(place.get("figures", {}))
        taken, records = figures.pop("files", 0), figures.pop("records", 0)
        waiting = figures.pop("waiting", 0)
        told = [f"{taken} files taken ({records} records)", f"{waiting} waiting"]
        told += [f"{count} {what}" for what, count in sorted(figures.items())]
        told += [f"{count} refused now: {reason}" for reason, count in sorted(place.get("refused", {}).items())]
        lines.append(f"watch {_path(str(place.get('path')))} ({place.get('kind')}): {', '.join(told)}")
    return lines


def _path(path: str) -> str:
    """A path on one line."""
    return path if path.isprintable() else json.dumps(path)


def notes(report: Report) -> list[str]:
    """Everything that wants attention, a line each."""
    daemon = report.daemon
    lines = [f"problem: {text}" for text in daemon.get("problems", [])]
    if daemon.get("unheard_sources"):
        lines.append(f"{daemon['unheard_sources']} sources cannot reach the socket; they are read from disk")
    if daemon.get("torn_records"):
        lines.append(f"{daemon['torn_records']} torn records at the ends of dead writers' streams")
    for name in sorted(report.backends):
        lines += _account_notes(name, report.total(name))
    return lines


def _account_notes(name: str, total: Account) -> list[str]:
    lines = []
    if total.sampled:
        what = ", ".join(f"{count} by {reason}" for reason, count in sorted(total.sampled.items()))
        lines.append(f"{name}: records left out as configured: {what}")
    for reason, count in sorted(total.dropped.items()):
        lines.append(f"{name}: {count} records dropped: {reason}")
    if total.dead_lettered:
        lines.append(f"{name}: {total.dead_lettered} dead letters; see `verl-shipper dead-letters list`")
    unshown = {reason: count for reason, count in sorted(total.ignored.items()) if reason != SAMPLED_OUT}
    if SAMPLED_OUT in total.ignored:
        lines.append(f"{name}: {total.ignored[SAMPLED_OUT]} values left out of delivered records as configured")
    if unshown:
        what = ", ".join(f"{count} {reason}" for reason, count in unshown.items())
        lines.append(f"{name}: values that it cannot show: {what}")
    if total.renamed:
        lines.append(f"renamed at {name}: {_renamed(total.renamed)}")
    if total.last_error:
        lines.append(f"{name}: {'PARKED' if total.parked else 'last error'}: {total.last_error}")
    if not total.balanced:
        lines.append(f"{name}: THE ACCOUNT DOES NOT BALANCE; please report this with `verl-shipper status --json`")
    return lines


def _renamed(names: dict[str, str]) -> str:
    """The first changed names of many."""
    some = list(names.items())[:RENAMED_SHOWN_MAX]
    shown = ", ".join(f"{_name(original)} → {_name(name)}" for original, name in some)
    return shown if len(names) == len(some) else f"{shown} … ({len(names)} in all)"


def _name(name: str) -> str:
    """A name on one line, visible even when it is empty or a control character."""
    plain = "".join(sign if sign.isprintable() else "\ufffd" for sign in name[:NAME_CHARS_SHOWN_MAX])
    if len(name) > NAME_CHARS_SHOWN_MAX:
        return f"{plain}…"
    return plain if plain.strip() == plain and plain else f'"{plain}"'


def is_running(report: Report) -> bool:
    """Whether a daemon has written about itself lately."""
    age_s = (time.time_ns() - report.daemon.get("updated_ns", 0)) / 1e9
    return report.daemon.get("state") == "running" and age_s < FRESH_S


def _state(report: Report, backend: str, account: Account) -> str:
    """One or two words; reasons stand below the table."""
    if not account.pending:
        return "complete"
    if backend not in report.daemon.get("backends", []):
        return "not configured"
    if not is_running(report):
        return "no daemon"
    if account.parked:
        return "PARKED"
    return "retrying" if account.last_error and account.lag_s > RETRYING_LAG_S else "delivering"


def _numbers(account: Account) -> list[str]:
    lag = f"{account.lag_s:.0f} s" if account.pending else "-"
    numbers = (account.logged, account.delivered, account.sampled_out, account.dead_lettered)
    return [*map(str, numbers), str(sum(account.dropped.values())), str(account.pending), lag]


def stream_folders(path: str) -> list[str]:
    """Stream folders at or below `path`: a stream, a spool, or a daemon's state folder."""
    if os.path.exists(os.path.join(path, HEADER_NAME)):
        return [path]
    if not os.path.isdir(path):
        raise ShipperError(f"no such spool or stream: {path}", hint="give a folder, see `verl-shipper cat --help`")
    inner = os.path.join(path, "spool")
    base = inner if os.path.isdir(inner) else path
    found = [os.path.join(base, name) for name in sorted(os.listdir(base))]
    return [folder for folder in found if os.path.exists(os.path.join(folder, HEADER_NAME))]


def record_lines(folder: str) -> Iterator[str]:
    """Everything in a stream as JSON lines: records, losses, damage and gaps."""
    header = _header(folder)
    identity = {"run_id": header.run_id, "rank": header.rank} if header else {}
    stream = {"stream": os.path.basename(folder)}
    for finding in StreamReader(folder).frames(final=True):
        yield json.dumps(to_json(_line(finding, identity) | stream), ensure_ascii=False, allow_nan=False)


def _line(finding: Frame | Damage | Gap, identity: dict[str, Any]) -> dict[str, Any]:
    if isinstance(finding, Damage):
        return {"kind": "damage", "start": finding.start, "end": finding.end}
    if isinstance(finding, Gap):
        return {"kind": "gap", "start": finding.start, "end": finding.end}
    try:
        if finding.kind is Kind.LOSS:
            loss = decode_loss(finding.payload)
            return {"kind": "loss", "class": loss.record_class, "records": loss.count, "reason": loss.reason}
        record = decode_record(finding.payload)
    except CorruptionError as error:
        return {"kind": "unreadable", "ordinal": finding.ordinal, "why": error.what}
    values = {"seq": record.seq, "step": record.step, "time_ns": record.time_ns, "data": _shown(record)}
    return {"kind": KIND_NAME[record.kind]} | identity | values


def _shown(record: Record) -> dict[Any, Any]:
    """A record's body; of a part of a file its size is enough."""
    if record.kind is not RecordKind.FILE:
        return record.body
    return {**record.body, "data": f"{len(record.body.get('data') or b'')} bytes"}


def _header(folder: str) -> StreamHeader | None:
    try:
        return read_header(folder)
    except (OSError, CorruptionError):
        return None
