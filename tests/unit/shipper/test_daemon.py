"""The daemon's loop: every chore has its turn, and one that fails is told and costs nothing else."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.streams import frame, make_header
from verl_shipper import daemon as daemon_module
from verl_shipper.config import Config, Request
from verl_shipper.daemon import FLUSH_IDLE_S, Daemon, Places, places_of
from verl_shipper.errors import ConfigError, HeldError
from verl_shipper.lane_process import store_path
from verl_shipper.lane_store import Cursor, LaneStore, Taken
from verl_shipper.lock import Lock
from verl_shipper.reload import Reload
from verl_shipper.status import report
from verl_shipper.supervisor import Child, Orders
from verl_shipper_spool.location import SOCKET_VARIABLE, socket_address


class Bench:
    """A daemon without lanes."""

    def __init__(self, root: Path, backends: tuple[str, ...] = ()) -> None:
        self.spool = root / "spool"
        self.state = str(root / "state")
        config = Config({name: {"dir": str(root / "out")} for name in backends})
        address = socket_address(str(self.spool))
        self.daemon = Daemon(config, Places(self.state, str(self.spool), (str(self.spool),), (address,)))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.daemon.turn()

    def everything_is_due(self) -> None:
        self.daemon._adopt_s = self.daemon._reclaim_s = self.daemon._status_s = self.daemon._mend_s = 0.0

    def notes(self) -> dict[str, Any]:
        return report(self.state).daemon


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    monkeypatch.setattr("verl_shipper.supervisor.Supervisor._start", lambda *_: None)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    made.daemon.open()
    yield made
    made.daemon.close()


def _fail(*_: Any, **__: Any) -> Any:
    raise sqlite3.OperationalError("database or disk is full")


CHORES: dict[str, str] = {
    "listen": "verl_shipper.daemon.Listener.poll",
    "settle": "verl_shipper.daemon.Ingest.settle",
    "adopt": "verl_shipper.daemon.Daemon._adopt",
    "lanes": "verl_shipper.daemon.Supervisor.watch",
    "reclaim": "verl_shipper.daemon.Ingest.reclaim",
    "mend": "verl_shipper.daemon.Listener.mend",
    "status": "verl_shipper.daemon.Ingest.write_notes",
}


@pytest.mark.parametrize("chore", CHORES)
def test_a_chore_that_fails_costs_its_turn_and_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, chore: str, caplog: pytest.LogCaptureFixture
) -> None:
    header = make_header()
    bench.daemon.ingest.greet(header)
    bench.daemon.ingest.take(header.stream_id, 0, frame(0))
    monkeypatch.setattr(Daemon, "_reclaim", lambda self: self.ingest.reclaim({header.stream_id: 0}))
    monkeypatch.setattr(CHORES[chore], _fail)
    for _ in range(3):
        bench.everything_is_due()
        bench.turn()

    assert list(bench.daemon._troubles) == [chore]
    assert len([record for record in caplog.records if "failed; going on" in record.message]) == 1
    monkeypatch.undo()
    bench.everything_is_due()
    bench.daemon.ingest.take(header.stream_id, len(frame(0)), frame(1))
    bench.turn(3)
    assert bench.daemon._troubles == {}


def test_a_trouble_stands_in_the_status(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHORES["mend"], _fail)
    bench.everything_is_due()
    bench.turn()

    assert bench.notes()["problems"] == ["mend: OperationalError: database or disk is full"]


def test_a_socket_that_fails_at_once_does_not_make_the_loop_spin(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHORES["listen"], _fail)
    began_s = time.monotonic()
    bench.turn(3)

    assert time.monotonic() - began_s >= 3 * daemon_module.TURN_S


def test_a_table_that_takes_nothing_does_not_end_the_daemon(bench: Bench) -> None:
    bench.daemon.ingest.store.execute("PRAGMA query_only = 1")
    header = make_header()
    bench.daemon.ingest.greet(header)
    bench.daemon.ingest.take(header.stream_id, 0, frame(0))
    for _ in range(3):
        bench.everything_is_due()
        bench.turn()
    assert bench.daemon.ingest.durable(header.stream_id) == len(frame(0))

    bench.daemon.ingest.store.execute("PRAGMA query_only = 0")
    bench.everything_is_due()
    bench.turn(2)

    assert bench.notes()["problems"] == []


def test_a_busy_socket_does_not_starve_the_other_chores(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[float] = []
    monkeypatch.setattr("verl_shipper.daemon.Listener.poll", lambda *_: True)
    monkeypatch.setattr("verl_shipper.daemon.Supervisor.watch", lambda _self, now_s: watched.append(now_s))
    end_s = time.monotonic() + 3 * daemon_module.FAIR_S
    while time.monotonic() < end_s:
        bench.turn()

    assert 2 <= len(watched) <= 5


def test_an_idle_daemon_leaves_the_disk_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[dict[str, str]] = []
    bench.everything_is_due()
    bench.turn(2)
    monkeypatch.setattr("verl_shipper.daemon.Ingest.write_notes", lambda _self, notes: written.append(notes))
    for _ in range(5):
        bench.everything_is_due()
        bench.turn()
    assert written == []

    monkeypatch.setattr(daemon_module, "QUIET_STATUS_S", 0.0)
    bench.everything_is_due()
    bench.turn()
    assert [list(notes) for notes in written] == [["updated_ns"]]
    bench.daemon.adopt.torn += 1
    monkeypatch.undo()
    bench.everything_is_due()
    bench.turn()
    assert bench.notes()["torn_records"] == 1


def test_it_ends_when_it_is_told_to(bench: Bench) -> None:
    turns = 0

    def until() -> bool:
        nonlocal turns
        turns += 1
        if turns == 3:
            bench.daemon.stop()
        return False

    bench.daemon.run(until)

    assert turns == 3


def test_it_closes_whatever_fails_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.daemon.open()
    for path in ("Supervisor.stop", "Ingest.settle", "Watch.stop", "Ingest.write_notes", "Listener.close"):
        monkeypatch.setattr(f"verl_shipper.daemon.{path}", _fail)
    bench.daemon.close()
    monkeypatch.undo()
    bench.daemon.listener.close()

    again = Bench(tmp_path)
    again.daemon.open()
    again.daemon.close()


# Starting


def test_a_second_daemon_is_refused_and_leaves_the_first_alone(bench: Bench, tmp_path: Path) -> None:
    second = Bench(tmp_path)
    with pytest.raises(HeldError, match="state folder"):
        second.daemon.open()
    third = Bench(tmp_path)
    third.daemon = Daemon(Config({}), Places(str(tmp_path / "other"), str(third.spool), (str(third.spool),), ()))
    with pytest.raises(HeldError, match="spool"):
        third.daemon.open()

    bench.everything_is_due()
    bench.turn()
    assert bench.daemon._troubles == {}


def test_a_daemon_that_could_not_start_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    places = Places(str(tmp_path / "state"), str(tmp_path), (str(tmp_path / "file" / "x"),), ())
    with pytest.raises(ConfigError, match="--adopt"):
        Daemon(Config({}), places).open()

    bench = Bench(tmp_path)
    bench.daemon.open()
    bench.daemon.close()


def _file_in_place(state: Path) -> None:
    state.write_text("in the way")


def _unusable_table(state: Path) -> None:
    state.mkdir()
    (state / "daemon.sqlite3-wal").mkdir()
    (state / "daemon.sqlite3-journal").mkdir()


@pytest.mark.parametrize("harm", [_file_in_place, _unusable_table])
def test_a_state_folder_that_cannot_be_used_is_one_line_with_a_hint(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    harm(tmp_path / "state")

    with pytest.raises(ConfigError) as raised:
        Bench(tmp_path).daemon.open()

    assert "state" in raised.value.line()
    assert raised.value.hint
    assert "\n" not in raised.value.line()


def test_a_spool_on_a_read_only_disk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Lock.take

    def read_only(path: str, what: str) -> Any:
        if str(tmp_path / "spool") in path and "run" not in path:
            raise OSError(30, "Read-only file system")
        return take(path, what)

    monkeypatch.setattr("verl_shipper.daemon.Lock.take", read_only)
    bench = Bench(tmp_path)
    bench.daemon.open()

    bench.turn()
    bench.daemon.close()


def test_places_come_from_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SHIPPER_SPOOL_DIR", str(tmp_path / "env"))
    monkeypatch.delenv("VERL_SHIPPER_STATE_DIR", raising=False)
    assert places_of(Config({})).adopt == (str(tmp_path / "env"),)

    given = places_of(Config({}, adopt=(str(tmp_path / "a"), str(tmp_path / "b")), state_dir=str(tmp_path / "s")))
    assert given.adopt == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert given.state_dir == str(tmp_path / "s")
    assert len(given.listen) == len(set(given.listen)) == 2

    with pytest.raises(ConfigError, match="neither"):
        places_of(Config({}, socket="htp://x"))


# Another configuration


class Following:
    """A daemon whose configuration is handed to it."""

    def __init__(self, root: Path) -> None:
        (root / "config.yaml").write_text("backends: {console: {}}\n")
        request = Request(str(root / "config.yaml"), state_dir=str(root / "state"))
        config = request.load()
        self.reload = Reload(request, config)
        self.daemon = Daemon(config, Places(str(root / "state"), str(root), (str(root / "spool"),), ()), self.reload)

    def give(self, **changes: Any) -> None:
        self.reload._new.append(replace(self.reload.config, **changes))
        self.daemon.turn()

    def problems(self) -> list[str]:
        self.daemon._status_s = 0.0
        self.daemon.turn()
        found: list[str] = report(self.daemon.places.state_dir).daemon["problems"]
        return found


@pytest.fixture
def following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Following]:
    monkeypatch.setattr("verl_shipper.reload.Reload.start", lambda _: None)
    made = Following(tmp_path)
    made.daemon.open()
    level = logging.getLogger().level
    yield made
    logging.getLogger().setLevel(level)
    made.daemon.close()


def test_quota_and_level_of_the_log_change_at_once(following: Following) -> None:
    following.give(node_quota_bytes=77, log_level="ERROR")

    assert following.daemon.ingest.quota_bytes == 77
    assert logging.getLogger().level == logging.ERROR
    assert following.daemon.supervisor.log_level == "ERROR"
    assert following.problems() == []


def test_places_stay_and_what_they_wait_for_is_told(following: Following, caplog: pytest.LogCaptureFixture) -> None:
    before = following.daemon.config
    for _ in range(2):
        following.give(spool_dir="/elsewhere", adopt=("/x",), node_quota_bytes=77)

    assert (following.daemon.config.spool_dir, following.daemon.config.adopt) == (before.spool_dir, before.adopt)
    assert following.daemon.config.node_quota_bytes == 77
    (problem,) = following.problems()
    assert "spool_dir, adopt changed" in problem
    assert "restart" in problem
    assert sum("restart" in record.message for record in caplog.records) == 1
    following.give()
    assert following.problems() == []


def test_every_lane_is_told_all_that_concerns_it(following: Following) -> None:
    following.give(
        backends={"console": {"stream": "stderr"}, "wandb": {}},
        sampling={"console": {"log_frequency": 10}},
        run_may_choose=("traces",),
        project="p",
        experiment="e",
    )

    children = following.daemon.supervisor.children
    assert list(children) == ["console", "wandb"]
    console, wandb = children["console"].orders, children["wandb"].orders
    assert isinstance(console, Orders)
    assert isinstance(wandb, Orders)
    assert console.settings == {"stream": "stderr"}
    assert wandb.settings["lock_dir"].endswith("state/locks")
    more = dict(console.more)
    assert more.pop("release_idle_s") == FLUSH_IDLE_S, "nobody writes to what has no socket"
    assert more == {
        "sampling": {"log_frequency": 10},
        "run_may_choose": ["traces"],
        "backends": ["console", "wandb"],
        "project": "p",
        "experiment": "e",
    }
    assert json.loads(json.dumps(more)) == more


def test_a_configuration_that_cannot_be_used_stands_in_the_status(following: Following) -> None:
    following.reload.problem = "configuration: no"
    assert following.problems() == ["configuration: no"]


def test_a_lane_that_is_ending_still_holds_its_segments(tmp_path: Path, following: Following) -> None:
    ingest, header = following.daemon.ingest, make_header()
    ingest.greet(header)
    ingest.take(header.stream_id, 0, frame(0))
    ingest.settle()
    ingest.seal(header.stream_id, [])
    end = ingest.end(header.stream_id)
    following.daemon.supervisor.children["old"] = Child("old", Orders({}), ending_s=time.monotonic() + 3600)
    _deliver(following.daemon.places.state_dir, "console", header.stream_id, end)

    following.daemon._reclaim()
    assert Path(ingest.spool_dir, header.stream_id).exists()
    del following.daemon.supervisor.children["old"]
    following.daemon._reclaim()
    assert not Path(ingest.spool_dir, header.stream_id).exists()


# Reclaiming


def _deliver(state: str, backend: str, stream_id: str, offset: int) -> None:
    os.makedirs(os.path.join(state, "lanes"), exist_ok=True)
    store = LaneStore(store_path(state, backend))
    store.seal("run-1", "b", Taken(cursors=[Cursor(stream_id, "run-1", offset=offset)]))
    store.close()


def test_only_what_every_lane_has_behind_it_is_freed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ("file", "console"))
    bench.daemon.open()
    ingest, header = bench.daemon.ingest, make_header()
    ingest.greet(header)
    ingest.take(header.stream_id, 0, frame(0) + frame(1))
    ingest.settle()
    ingest.seal(header.stream_id, [])
    end = ingest.end(header.stream_id)
    folder = Path(ingest.spool_dir, header.stream_id)

    bench.daemon._reclaim()
    _deliver(bench.state, "file", header.stream_id, end)
    bench.daemon._reclaim()
    assert folder.exists(), "the other lane has not begun"
    _deliver(bench.state, "console", header.stream_id, end - 1)
    bench.daemon._reclaim()
    assert folder.exists(), "the other lane is not through"
    _deliver(bench.state, "console", header.stream_id, end)
    Path(store_path(bench.state, "console")).rename(tmp_path / "aside")
    Path(store_path(bench.state, "console")).write_bytes(b"\0" * 4096)
    bench.daemon._reclaim()
    assert folder.exists(), "a state that cannot be read frees nothing"
    (tmp_path / "aside").rename(store_path(bench.state, "console"))
    bench.daemon._reclaim()

    assert not folder.exists()
    bench.daemon.close()


def test_notes_are_json_that_status_can_read(bench: Bench) -> None:
    notes = bench.notes()

    assert notes["state"] == "running"
    assert notes["pid"] == os.getpid()
    assert json.dumps(notes)
