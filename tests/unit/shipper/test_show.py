"""What a person sees: a table, one line for everything that wants attention, records as JSON."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.streams import Folder, make_header
from verl_shipper.errors import ShipperError
from verl_shipper.show import RUNS_SHOWN_MAX, daemon_lines, notes, record_lines, status_table, stream_folders
from verl_shipper.status import Account, Report, RunName
from verl_shipper_spool.frame import encode
from verl_shipper_spool.record import Record, RecordKind, Unsupported, encode_record


def _report(account: Account, **daemon: Any) -> Report:
    now = {"state": "running", "pid": 5, "updated_ns": time.time_ns(), "backends": ["file"]}
    return Report(now | daemon, {"run-1": RunName("rlhf", "qwen", 1)}, {"file": {"run-1": account}})


def _text(report: Report, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the console
    console.print(status_table(report))
    console.file.close()
    return console.export_text()


@pytest.mark.parametrize(
    ("account", "daemon", "state"),
    [
        (Account(logged=3, delivered=3), {}, "complete"),
        (Account(logged=3, pending=3), {}, "delivering"),
        (Account(logged=3, pending=3, last_error="503", lag_s=60.0), {}, "retrying"),
        (Account(logged=3, pending=3, parked=1, last_error="401"), {}, "PARKED"),
        (Account(logged=3, pending=3), {"state": "stopped"}, "no daemon"),
        (Account(logged=3, pending=3), {"updated_ns": 5}, "no daemon"),
        (Account(logged=3, pending=3), {"backends": []}, "not configured"),
    ],
)
def test_a_row_says_how_its_run_stands(account: Account, daemon: dict[str, Any], state: str) -> None:
    lines = _text(_report(account, **daemon)).splitlines()

    (row,) = [line for line in lines if line.startswith("file ")]
    assert row.rstrip().endswith(state)


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    report = _report(Account(logged=1, delivered=1))
    report.runs["run-1"] = RunName("[red]p[/red]", "[/]", 1)

    assert "[red]p[/red]/[/]" in _text(report)


def test_thousands_of_runs_are_summed_up() -> None:
    report = _report(Account(logged=1, delivered=1))
    for number in range(500):
        report.runs[f"r{number}"] = RunName("p", "e", number)
        report.backends["file"][f"r{number}"] = Account(logged=1, delivered=1)
    report.backends["file"]["r3"] = Account(logged=1, pending=1)

    text = _text(report)

    assert "all 501 runs" in text
    assert "p/e  r3" in text, "what is pending is shown first"
    assert text.count("p/e  r") == RUNS_SHOWN_MAX


@pytest.mark.parametrize(
    ("account", "daemon", "line"),
    [
        (Account(), {"problems": ["cannot read x"]}, "problem: cannot read x"),
        (Account(), {"unheard_sources": 2}, "2 sources cannot reach the socket; they are read from disk"),
        (Account(), {"torn_records": 1}, "1 torn records at the ends of dead writers' streams"),
        (Account(logged=3, dropped=Counter(quota=3)), {}, "file: 3 records dropped: quota"),
        (Account(logged=1, dead_lettered=1), {}, "file: 1 dead letters; see `verl-shipper dead-letters list`"),
        (Account(ignored=Counter(text=4)), {}, "file: values that it cannot show: 4 text"),
        (Account(last_error="503"), {}, "file: last error: 503"),
        (Account(last_error="401", parked=1), {}, "file: PARKED: 401"),
        (Account(renamed={"a@b": "a_at_b", "": "unnamed"}), {}, 'renamed at file: a@b → a_at_b, "" → unnamed'),
        (Account(renamed={"k" * 300: "k"}), {}, f"renamed at file: {'k' * 40}… → k"),
        (Account(renamed={"a\n": " a"}), {}, 'renamed at file: a\ufffd → " a"'),
    ],
)
def test_everything_that_wants_attention_has_a_line(account: Account, daemon: dict[str, Any], line: str) -> None:
    assert notes(_report(account, **daemon)) == [line]


def test_of_many_changed_names_the_first_are_shown_and_all_are_counted() -> None:
    account = Account(renamed={f"n@{number}": f"n_at_{number}" for number in range(100)})

    (line,) = notes(_report(account))

    assert line.startswith("renamed at file: n@0 → n_at_0, ")
    assert line.endswith("n@4 → n_at_4 … (100 in all)")


def test_an_account_that_does_not_balance_is_loud() -> None:
    assert "DOES NOT BALANCE" in notes(_report(Account(logged=3)))[0]


def test_all_is_well_needs_no_words() -> None:
    assert notes(_report(Account(logged=3, delivered=3))) == []


def test_the_daemon_is_running_or_it_is_not() -> None:
    assert "running, pid 5" in daemon_lines(_report(Account()))[0]
    assert "not running" in daemon_lines(_report(Account(), state="stopped"))[0]
    assert "verl-shipper run" in daemon_lines(Report())[0]


def test_a_folder_is_a_stream_a_spool_or_a_state(tmp_path: Path) -> None:
    spool = tmp_path / "state" / "spool"
    folders = [Folder(spool).path for _ in range(2)]
    (spool / "other").mkdir()

    assert stream_folders(folders[0]) == [folders[0]]
    assert stream_folders(str(spool)) == sorted(folders)
    assert stream_folders(str(tmp_path / "state")) == sorted(folders)
    with pytest.raises(ShipperError, match="absent"):
        stream_folders(str(tmp_path / "absent"))


def test_records_are_strict_json_whatever_is_in_them(tmp_path: Path) -> None:
    body = {"nan": float("nan"), 3: b"\x01", "odd": Unsupported("x.Y"), "half": "\ufffd"}
    folder = Folder(tmp_path, make_header(run_id="run-7"))
    folder.add(encode(encode_record(Record(RecordKind.METRICS, 0, 2**63 - 1, 1, body)), 0) + encode(b"\xc1", 1), 0)

    first, second = [json.loads(line) for line in record_lines(folder.path)]

    assert first["data"] == {"nan": "NaN", "3": "01", "odd": "<x.Y>", "half": "\ufffd"}
    assert first["run_id"] == "run-7"
    assert second["kind"] == "unreadable"


def test_a_stream_without_a_header_is_shown_without_its_run(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add_records(0, 1)
    Path(folder.path, "stream").write_bytes(b"\0")

    (line,) = record_lines(folder.path)

    assert "run_id" not in json.loads(line)


def test_each_watched_folder_has_a_line() -> None:
    report = _report(Account())
    report.watch = [
        {
            "path": "/data/a\nb",
            "kind": "auto",
            "figures": {"files": 3, "records": 40, "waiting": 1, "no_json": 2},
            "refused": {"unreadable: Permission denied": 1},
        }
    ]

    text = " ".join(_text(report, width=200).split())

    assert (
        'watch "/data/a\\nb" (auto): 3 files taken (40 records), 1 waiting, 2 no_json, '
        "1 refused now: unreadable: Permission denied" in text
    )
    assert report.to_json()["watch"] == report.watch
