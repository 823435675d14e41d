"""The client and its process: handlers inside `log`, finish, exits, forks. Nothing is lost, nobody waits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.processes import wait_for
from unit.client.conftest import MakeClient
from unit.client.spooled import bodies
from unit.client.test_values import HostileMapping
from verl_shipper_spool.header import decode_header
from verl_shipper_spool.record import RecordKind

# Signal handlers and finalisers inside log()


def test_a_record_logged_inside_another_one_spoils_neither(make: MakeClient, spool: Path) -> None:
    made = make()

    class Nosy:
        size = 1

        def item(self) -> float:
            made.log({"inner": 1}, step=2)
            return 0.5

    made.log({"before": 1, "nosy": Nosy(), "after": 3}, step=1)
    made.log({"next": 4}, step=3)

    assert bodies(spool) == [{"before": 1, "nosy": 0.5, "after": 3}, {"inner": 1}, {"next": 4}]
    assert made.errors == 0


def test_signal_handlers_may_log_at_any_moment(make: MakeClient, spool: Path) -> None:
    made = make()
    handled = 0

    def on_alarm(_number: int, _frame: object) -> None:
        nonlocal handled
        handled += 1
        made.log({"handler": handled, "odd": np.float32(1)}, step=handled)

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        count = 0
        while handled < 150:
            made.log({"main": count, "value": np.float32(0.5), "more": [np.int64(1)] * 5}, step=count)
            count += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)

    found = bodies(spool)
    assert sorted(body["main"] for body in found if "main" in body) == list(range(count))
    assert sorted(body["handler"] for body in found if "handler" in body) == list(range(1, handled + 1))


def test_threads_may_log_together(make: MakeClient, spool: Path) -> None:
    made = make()

    def work(name: int) -> None:
        for count in range(200):
            made.log({"n": name * 1000 + count}, step=count)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(body["n"] for body in bodies(spool)) == [n * 1000 + c for n in range(4) for c in range(200)]


# Finish


def test_finish_twice_records_one_end(make: MakeClient, spool: Path) -> None:
    made = make()
    made.finish(exit_code=3, timeout_s=0.0)
    made.finish(exit_code=0, timeout_s=0.0)

    assert bodies(spool, RecordKind.RUN_FINISH) == [{"exit_code": 3, "reason": "finish"}]


def test_a_finished_client_holds_no_files(make: MakeClient, spool: Path) -> None:
    for _ in range(3):
        made = make()
        made.log({"loss": 1.0}, step=1)
        made.log_generations([("a", "b", 1.0)], step=1)
        made.finish(timeout_s=0.0)

    links = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    assert [target for link in links if link.is_symlink() and str(spool) in (target := os.readlink(link))] == []


def test_records_logged_after_finish_are_kept(make: MakeClient, spool: Path) -> None:
    made = make()
    made.finish(timeout_s=0.0)
    made.log({"late": 1}, step=9)

    assert bodies(spool) == [{"late": 1}]
    assert made._sender is not None


@pytest.mark.parametrize(
    ("given", "told"), [(None, None), (0, 0), (np.int64(3), 3), ("x", None), (2**70, None), (True, 1), (object(), None)]
)
def test_an_exit_code_of_any_kind_ends_the_run(make: MakeClient, spool: Path, given: Any, told: int | None) -> None:
    made = make()
    made.finish(exit_code=given, timeout_s=0.0)

    assert bodies(spool, RecordKind.RUN_FINISH) == [{"exit_code": told, "reason": "finish"}]
    assert made.errors == 0


@pytest.mark.parametrize("timeout_s", [-1.0, 0, float("nan"), None, "x"])
def test_finish_ends_its_thread_whatever_its_patience(make: MakeClient, timeout_s: Any) -> None:
    made = make()
    made.log({"a": 1}, step=1)
    sender = made._sender
    assert sender is not None

    assert made.finish(timeout_s=timeout_s) is False

    wait_for(lambda: not sender._thread.is_alive(), 5, "the sender ends")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 1),
        (SystemExit(), 0),
        (SystemExit(0), 0),
        (SystemExit(4), 4),
        (SystemExit("words"), 1),
    ],
    ids=repr,
)
def test_a_context_manager_tells_how_it_ended(
    make: MakeClient, spool: Path, error: BaseException | None, code: int
) -> None:
    made = make()
    made.finish = _impatient(made.finish)  # type: ignore[method-assign]
    with pytest.raises(type(error)) if error else contextlib.nullcontext(), made:
        _raise(error)

    assert bodies(spool, RecordKind.RUN_FINISH) == [{"exit_code": code, "reason": "finish"}]


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _impatient(finish: Any) -> Any:
    return lambda **arguments: finish(**(arguments | {"timeout_s": 0.0}))


# Processes


def test_a_fork_child_has_streams_of_its_own_and_no_second_start(make: MakeClient, spool: Path) -> None:
    made = make(run_id="run-7")
    made.log({"parent": 1}, step=1)
    pid = os.fork()
    if pid == 0:
        made.log({"child": 1}, step=2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    made.log({"parent": 2}, step=3)

    headers = [decode_header((folder / "stream").read_bytes()) for folder in spool.iterdir()]
    assert sorted(header.forked for header in headers) == [False, True]
    assert {header.run_id for header in headers} == {"run-7"}
    assert len({header.writer_id for header in headers}) == 2
    assert len(bodies(spool)) == 3
    assert len(bodies(spool, RecordKind.RUN_START)) == 1


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("raise SystemExit(0)", 0),
        ("raise ValueError", 1),
        ("os._exit(0)", None),
        ("os.kill(os.getpid(), 9)", None),
    ],
)
def test_a_process_that_ends_tells_its_end_when_it_can(tmp_path: Path, ending: str, code: int | None) -> None:
    script = f"""
import os
from verl_shipper_client import Client
client = Client("project", "experiment", spool_dir={str(tmp_path / "spool")!r})
client.log({{"a": 1}}, step=1)
{ending}
"""
    subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, timeout=60)

    assert bodies(tmp_path / "spool") == [{"a": 1}]
    ends = bodies(tmp_path / "spool", RecordKind.RUN_FINISH)
    assert ends == ([] if code is None else [{"exit_code": code, "reason": "finish"}])


HEAVY = ("torch", "numpy", "asyncio", "sqlite3", "click", "rich", "omegaconf", "watchdog", "wandb", "mlflow", "swanlab")


def test_importing_the_client_imports_nothing_heavy_and_starts_nothing() -> None:
    script = (
        "import sys, threading; import verl_shipper_client; "
        f"print([name for name in {HEAVY!r} if name in sys.modules], threading.active_count())"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)

    assert result.stdout.strip() == "[] 1"


def test_a_mapping_that_raises_costs_one_value(make: MakeClient, spool: Path) -> None:
    data: Mapping[str, Any] = HostileMapping()
    make().log(data, step=1)

    (body,) = bodies(spool)
    assert body["good"] == 1
