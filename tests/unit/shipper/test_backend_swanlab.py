"""Backend `swanlab` with the real SDK against our own server: what arrives, and how it looks there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.faults import Fault, Rule
from servers.process import ServerProcess
from support.batches import TIME_NS, batch, item, metrics, run_info
from support.memory import FakeMemory
from support.swanlab_bench import SwanlabBench
from support.swanlab_reader import API_KEY, environment, points, run_state
from verl_shipper.backends.base import Delivered, Item, Park, Reject, Retry
from verl_shipper.backends.swanlab import SwanlabBackend, cuid
from verl_shipper.errors import ConfigError
from verl_shipper_spool.record import RecordKind

TABLE = {"columns": ["input", "output", "score"], "rows": [["q", "ä😀", 1.0], ["q2", None, 0]], "part": 0, "parts": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("swanlab_server", tmp_path_factory.mktemp("swanlab")) as made:
        yield made


@pytest.fixture
def swanlab(server: ServerProcess, tmp_path: Path) -> Iterator[SwanlabBench]:
    server.rules()
    server.options(api_key=None, lag_s=0)
    made = SwanlabBench(server, tmp_path)
    yield made
    made.close()


def start(ordinal: int = 0, **config: Any) -> Item:
    return item(RecordKind.RUN_START, {"config": config}, ordinal=ordinal, step=None)


def finish(ordinal: int, exit_code: int = 0, rank: int = 0) -> Item:
    body = {"exit_code": exit_code, "reason": ""}
    return item(RecordKind.RUN_FINISH, body, ordinal=ordinal, step=None, rank=rank)


def test_a_whole_run_arrives_once_with_its_steps_times_tables_and_end(swanlab: SwanlabBench) -> None:
    backend = swanlab.backend(group="g", job_type="j", tags=["a", "b"], description="d")
    assert backend.open() is None
    assert backend.watermark() == {}
    first = swanlab.deliver(
        backend,
        batch(
            start(lr=0.1, model={"layers": [3]}, wandb_api_key="hush-hush"),
            metrics(1, {"loss": 1.5, "a": {"b": 2}, "kl": math.nan, "inf": math.inf, "word": "x"}, step=10),
            item(RecordKind.GENERATIONS, TABLE, ordinal=2, step=10),
            item(RecordKind.TEXT, {"note": "<hello>", "empty": ""}, ordinal=3, step=11),
            item(RecordKind.SPAN, {}, ordinal=4, step=None),
            metrics(5, {"loss": 0.5}, step=12),
            run=swanlab.run,
        ),
    )
    assert first.ignored == {"text": 1, "span": 1}
    assert swanlab.at_server()["state"] == "RUNNING"

    swanlab.deliver(backend, batch(metrics(6, {"loss": 0.25}, step=13), finish(7), run=swanlab.run))

    run = swanlab.at_server()
    assert (run["state"], run["created"], run["doubles"], run["project"]) == ("FINISHED", 1, 0, "proj")
    assert run["config"]["lr"] == 0.1
    assert run["config"]["model"] == {"layers": [3]}
    assert "hush" not in json.dumps(swanlab.server.state())
    assert run["labels"] == [{"name": "a"}, {"name": "b"}]
    assert (run["cluster"], run["job"], run["description"]) == ("g", "j", "d")
    assert swanlab.points("loss") == [(10, 1.5), (12, 0.5), (13, 0.25)]
    assert swanlab.points("a/b") == [(10, 2)]
    assert swanlab.points("kl") == swanlab.points("inf") == [(10, "nan")]
    assert swanlab.media("note") == [(11, [b"<hello>"])]
    assert swanlab.media("empty") == [(11, [b""])]
    ((step, (content,)),) = swanlab.media("val/generations")
    assert step == 10
    assert json.loads(content)["rowData"] == [
        {"input": "q", "output": "ä😀", "score": 1.0},
        {"input": "q2", "output": "", "score": 0},
    ]
    (_, _, created) = run["scalars"]["loss"][0]
    assert created == "2026-09-21T14:13:21.123456789Z"
    assert TIME_NS // 10**9 + 1 == 1_790_000_001
    assert run["series"]["loss"] == "FLOAT"
    assert run["series"]["val/generations"] == "ECHARTS"


def test_the_same_batch_again_changes_nothing(swanlab: SwanlabBench) -> None:
    first = batch(start(), *(metrics(number, {"loss": number / 2}) for number in range(1, 30)), run=swanlab.run)
    backend = swanlab.backend()
    assert isinstance(backend.upload(first), Delivered)  # and the lane died before it could remember
    assert isinstance(backend.upload(first), Delivered)
    backend.close()
    swanlab.deliver(swanlab.backend(), first)

    assert swanlab.points("loss") == [(number, number / 2) for number in range(1, 30)]
    assert swanlab.at_server()["doubles"] == 0


def test_steps_in_disorder_are_sorted_and_what_is_too_late_is_counted(swanlab: SwanlabBench) -> None:
    backend = swanlab.backend()
    disorder = [metrics(number, {"n": step, "m": 1}, step=step) for number, step in enumerate([5, 3, 9, 3, 1])]
    first = swanlab.deliver(backend, batch(*disorder, run=swanlab.run))
    late = [metrics(number, {"n": step}, step=step) for number, step in enumerate([9, 2, 10], 10)]
    other = metrics(13, {"val/acc": 1}, step=2, stream_id="6" * 32, rank=1)
    second = swanlab.deliver(backend, batch(*late, other, run=swanlab.run))

    assert swanlab.points("n") == [(1, 1), (3, 3), (5, 5), (9, 9), (10, 10)]
    assert swanlab.points("val/acc") == [(2, 1)]
    assert first.ignored == {"same_step": 2}
    assert second.ignored == {"same_step": 1, "late_step": 1}


def test_a_run_resumed_below_its_last_step_goes_on_and_counts_what_it_repeats(swanlab: SwanlabBench) -> None:
    first = swanlab.backend()
    swanlab.deliver(first, batch(start(lr=1), *(metrics(step) for step in range(1, 61)), run=swanlab.run))
    first.close()
    again = "7" * 32
    resumed = [metrics(number, {"n": -1}, step=41 + number, stream_id=again) for number in range(50)]
    second = swanlab.backend()
    swanlab.deliver(second, batch(start(lr=2, long="x" * 7000), run=swanlab.run))
    told = swanlab.deliver(second, batch(*resumed, run=swanlab.run))

    assert [step for step, _ in swanlab.points("n")] == list(range(1, 91))
    assert told.ignored == {"late_step": 19, "same_step": 1}
    assert swanlab.at_server()["config"] == {"lr": 2, "long": "x" * 7000}


def test_hostile_names_values_and_steps_cost_their_own_record_only(swanlab: SwanlabBench) -> None:
    names = ["/lead", "../up", "a//b", "k" * 600, "奖励/均值", "val/😀", "a\nb", "", " lead ", "ok", "__swanlab__.x",
             "cut \ud83d", "lead", "lead/", "with\0nul", "Lead", "val/generations", "=1+1", "a" * 512]  # fmt: skip
    body = {name: float(number) for number, name in enumerate(names)}
    sent = [
        metrics(0, body, step=5),
        metrics(1, {"big": 10**400, "huge": 10**30, "small": -(2**63) - 1}, step=2**31),
        metrics(2, {"x": 1}, step=None),
        item(RecordKind.GENERATIONS, {**TABLE, "columns": ["a", "a"], "rows": [["x\udc00"], [1, 2, 3]]}, ordinal=3),
        item(RecordKind.TEXT, {"ok": "cut \ud83d here", "note": {"a": 1}}, ordinal=4, step=6),
        metrics(5, {"edge": 1}, step=2**48),
    ]
    bad = [metrics(6, {"x": 2}, step=-1), metrics(7, {"x": 3}, step=2**48 + 1), metrics(8, {"x": 3}, step=2**63 - 1)]
    backend = swanlab.backend()
    swanlab.run = run_info("a/b: ü\ud800" * 30, "exp\nname\ud800" * 100, swanlab.run.run_id)
    backend.run = swanlab.run

    refused = backend.upload(batch(*sent, *bad, run=swanlab.run))
    assert isinstance(refused, Reject)
    assert refused.items == [6, 7, 8]
    assert "2^48" in refused.reason
    swanlab.deliver(backend, batch(*sent, run=swanlab.run))

    run = swanlab.at_server()
    values = sorted(rows[0][1] for key, rows in run["scalars"].items() if rows[0][0] == 5)
    assert values == sorted(body.values())
    assert swanlab.points("奖励/均值") == [(5, 4.0)]
    assert swanlab.points("lead")
    assert swanlab.points("huge") == [(2**31, 1e30)]
    assert swanlab.points("big") == [(2**31, "nan")]
    assert swanlab.points("x") == [(2**31, 1)]
    assert swanlab.points("edge") == [(2**48, 1)]
    texts = {key: content for key in run["media"] for _, (content,) in swanlab.media(key)}
    assert "cut \ufffd here".encode() in texts.values()
    assert len(run["media"]) == 3
    assert not run["media"].keys() & run["scalars"].keys()
    assert run["doubles"] == 0
    assert swanlab.memory.get("metric_names")["/lead"] == "lead"


def test_a_poison_point_is_refused_with_the_reason_and_the_others_arrive(swanlab: SwanlabBench) -> None:
    sent = [metrics(number, {"poison" if number in (150, 377) else "n": number}) for number in range(500)]
    backend = swanlab.backend()
    with swanlab.server.failing(Rule(Fault.BAD, path="house/metrics$", contains="poison")):
        before = len(swanlab.server.requests())
        refused = backend.upload(batch(*sent, run=swanlab.run))
        assert isinstance(refused, Reject), refused
        assert refused.items == [150, 377]
        assert "400" in refused.reason
        good = [each for each in sent if each.ordinal not in (150, 377)]
        swanlab.deliver(backend, batch(*good, run=swanlab.run))
        assert len([each for each in swanlab.server.requests()[before:] if each["path"].endswith("metrics")]) < 45

    assert [step for step, _ in swanlab.points("n")] == [each.ordinal for each in good]
    assert swanlab.at_server()["doubles"] == 0


def test_what_other_ranks_bring_after_the_end_leaves_the_run_ended(swanlab: SwanlabBench) -> None:
    backend = swanlab.backend()
    swanlab.deliver(backend, batch(start(), metrics(1), finish(2, exit_code=3), run=swanlab.run))
    assert swanlab.at_server()["state"] == "CRASHED"
    rank_1 = metrics(0, {"late": 1}, step=7, rank=1, stream_id="8" * 32)
    swanlab.deliver(swanlab.backend(), batch(rank_1, run=swanlab.run))

    assert swanlab.points("late") == [(7, 1)]
    assert (swanlab.at_server()["state"], swanlab.at_server()["logs"]) == ("CRASHED", 0)


def test_two_runs_at_once_do_not_mix(server: ServerProcess, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    benches = [SwanlabBench(server, tmp_path / name) for name in "ab"]
    told: list[Delivered] = []

    def run(bench: SwanlabBench, value: int) -> None:
        sent = batch(start(), *(metrics(step, {"v": value}) for step in range(20)), finish(20), run=bench.run)
        told.append(bench.deliver(bench.backend(), sent))

    threads = [threading.Thread(target=run, args=(bench, number)) for number, bench in enumerate(benches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(told) == 2
    for number, bench in enumerate(benches):
        assert bench.points("v") == [(step, number) for step in range(20)]
        bench.close()


def test_two_daemons_with_one_run_take_turns(swanlab: SwanlabBench) -> None:
    one, two = swanlab.backend(), SwanlabBackend(swanlab.run, swanlab.settings(), FakeMemory())
    swanlab.opened.append(two)
    other = "9" * 32
    for turn in range(2):
        steps = range(turn * 10, turn * 10 + 10)
        swanlab.deliver(one, batch(*(metrics(step, {"rank0": step, "both": 0}) for step in steps), run=swanlab.run))
        sent = [metrics(step, {"rank1": step, "both": 1}, stream_id=other, rank=1) for step in steps]
        outcome = two.upload(batch(*sent, run=swanlab.run))
        assert isinstance(outcome, Delivered), outcome
        two.memory.remember(outcome.remember)  # type: ignore[attr-defined]
        assert outcome.ignored == {"late_step": 9, "same_step": 1}

    expected = [(step, step) for step in range(20)]
    assert swanlab.points("rank0") == swanlab.points("rank1") == expected
    assert swanlab.points("both") == [(step, 0) for step in range(20)]
    assert swanlab.at_server()["doubles"] == 0


def test_when_all_notes_are_lost_nothing_is_doubled(swanlab: SwanlabBench) -> None:
    first = swanlab.backend()
    swanlab.deliver(first, batch(*(metrics(step) for step in range(20)), run=swanlab.run))
    first.close()
    swanlab.memory = FakeMemory()
    told = swanlab.deliver(swanlab.backend(), batch(*(metrics(step) for step in range(25)), run=swanlab.run))

    assert told.ignored == {"late_step": 19, "same_step": 1}
    assert swanlab.points("n") == [(step, step) for step in range(25)]


def test_a_run_deleted_at_the_server_parks(swanlab: SwanlabBench) -> None:
    swanlab.memory.put("tops", {"n": 5})
    outcome = swanlab.backend().upload(batch(metrics(6), run=swanlab.run))

    assert isinstance(outcome, Park)
    assert "deleted" in outcome.reason


def test_the_key_is_in_no_command_line_and_no_file_but_its_own(swanlab: SwanlabBench) -> None:
    backend = swanlab.backend()
    swanlab.deliver(backend, batch(metrics(0), run=swanlab.run))
    pid = swanlab.child_pid(backend)

    assert API_KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    written = [path for path in swanlab.folder.rglob("*") if path.is_file() and path != swanlab.key_file]
    assert [path.name for path in written] == ["sdk.log"]
    assert all(API_KEY.encode() not in path.read_bytes() for path in written)


def sync(swanlab: SwanlabBench, folder: Path) -> None:
    """`swanlab sync FOLDER --id CUID`."""
    command = [os.path.join(os.path.dirname(sys.executable), "swanlab"), "sync", str(folder), "--id", swanlab.cuid]
    home = swanlab.folder / "home"
    home.mkdir(exist_ok=True)
    told = subprocess.run(
        command,
        env=environment(swanlab.server, home),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize("mode", ["offline", "local"])
def test_a_run_without_a_network_is_a_folder_that_swanlab_syncs(swanlab: SwanlabBench, mode: str) -> None:
    rows = [metrics(step, {"loss": step / 2}) for step in range(1, 50)]
    first = swanlab.backend(mode=mode, api_key_file=None)
    assert first.open() is None
    sent = batch(start(lr=1), *rows[:30], item(RecordKind.GENERATIONS, TABLE, ordinal=90, step=3), run=swanlab.run)
    assert isinstance(first.upload(sent), Delivered)  # and the lane's commit was lost
    swanlab.deliver(first, sent)
    assert first._folder is not None
    assert first._folder._child is not None
    os.kill(first._folder._child.pid, 9)
    swanlab.deliver(first, batch(*rows[30:40], run=swanlab.run))
    first.close()
    second = swanlab.backend(mode=mode, api_key_file=None)
    swanlab.deliver(second, batch(*rows[40:], finish(60), run=swanlab.run))
    late = metrics(0, {"late": 1}, step=7, rank=1, stream_id="8" * 32)
    swanlab.deliver(second, batch(late, run=swanlab.run))
    second.close()

    folders = sorted((swanlab.folder / "swanlog").glob("run-*"))
    assert [folder.name.rpartition("-")[2] for folder in folders] == [swanlab.cuid, "2"]
    assert not list((swanlab.folder / "swanlog").rglob("*.rows"))
    for folder in folders:
        sync(swanlab, folder)
    run = run_state(swanlab.server, swanlab.cuid)
    assert points(swanlab.server, swanlab.cuid, "loss") == [(step, step / 2) for step in range(1, 50)]
    assert swanlab.points("late") == [(7, 1)]
    assert [step for step, _ in swanlab.media("val/generations")] == [3]
    assert (run["doubles"], run["state"], run["config"]) == (0, "FINISHED", {"lr": 1})
    assert run["scalars"]["loss"][0][2].startswith("2026-09-21T14:13:21.123456789")


@pytest.mark.parametrize(
    ("key", "value"),
    [("mode", "disabled"), ("transport", "rest"), ("settle_s", 0), ("workspace", "a b"), ("base_url", "https://")],
)
def test_settings_that_cannot_work_are_refused_with_a_hint(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SwanlabBackend.check({key: value})
    assert caught.value.where == f"backends.swanlab.{key}"


def test_without_a_key_or_a_server_it_waits(swanlab: SwanlabBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    outcome = swanlab.backend(api_key_file=None).open()
    assert isinstance(outcome, Park)
    assert "SWANLAB_API_KEY" in outcome.reason
    assert isinstance(swanlab.backend(base_url="http://127.0.0.1:1").open(), Retry)


def test_the_run_id_is_21_small_letters_and_digits_and_always_the_same() -> None:
    made = [cuid("a"), cuid("a"), cuid("b"), cuid("\ud800")]
    assert made[0] == made[1] != made[2]
    for each in made:
        assert len(each) == 21
        assert each.isascii()
        assert each.isalnum()
        assert each == each.lower()


def test_doctor_asks_the_server_whether_it_takes_the_key(swanlab: SwanlabBench) -> None:
    good = [finding.what for finding in SwanlabBackend.diagnose(swanlab.settings())]
    assert any("for user tester" in what for what in good)
    swanlab.server.options(api_key="another")
    bad = list(SwanlabBackend.diagnose(swanlab.settings()))
    assert bad[-1].level.value == "fail"
    assert "refused (401)" in bad[-1].what
    assert not any(API_KEY in finding.what + finding.hint for finding in bad)
    assert any("writable" in each.what or "made" in each.what
               for each in SwanlabBackend.diagnose(swanlab.settings(mode="offline")))  # fmt: skip
