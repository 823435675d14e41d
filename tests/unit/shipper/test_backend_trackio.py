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
from verl_shipper.backends.base import Batch, Delivered, Park, Reject, Retry, RunInfo
from verl_shipper.backends.trackio import TrackioBackend
from verl_shipper.checks import Level
from verl_shipper.errors import ConfigError
from verl_shipper_spool.record import RecordKind, Unsupported

pytest.importorskip("trackio")

from support.trackio_reader import TrackioReader
from verl_shipper.backends.trackio_store import project_name, storage_module

__all__ = ["own_environment"]  # a fixture
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_environment")]

OTHER_STREAM = "7" * 32


@pytest.fixture(autouse=True)
def away_from_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TRACKIO_DIR", "HF_HOME", "XDG_CACHE_HOME", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


@pytest.fixture
def backend(folder: Path, memory: FakeMemory) -> TrackioBackend:
    return made(folder, memory)


@pytest.fixture
def reader(folder: Path) -> TrackioReader:
    return TrackioReader(folder)


def made(folder: Path, memory: FakeMemory, run: RunInfo | None = None, **settings: Any) -> TrackioBackend:
    backend = TrackioBackend(run or run_info(), {"dir": str(folder), **settings}, memory)
    assert backend.open() is None
    return backend


def delivered(backend: TrackioBackend, sent: Batch, memory: FakeMemory | None = None) -> Delivered:
    outcome = backend.upload(sent)
    assert isinstance(outcome, Delivered), outcome
    if memory is not None:
        memory.remember(outcome.remember)
    return outcome


def start(config: dict[Any, Any], ordinal: int = 0, **place: Any) -> Any:
    return item(RecordKind.RUN_START, {"config": config}, ordinal=ordinal, step=None, **place)


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


def test_generations_are_traces_as_verl_makes_them(backend: TrackioBackend, reader: TrackioReader) -> None:
    rows = [["1+1=", "2", 1.0], ["2+2=", "5", math.nan]]
    table = {"columns": ["input", "output", "score"], "rows": rows, "part": 0, "parts": 1, "call": 0}

    delivered(backend, batch(item(RecordKind.GENERATIONS, table, ordinal=0, step=40)))

    first, second = reader.traces(run_info())
    assert (first["key"], first["index"], first["step"]) == ("val/generations", 0, 40)
    assert first["messages"] == [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert first["metadata"] == {"source": "validation_generations", "sample_index": 0, "score": 1.0}
    assert second["metadata"]["sample_index"] == 1
    assert [found["id"] for found in reader.traces(run_info(), search="2+2")] == [second["id"]]


def test_a_table_of_other_columns_keeps_all_of_them(backend: TrackioBackend, reader: TrackioReader) -> None:
    table = {"columns": ["uid", "response", "prompt"], "rows": [["u1", "a", {"q": 1}, 7], ["u2"]], "part": 2, "call": 1}

    delivered(backend, batch(item(RecordKind.GENERATIONS, table, ordinal=0, step=1, rank=3)))

    first, second = reader.traces(run_info())
    assert [message["content"] for message in first["messages"]] == ['{"q": 1}', "a"]
    place = {"rank": 3, "call": 1, "part": 2, "source": "validation_generations"}
    assert first["metadata"] == {"uid": "u1", "column_4": 7, "sample_index": 0, **place}
    assert second["messages"] == [{"role": "user", "content": "u2"}]


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


# --- spans ----------------------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1=?"}]
IDS = {"trace_id": b"\x01" * 16, "span_id": b"\x02" * 8, "parent_id": b"\x03" * 8}


def span(name: str, ordinal: int = 0, **body: Any) -> Any:
    times = {"start_ns": TIME_NS, "end_ns": TIME_NS + 1_500_000}
    step = body.pop("step", 5)
    return item(RecordKind.SPAN, {"name": name, "status": "ok", **IDS, **times, **body}, ordinal=ordinal, step=step)


def only(reader: TrackioReader) -> dict[str, Any]:
    (found,) = reader.traces(run_info())
    return found


def test_a_span_is_a_trace_with_its_chat_its_answer_and_all_that_is_known(
    backend: TrackioBackend, reader: TrackioReader
) -> None:
    attributes = {"uid": "u1", "reward": 1.0, "reward_extra_info": {"acc": 1}, "validate": False, "status": "mine"}
    outputs = {"response_text": "2", "reward": 1.0}

    delivered(backend, batch(span("agent_loop", inputs={"messages": CHAT}, outputs=outputs, attributes=attributes)))

    found = only(reader)
    assert (found["key"], found["step"]) == ("rollout_trace/agent_loop", 5)
    assert found["messages"] == [*CHAT, {"role": "assistant", "content": "2"}]
    assert found["metadata"] == {
        "step": 5, "experiment_name": "experiment", "op": "agent_loop",
        "uid": "u1", "reward": 1.0, "reward_extra_info": {"acc": 1}, "validate": False, "user.status": "mine",
        "trace_id": "01" * 16, "span_id": "02" * 8, "parent_id": "03" * 8,
        "start_ns": TIME_NS, "end_ns": TIME_NS + 1_500_000, "duration_ms": 1.5, "status": "success",
        "output": {"reward": 1.0},
    }


@pytest.mark.parametrize(
    ("inputs", "outputs", "contents"),
    [
        ({"kwargs": {"raw_prompt": CHAT, "index": 3}}, {"text": "2"}, ["be brief", "1+1=?", "2"]),
        ({"prompt_ids": [1]}, {"prompt_text": "1+1=?", "answer": "2"}, ["1+1=?", "2"]),
        ({"a": 1}, {"b": [2]}, ["verl rollout trace operation: Tool.run", '{"a": 1}', '{"b": [2]}']),
        ({"a": 1}, "done", ["verl rollout trace operation: Tool.run", '{"a": 1}', "done"]),
        ({"messages": ["no", {"no": "role"}]}, None, None),
        (None, None, ["verl rollout trace operation: Tool.run", "{}"]),
    ],
)
def test_question_and_answer_are_found_where_verl_puts_them(
    inputs: Any, outputs: Any, contents: list[str] | None, backend: TrackioBackend, reader: TrackioReader
) -> None:
    delivered(backend, batch(span("Tool.run", inputs=inputs, outputs=outputs)))

    told = [message["content"] for message in only(reader)["messages"]]
    assert told == (contents or [told[0], '{"messages": ["no", {"no": "role"}]}'])


def test_long_lists_of_numbers_are_told_by_their_length_unless_they_are_wanted(
    folder: Path, memory: FakeMemory, reader: TrackioReader
) -> None:
    outputs = {"response_text": "2", "response_ids": list(range(65)), "mask": [1] * 64, "words": ["a"] * 65}

    outcome = delivered(made(folder, memory), batch(span("a", outputs=outputs)))
    whole = delivered(made(folder, memory, numbers_max=65), batch(span("b", 1, outputs=outputs)))

    first, second = (found["metadata"]["output"] for found in reader.traces(run_info()))
    assert first == {"response_ids": "<65 numbers>", "mask": [1] * 64, "words": ["a"] * 65}
    assert second["response_ids"] == list(range(65))
    assert (outcome.ignored, whole.ignored) == ({"long_list": 1}, {})


def test_a_hostile_span_is_shown_and_spoils_nothing_beside_it(backend: TrackioBackend, reader: TrackioReader) -> None:
    bad = {"trace_id": None, "span_id": 7, "start_ns": "then", "end_ns": 2**70, "status": Unsupported("object")}
    odd = {"inputs": {3: 10**5000}, "outputs": b"\xff", "attributes": [1], **bad}
    far = item(RecordKind.SPAN, {"name": "t", "start_ns": 0, "end_ns": 2**70}, ordinal=2, step=None, time_ns=-(2**70))

    outcome = delivered(backend, batch(span("cut \ud83d/é x", 0, **odd), metrics(1), far))

    assert {found["key"] for found in reader.traces(run_info())} == {"rollout_trace/cut___é_x", "rollout_trace/t"}
    assert reader.numbers(run_info()) == [{"n": 1, "step": 1}]
    assert outcome.ignored == {"no_step": 1}


def test_a_span_without_a_step_stands_at_the_one_of_its_attributes(
    backend: TrackioBackend, reader: TrackioReader
) -> None:
    outcome = delivered(backend, batch(span("x", step=None, attributes={"step": 9})))

    assert only(reader)["step"] == 9
    assert not outcome.ignored


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
