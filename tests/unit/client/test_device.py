"""Tensors on a device: `log` does not wait for them, and their records come whole, once and in order."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from support.processes import wait_for
from unit.client.conftest import MakeClient
from unit.client.fake_device import FakeTorch
from unit.client.spooled import bodies, records
from verl_shipper_client import held
from verl_shipper_spool.record import RecordKind, Unsupported


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    device = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", device)
    monkeypatch.setattr("verl_shipper_client.device._idle", {})
    return device


def steps(spool: Path) -> list[int | None]:
    return [record.step for record in records(spool) if record.kind is RecordKind.METRICS]


def test_a_call_does_not_wait_and_its_record_is_kept_when_the_device_has_come_so_far(
    make: MakeClient, spool: Path, torch: FakeTorch
) -> None:
    made = make()

    made.log({"loss": torch.tensor(0.25), "lr": 1e-3}, step=7)
    assert bodies(spool) == []

    torch.run()
    wait_for(
        lambda: bodies(spool) == [{"loss": 0.25, "lr": 1e-3}], 20, "the record"
    )  # nobody called us: the sender did it
    assert made.errors == 0


def test_the_next_call_writes_what_is_there_by_then(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    made = make()
    made._complaints.guard("sender", made._sender.stop if made._sender else lambda: None)  # we alone

    made.log({"loss": torch.tensor(1.0)}, step=1)
    torch.run()
    made.log({"loss": torch.tensor(2.0)}, step=2)

    assert bodies(spool) == [{"loss": 1.0}]


def test_later_records_wait_behind_one_that_waits(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    made = make()
    made.log({"a": 1}, step=1)
    made.log({"loss": torch.tensor(0.5)}, step=2)
    made.log({"a": 3}, step=3)
    made.log_text("note", "four", step=4)

    assert steps(spool) == [1]
    torch.run()
    made.log({"a": 5}, step=5)

    assert [record.step for record in records(spool)[1:]] == [1, 2, 3, 4, 5]


def test_the_time_of_a_record_is_that_of_its_call(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    made = make()
    made.log({"loss": torch.tensor(0.5)}, step=1)
    made.log({"a": 1}, step=2)
    torch.run()
    made.finish()

    one, two = [record for record in records(spool) if record.kind is RecordKind.METRICS]
    assert one.time_ns <= two.time_ns
    assert one.seq < two.seq


def test_all_tensors_of_one_type_travel_together(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    made = make()
    data = {f"m/{index}": torch.tensor(float(index)) for index in range(100)}

    made.log({**data, "count": torch.tensor(7, torch.int64), "half": torch.tensor(0.5, torch.bfloat16)}, step=1)

    assert torch.stacks == [("float32", 100), ("int64", 1), ("bfloat16", 1)]
    torch.run()
    made.finish()
    (body,) = bodies(spool)
    assert body == {**{f"m/{index}": float(index) for index in range(100)}, "count": 7, "half": 0.5}


@pytest.mark.parametrize(
    ("kind", "number"),
    [("float64", 0.1), ("float8_e4m3fn", 1.5), ("int32", -3), ("uint64", 2**63), ("bool", True), ("float32", "nan")],
)
def test_numbers_of_every_type_are_what_they_were(
    make: MakeClient, spool: Path, torch: FakeTorch, kind: str, number: Any
) -> None:
    made = make()
    value = float(number) if isinstance(number, str) else number
    made.log({"value": torch.tensor(value, getattr(torch, kind))}, step=1)
    torch.run()
    made.finish()

    assert str(bodies(spool)[0]["value"]) == str(value)


def test_what_is_no_single_number_is_a_marker_and_waits_for_nothing(
    make: MakeClient, spool: Path, torch: FakeTorch
) -> None:
    made = make()
    many = torch.tensor(0.0)
    many.numbers, many.shape = [1.0, 2.0], (2,)

    made.log({"many": many, "ok": 1}, step=1)

    (body,) = bodies(spool)
    assert body["ok"] == 1
    assert isinstance(body["many"], Unsupported)


def test_nested_values_and_odd_neighbours_come_as_ever(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    made = make()
    made.log({"actor": {"loss": torch.tensor(1.0), ("a", 1): torch.tensor(2.0)}, "odd": object()}, step=1)
    torch.run()
    made.finish()

    (body,) = bodies(spool)
    assert body["actor"] == {"loss": 1.0, "a/1": 2.0}
    assert isinstance(body["odd"], Unsupported)


def test_a_complex_number_costs_itself(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    torch.may_wait = True
    made = make()
    made.log({"complex": torch.tensor(1j, torch.complex64), "loss": torch.tensor(1.0)}, step=1)
    torch.run()
    made.finish()

    (body,) = bodies(spool)
    assert body["loss"] == 1.0
    assert isinstance(body["complex"], Unsupported)


def test_a_step_may_be_on_the_device_too(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    made = make()
    made.log({"loss": 1.0}, step=torch.tensor(12, torch.int64))  # type: ignore[arg-type]
    made.log_text("a", "b", step=torch.tensor(13, torch.int64))  # type: ignore[arg-type]
    torch.run()
    made.finish()

    assert [record.step for record in records(spool)[1:3]] == [12, 13]


def test_generations_and_spans_wait_in_their_own_stream(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    made = make()
    made.log_generations([("q", "a", torch.tensor(0.75))], step=1)
    with made.span("rollout", attributes={"step": 1, "reward": torch.tensor(0.5)}) as span:
        span.set_outputs({"score": torch.tensor(0.25)})
    made.log({"a": 1}, step=1)

    assert bodies(spool) == [{"a": 1}], "metrics wait for nothing of theirs"
    torch.run()
    made.finish()
    assert bodies(spool, RecordKind.GENERATIONS)[0]["rows"] == [["q", "a", 0.75]]
    (body,) = bodies(spool, RecordKind.SPAN)
    assert body["attributes"]["reward"] == 0.5
    assert body["outputs"] == {"score": 0.25}


def test_whoever_wants_to_wait_has_the_record_when_the_call_returns(
    make: MakeClient, spool: Path, torch: FakeTorch
) -> None:
    torch.may_wait = True
    made = make()
    made.log({"loss": torch.tensor(1.0)}, step=1)
    made.log({"loss": torch.tensor(2.0)}, step=2, sync=True)

    assert bodies(spool) == [{"loss": 1.0}, {"loss": 2.0}]


def test_nothing_of_the_caller_is_kept_alive(make: MakeClient, torch: FakeTorch) -> None:
    made = make()
    tensor = torch.tensor(1.0)
    seen = weakref.ref(tensor)

    made.log({"loss": tensor}, step=1)
    del tensor
    gc.collect()

    assert seen() is None
    assert torch.queue, "and it is still on its way"


# Limits and failures


def test_a_device_that_hangs_costs_its_values_and_nobody_elses(
    make: MakeClient, spool: Path, torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "HELD_S_MAX", 0.2)
    made = make()
    made.log({"loss": torch.tensor(1.0), "lr": 0.5}, step=1)
    made.log({"a": 2}, step=2)

    wait_for(lambda: len(bodies(spool)) == 2, 20, "both records")
    first, second = bodies(spool)
    assert (first["lr"], second) == (0.5, {"a": 2})
    assert first["loss"].text.endswith("not ready")


@pytest.mark.parametrize(("limit", "value"), [("HELD_RECORDS_MAX", 10), ("HELD_BYTES_MAX", 10_000)])
def test_what_waits_is_bounded(
    make: MakeClient, spool: Path, torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(held, limit, value)
    made = make()
    for step in range(1, 101):
        made.log({"loss": torch.tensor(1.0)} if step % 2 else {"text": "x" * 1000}, step=step)

    assert steps(spool) == list(range(1, steps(spool)[-1] + 1))  # type: ignore[operator]
    assert 80 <= len(steps(spool)) < 100
    torch.run()
    made.finish()
    assert steps(spool) == list(range(1, 101))
    assert bodies(spool)[98] == {"loss": 1.0}


def test_a_device_that_dies_says_so_in_place_of_the_value(
    make: MakeClient, spool: Path, torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "ASK_AFTER_S", 0.05)
    made = make()
    made.log({"loss": torch.tensor(1.0), "lr": 0.5}, step=1)
    torch.failure = RuntimeError("device-side assert")
    time.sleep(0.1)

    made.log({"a": 0}, step=1)
    body, _ = bodies(spool)
    assert body["lr"] == 0.5
    assert body["loss"].text.endswith("RuntimeError")
    made.log({"a": 1}, step=2)
    assert len(bodies(spool)) == 3


@pytest.mark.parametrize("word", [("int64", -0x5A3C7E91D2B64F17), ("int64", 0)])
def test_a_number_that_is_the_word_for_nothing_arrives_all_the_same(
    make: MakeClient, spool: Path, torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, word: tuple[str, int]
) -> None:
    monkeypatch.setattr(held, "ASK_AFTER_S", 0.05)
    made = make()
    made.log({"n": torch.tensor(word[1], torch.int64)}, step=1)
    torch.run()
    time.sleep(0.1)
    made.log({"a": 1}, step=2)

    assert bodies(spool) == [{"n": word[1]}, {"a": 1}]


def test_a_device_is_asked_nothing_while_all_goes_well(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    made = make()
    for step in range(100):
        made.log({"loss": torch.tensor(float(step))}, step=step)
        torch.run()
    made.log({"loss": torch.tensor(100.0)}, step=100)
    torch.run()
    wait_for(lambda: len(bodies(spool)) == 101, 20, "all records")

    assert torch.queries == 0, "a query in one thread breaks a capture in another"


def test_memory_is_used_again(make: MakeClient, torch: FakeTorch) -> None:
    made = make()
    for step in range(100):
        made.log({"loss": torch.tensor(1.0), "n": torch.tensor(1, torch.int64)}, step=step)
        torch.run()

    assert torch.allocated <= 4


def test_while_a_graph_is_captured_the_device_is_left_alone(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    torch.is_capturing = True
    made = make()
    made.log({"loss": torch.tensor(1.0), "lr": 0.5}, step=1)

    (body,) = bodies(spool)
    assert body["lr"] == 0.5
    assert body["loss"].text.endswith("while a graph is captured")
    assert torch.queue == []


@pytest.mark.parametrize("lack", ["events", "pinned memory"])
def test_a_device_without_what_it_takes_is_read_at_once(
    make: MakeClient, spool: Path, torch: FakeTorch, lack: str
) -> None:
    torch.may_wait = True
    torch.has_pinned_memory = lack != "pinned memory"
    made = make()
    made.log({"loss": torch.tensor(1.5, device="abacus" if lack == "events" else "cuda")}, step=1)

    assert bodies(spool) == [{"loss": 1.5}]


def test_finish_waits_for_the_device_as_long_as_it_may(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    made = make()
    made.log({"loss": torch.tensor(1.0)}, step=1)

    made.finish(exit_code=0, timeout_s=0.2)

    kinds = [record.kind for record in records(spool)]
    assert kinds == [RecordKind.RUN_START, RecordKind.METRICS, RecordKind.RUN_FINISH]
    assert isinstance(bodies(spool)[0]["loss"], Unsupported)


def test_a_process_that_ends_keeps_what_its_device_has(spool: Path) -> None:
    script = """
        import sys
        from unit.client.fake_device import FakeTorch
        sys.modules["torch"] = torch = FakeTorch()
        from verl_shipper_client import Client
        client = Client(spool_dir=sys.argv[1])
        client.log({"loss": torch.tensor(1.0)}, step=1)
        torch.run()
    """
    assert run(script, spool).returncode == 0

    assert bodies(spool) == [{"loss": 1.0}]


def test_kill_costs_what_waits_for_the_device_and_no_more(spool: Path) -> None:
    script = """
        import os, signal, sys
        from unit.client.fake_device import FakeTorch
        sys.modules["torch"] = torch = FakeTorch()
        from verl_shipper_client import Client
        client = Client(spool_dir=sys.argv[1])
        for step in range(10):
            client.log({"loss": torch.tensor(float(step)), "a": 1}, step=step)
            torch.run()
        client.log({"a": 1}, step=10)
        client.log({"loss": torch.tensor(1.0)}, step=11)
        client.log({"a": 1}, step=12)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(script, spool).returncode == -signal.SIGKILL

    assert steps(spool) == list(range(11))


def test_a_fork_child_does_not_write_what_its_parent_waits_for(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    made = make()
    made.log({"loss": torch.tensor(1.0)}, step=1)

    child = os.fork()
    if child == 0:
        torch.run()
        made.log({"child": 1}, step=2)
        made.finish(timeout_s=0.1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    torch.run()
    made.finish()

    assert sorted(bodies(spool), key=str) == [{"child": 1}, {"loss": 1.0}]


def test_a_signal_handler_may_log_in_the_midst_of_a_release(make: MakeClient, spool: Path, torch: FakeTorch) -> None:
    made = make()
    count = 0

    def on_alarm(_number: int, _frame: Any) -> None:
        nonlocal count
        count += 1
        made.log({"handler": torch.tensor(float(count))} if count % 2 else {"handler": count}, step=100_000 + count)

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
    try:
        for step in range(3000):
            made.log({"loss": torch.tensor(float(step))}, step=step)
            torch.run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    torch.run()
    made.finish()

    assert count > 20
    assert [body["loss"] for body in bodies(spool) if "loss" in body] == list(map(float, range(3000)))
    assert sorted(int(body["handler"]) for body in bodies(spool) if "handler" in body) == list(range(1, count + 1))


def run(script: str, spool: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(spool)],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_client_without_any_device_loads_nothing_of_torch() -> None:
    code = "import sys, verl_shipper_client; print('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
