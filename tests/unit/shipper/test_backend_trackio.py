"""The trackio backend: a real store, and what trackio's own reader shows of it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.batches import STREAM, TIME_NS, batch, item, metrics, run_info
from support.memory import FakeMemory
from support.mlflow_trackers import own_environment
from support.trackio_reader import TrackioReader
from unit.shipper.trackio_bench import (
    away_from_home,
    backend,
    delivered,
    folder,
    made,
    memory,
    reader,
    span,
    start,
)
from verl_shipper.backends.base import Delivered, Park, Reject, Retry
from verl_shipper.backends.trackio import TrackioBackend
from verl_shipper.backends.trackio_store import project_name, storage_module
from verl_shipper.checks import Level
from verl_shipper.errors import ConfigError
from verl_shipper_spool.record import RecordKind, Unsupported

__all__ = ["away_from_home", "backend", "folder", "memory", "own_environment", "reader"]  # fixtures
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_environment")]

OTHER_STREAM = "7" * 32


# --- what the dashboard shows ---------------------------------------------------------------------------------


def test_a_run_is_shown_with_its_config_its_numbers_and_its_end(backend: TrackioBackend, reader: TrackioReader) -> None:
    run = run_info()
    finish = item(RecordKind.RUN_FINISH, {"exit_code": 0, "reason": "finish"}, ordinal=3, step=None)

    delivered(
        backend, batch(start({"lr": 1e-6, "wandb": {"api_key": "SENTINEL"}, "_x": 1}), metrics(1), metrics(2), finish)
    )

    assert [(found["id"], found["name"]) for found in reader.runs("project")] == [("run1", "experiment")]
    assert reader.numbers(run) == [{"n": 1, "step": 1}, {"n": 2, "step": 2}]
    assert reader.logs(run)[1]["timestamp"] == "2026-09-21T14:13:21.123456+00:00"
    config = reader.config(run)
    assert config.pop("_Created").startswith("2026-09-21T14:13:20")
    assert config == {"lr": 1e-6, "wandb": {"api_key": "[redacted]"}, "config_x": 1}
    (alert,) = reader.alerts(run)
    assert (alert["title"], alert["text"], alert["level"]) == ("run finished", "exit code 0, finish", "info")


@pytest.mark.parametrize("code", [1, None])
def test_a_run_that_failed_ends_with_an_alarm(code: int | None, backend: TrackioBackend, reader: TrackioReader) -> None:
    bodies: list[tuple[int, dict[Any, Any]]] = [(0, {"exit_code": code}), (1, {"exit_code": 0})]
    ends = [item(RecordKind.RUN_FINISH, body, ordinal=rank, step=None, rank=rank) for rank, body in bodies]

    delivered(backend, batch(*ends))

    (alert,) = reader.alerts(run_info())
    assert (alert["title"], alert["level"]) == ("run failed", "error")


def test_a_text_is_a_report(backend: TrackioBackend, reader: TrackioReader) -> None:
    delivered(backend, batch(item(RecordKind.TEXT, {"notes": "# cut \ud83d", "step": "x"}, ordinal=0, step=3)))

    (row,) = reader.logs(run_info())
    assert row["notes"] == {"_type": "trackio.markdown", "_value": "# cut \ufffd"}
    assert (row["__step"]["_value"], row["step"]) == ("x", 3)


def test_names_and_values_survive_or_are_counted(backend: TrackioBackend, reader: TrackioReader) -> None:
    odd = {"nan": math.nan, "up": math.inf, "big": 2**64, "huge": 10**400, "step": 5.0, "__x": 6.0, "t": "text"}

    outcome = delivered(
        backend, batch(metrics(0, odd), metrics(1, {"m": Unsupported("Tensor")}), metrics(2, step=None))
    )

    first, second = reader.numbers(run_info())
    assert math.isnan(first.pop("nan"))
    assert first == {"up": math.inf, "big": 2.0**64, "__step": 5.0, "____x": 6.0, "step": 0}
    assert second == {"n": 2, "step": 0}
    assert outcome.ignored == {"text": 1, "not_a_number": 1, "too_large": 1, "no_step": 1}


# --- once -----------------------------------------------------------------------------------------------------


def test_the_same_batch_again_adds_no_row_no_trace_and_no_alert(
    folder: Path, memory: FakeMemory, reader: TrackioReader
) -> None:
    table = {"columns": ["input", "output"], "rows": [["q", "a"], ["r", "b"]]}
    sent = batch(
        start({"lr": 1}),
        *[metrics(ordinal) for ordinal in range(1, 9)],
        item(RecordKind.GENERATIONS, table, ordinal=9),
        span("x", 10),
        item(RecordKind.TEXT, {"t": "x"}, ordinal=11),
        item(RecordKind.RUN_FINISH, {"exit_code": 0}, ordinal=12),
    )
    delivered(made(folder, memory), sent)
    run = run_info()
    before = (reader.logs(run), reader.traces(run), reader.alerts(run), reader.config(run))
    files = sorted(folder.rglob("*.jsonl"))

    for _ in range(2):  # nothing was committed by the lane
        delivered(made(folder, FakeMemory()), sent)

    assert (reader.logs(run), reader.traces(run), reader.alerts(run), reader.config(run)) == before
    assert [len(part) for part in before[:3]] == [12, 3, 1]
    assert sorted(folder.rglob("*.jsonl")) == files


def test_a_batch_whose_answer_was_lost_halfway_is_completed(
    backend: TrackioBackend, reader: TrackioReader, folder: Path
) -> None:
    """Rows are committed, then the process dies before the alert and before anybody hears of it."""
    sent = batch(metrics(0), metrics(1), item(RecordKind.RUN_FINISH, {"exit_code": 0}, ordinal=2))
    storage = storage_module(str(folder)).SQLiteStorage

    class Killed(BaseException):
        pass

    def killed(**_: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "bulk_alert", killed)
        with pytest.raises(Killed):
            backend.upload(sent)
    assert len(reader.numbers(run_info())) == 2

    delivered(made(folder, FakeMemory()), sent)

    assert len(reader.numbers(run_info())) == 2
    assert len(reader.alerts(run_info())) == 1


def test_commits_last_over_power_loss(backend: TrackioBackend, folder: Path) -> None:
    module = storage_module(str(folder))
    with module.SQLiteStorage._get_connection(folder / "project.db") as connection:
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL: each commit is fsynced


def test_two_runs_of_one_name_stay_two_runs(folder: Path, memory: FakeMemory, reader: TrackioReader) -> None:
    runs = [run_info(run_id="a"), run_info(run_id="b")]
    for number, run in enumerate(runs):
        delivered(made(folder, memory, run), batch(metrics(number, stream_id=f"{number}" * 32), run=run))

    assert [reader.numbers(run) for run in runs] == [[{"n": 0, "step": 0}], [{"n": 1, "step": 1}]]


def test_the_newest_config_of_the_lowest_rank_is_shown(folder: Path, memory: FakeMemory, reader: TrackioReader) -> None:
    def shown(**config: Any) -> Any:
        (found,) = [value for key, value in reader.config(run_info()).items() if key != "_Created"]
        return found

    backend = made(folder, memory)
    delivered(backend, batch(start({"a": 1}, rank=1, time_ns=TIME_NS)), memory)
    assert shown() == 1
    delivered(backend, batch(start({"a": 2}, rank=0, time_ns=TIME_NS, stream_id=OTHER_STREAM)), memory)
    late = [
        start({"a": 3}, ordinal=5, rank=1, time_ns=TIME_NS + 1),
        start({"a": 4}, ordinal=6, rank=0, time_ns=TIME_NS - 1),
    ]
    outcome = delivered(backend, batch(*late), memory)
    assert (shown(), outcome.ignored) == (2, {"other_config": 2})
    delivered(backend, batch(start({"a": 5}, ordinal=7, rank=0, time_ns=TIME_NS + 2)), memory)
    assert shown() == 5


# --- when something is wrong ----------------------------------------------------------------------------------


def test_a_step_that_no_database_has_is_refused_and_the_others_are_there(
    backend: TrackioBackend, reader: TrackioReader
) -> None:
    outcome = backend.upload(batch(metrics(0), metrics(1, step=2**63), metrics(2)))

    assert isinstance(outcome, Reject)
    assert outcome.items == [1]
    assert [row["step"] for row in reader.numbers(run_info())] == [0, 2]


def test_a_project_that_somebody_holds_is_tried_again(
    backend: TrackioBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module(str(folder)).time, "sleep", lambda _: None)  # trackio's own, 10 s in all
    fd = os.open(folder / "project.lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        outcome = backend.upload(batch(metrics(0)))
    finally:
        os.close(fd)

    assert isinstance(outcome, Retry)
    assert "lock" in outcome.reason
    assert isinstance(backend.upload(batch(metrics(0))), Delivered)


def test_a_database_that_is_none_parks_the_run(folder: Path, memory: FakeMemory) -> None:
    folder.mkdir()
    (folder / "project.db").write_bytes(b"no database at all" * 100)

    outcome = TrackioBackend(run_info(), {"dir": str(folder)}, memory).open()

    assert isinstance(outcome, Park)
    assert "is broken" in outcome.reason


def test_a_folder_that_cannot_be_made_is_tried_again(folder: Path, memory: FakeMemory) -> None:
    folder.touch()

    outcome = TrackioBackend(run_info(), {"dir": str(folder)}, memory).open()

    assert isinstance(outcome, Retry)


def test_a_package_that_does_not_load_parks_the_run(
    folder: Path, memory: FakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)

    outcome = TrackioBackend(run_info(), {"dir": str(folder)}, memory).open()

    assert isinstance(outcome, Park)
    assert "cannot be loaded" in outcome.reason


def test_a_missing_or_old_package_is_one_line_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    TrackioBackend.check({})
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.27.1")
    with pytest.raises(ConfigError, match=r"trackio 0\.27\.1 is too old, 0\.28 is needed"):
        TrackioBackend.check({})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="trackio is not installed"):
        TrackioBackend.check({})


def test_an_empty_folder_name_is_refused() -> None:
    with pytest.raises(ConfigError):
        TrackioBackend.check({"dir": " "})


# --- places ---------------------------------------------------------------------------------------------------


def test_the_folder_is_trackios_own_unless_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    default = TrackioBackend.decide({})
    assert default.settings["dir"] == f"{home}/.cache/huggingface/trackio"
    assert default.notes[0].endswith(f"look: TRACKIO_DIR={default.settings['dir']} trackio show")
    monkeypatch.setenv("HF_HOME", "/hf")
    assert TrackioBackend.decide({}).settings["dir"] == "/hf/trackio"
    monkeypatch.setenv("TRACKIO_DIR", "/data/t")
    assert TrackioBackend.decide({}) == TrackioBackend.decide({"dir": "/data/t"})
    assert TrackioBackend.decide({"dir": "~/t"}).settings["dir"] == f"{home}/t"


@pytest.mark.parametrize("name", ["my.model", "registry-x", "a_system", "奖励", "", "../../up", "x" * 400, "\ud83d"])
def test_every_project_has_a_database_in_the_folder(
    name: str, folder: Path, memory: FakeMemory, reader: TrackioReader
) -> None:
    run = run_info(project=name)
    delivered(made(folder, memory, run), batch(metrics(0), run=run))

    assert len(list(folder.glob("*.db"))) == 1
    assert reader.numbers(run) == [{"n": 0, "step": 0}]


def test_names_that_trackio_reserves_stay_apart() -> None:
    def validate(name: str) -> None:
        if name.endswith("_system"):
            raise ValueError

    assert project_name("my.model", validate) == "mymodel"  # as trackio has it
    assert len({project_name(name, validate) for name in ("a_system", "b_system", "a", "b")}) == 4


def test_the_doctor_tells_package_folder_disk_and_what_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")

    found = list(TrackioBackend.diagnose({"dir": str(folder)}))

    assert [finding.level for finding in found] == [Level.OK, Level.OK, Level.OK, Level.WARN]
    words = ["trackio 0.", str(folder), "trackio's store", "TRACKIO_SPACE_ID"]
    assert all(word in finding.what for word, finding in zip(words, found, strict=True))
    assert not folder.exists()


def test_ids_of_rows_are_those_of_records(backend: TrackioBackend, folder: Path) -> None:
    delivered(backend, batch(metrics(7)))

    (row,) = storage_module(str(folder)).SQLiteStorage.get_all_logs_for_sync("project")
    assert (row["log_id"], row["run_id"], row["run"]) == (f"{STREAM}:7", "run1", "experiment")
