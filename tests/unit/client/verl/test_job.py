"""What a process knows of its job: wishes, the run id that all agree on, what travels to workers, who ends the run."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from unit.client.spooled import records
from verl_shipper_client.client import Client
from verl_shipper_client.verl import training
from verl_shipper_client.verl.job import JOB, job_run_id, names_in, travelling, wishes_of
from verl_shipper_spool.record import RecordKind


def ray_of(session: str, job: str) -> types.SimpleNamespace:
    context = types.SimpleNamespace(get_job_id=lambda: job, get_session_name=lambda: session)
    return types.SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)


def test_all_processes_of_a_ray_job_find_the_same_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray_of("session_1", "01000000"))
    first = job_run_id("p", "e")
    assert first == job_run_id("p", "e")
    assert len({first, job_run_id("p", "other")}) == 2
    for session, job in (("session_2", "01000000"), ("session_1", "02000000")):
        monkeypatch.setitem(sys.modules, "ray", ray_of(session, job))
        assert job_run_id("p", "e") != first


def test_without_ray_the_run_id_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert job_run_id("p", "e") is None
    assert JOB.head("p", "e", {}).run_id != JOB.head("p", "e", {}).run_id


def test_a_given_run_id_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray_of("session_1", "01000000"))
    assert JOB.head("p", "e", {"trainer": {"shipper": {"run_id": "mine"}}}).run_id == "mine"
    monkeypatch.setenv("VERL_SHIPPER_RUN_ID", "variable")
    assert JOB.head("p", "e", {"trainer": {"shipper": {"run_id": "mine"}}}).run_id == "variable"


def test_the_rank_of_whoever_logs_does_not_matter(fresh_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    client = JOB.head("p", "e", {})
    assert (client.rank, client.world) == (0, 1)


def test_a_helper_in_the_heads_process_is_the_head() -> None:
    head = JOB.head("p", "e", {"trainer": {"project_name": "p", "experiment_name": "e"}})
    assert JOB.helper("p", "e") is head
    assert JOB.helper("renamed for traces", "x") is head  # a trace's own names are not the run's
    assert JOB.helper("p", "e") is JOB.helper("p", "e")


def test_settings_travel_to_workers_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_SHIPPER_SPOOL_DIR", "spool")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    config = {"trainer": {"shipper": {"takeover": True, "socket": "tcp://10.0.0.1:7000"}}}
    assert travelling(config) == {
        "VERL_SHIPPER_SPOOL_DIR": str(tmp_path / "spool"),
        "VERL_SHIPPER_SOCKET": "tcp://10.0.0.1:7000",
        "VERL_SHIPPER_TAKEOVER": "1",
    }
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "other,verl_shipper_client.verl_plugin")
    assert travelling(None)["VERL_USE_EXTERNAL_MODULES"] == "other,verl_shipper_client.verl_plugin"


def test_workers_get_them_by_verls_own_runtime_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SHIPPER_TAKEOVER", "1")
    module = types.ModuleType(training.ENVIRONMENT_MODULE)
    module.get_ppo_ray_runtime_env = lambda config=None: {"env_vars": {"NCCL_DEBUG": "WARN"}}  # type: ignore[attr-defined]
    training.patch_environment(module)
    variables = module.get_ppo_ray_runtime_env({"trainer": {}})["env_vars"]
    assert (variables["NCCL_DEBUG"], variables["VERL_SHIPPER_TAKEOVER"]) == ("WARN", "1")
    assert module.get_ppo_ray_runtime_env()["env_vars"]["VERL_SHIPPER_TAKEOVER"] == "1"


@pytest.mark.parametrize(
    "config", ["", "{}", "no json", '{"runtime_env": {"env_vars": {"VERL_SHIPPER_TAKEOVER": "1"}}}']
)
def test_what_a_submitted_job_brings_along_is_not_said_twice(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    """Ray refuses a job whose two runtime environments have a variable in common, were it the same value."""
    monkeypatch.setenv("VERL_SHIPPER_TAKEOVER", "1")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", config)
    assert ("VERL_SHIPPER_TAKEOVER" in travelling(None)) == ("TAKEOVER" not in config)


@pytest.mark.parametrize("config", [None, 7, {}, {"trainer": {"shipper": {"takeover": "no", "socket": 5}}}])
def test_a_configuration_of_any_shape_wishes_something(config: Any) -> None:
    assert wishes_of(config).takeover is False


def test_a_name_is_a_list_of_one() -> None:
    assert (names_in("console"), names_in(["a", "b"]), names_in(None)) == (["console"], ["a", "b"], [])


class StopError(Exception):
    """What a training may end with."""


def trainer_module() -> types.ModuleType:
    class RayPPOTrainer:
        config = None

        def fit(self, fail: bool = False) -> str:
            JOB.head("p", "e", {}).log({"a": 1}, 1)
            if fail:
                raise StopError
            return "done"

    module = types.ModuleType("verl.trainer.ppo.ray_trainer")
    module.RayPPOTrainer = RayPPOTrainer  # type: ignore[attr-defined]
    training.patch_trainer(module)
    return module


def exit_codes(spool: Path) -> list[int]:
    return [record.body["exit_code"] for record in records(spool) if record.kind is RecordKind.RUN_FINISH]


@pytest.mark.parametrize("fail", [False, True])
def test_a_training_that_returns_has_succeeded_and_one_that_raises_has_failed(fresh_job: Path, fail: bool) -> None:
    trainer = trainer_module().RayPPOTrainer()
    if fail:
        with pytest.raises(StopError):
            trainer.fit(fail=True)
    else:
        assert trainer.fit() == "done"
    assert exit_codes(fresh_job) == [int(fail)]


@pytest.mark.parametrize("fail", [False, True])
def test_a_recipes_own_trainer_ends_its_run_once_at_the_outermost(fresh_job: Path, fail: bool) -> None:
    class Recipe(trainer_module().RayPPOTrainer):  # type: ignore[misc]
        def fit(self) -> str:
            result: str = super().fit()
            if fail:
                raise StopError
            return result

    if fail:
        with pytest.raises(StopError):
            Recipe().fit()
    else:
        Recipe().fit()
    assert exit_codes(fresh_job) == [int(fail)]


def test_an_asynchronous_training_ends_like_any_other(fresh_job: Path) -> None:
    class Fully(trainer_module().RayPPOTrainer):  # type: ignore[misc]
        async def fit(self) -> str:
            await asyncio.sleep(0)
            JOB.head("p", "e", {}).log({"a": 1}, 1)
            return "done"

    assert asyncio.run(Fully().fit()) == "done"
    assert exit_codes(fresh_job) == [0]


def test_a_process_without_tracking_ends_nobodys_run(fresh_job: Path) -> None:
    class Rollouter(trainer_module().RayPPOTrainer):  # type: ignore[misc]
        config = types.SimpleNamespace()

        def fit(self) -> None:
            JOB.helper("p", "e").log_generations([("q", "a", 1.0)], 1)

    Rollouter().fit()
    assert exit_codes(fresh_job) == []


@pytest.mark.parametrize(("code", "recorded"), [(0, 0), (None, 0), (3, 3), ("text", 1)])
def test_a_training_that_exits_ends_with_its_code(fresh_job: Path, code: Any, recorded: int) -> None:
    class Leaving(trainer_module().RayPPOTrainer):  # type: ignore[misc]
        def fit(self) -> None:
            JOB.head("p", "e", {}).log({"a": 1}, 1)
            raise SystemExit(code)

    with pytest.raises(SystemExit):
        Leaving().fit()
    assert exit_codes(fresh_job) == [recorded]


def test_a_decorator_that_hides_a_coroutine_does_not_end_the_training(fresh_job: Path) -> None:
    def hiding(func: Any) -> Any:
        def hidden(*args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

        return hidden

    class Fully(trainer_module().RayPPOTrainer):  # type: ignore[misc]
        @hiding
        async def fit(self) -> None:
            JOB.head("p", "e", {}).log({"a": 1}, 1)
            await asyncio.sleep(0)
            raise StopError

    with pytest.raises(StopError):
        asyncio.run(Fully().fit())
    assert exit_codes(fresh_job) == [1]


def test_a_fit_that_is_no_function_stays_what_it_is() -> None:
    class Odd(trainer_module().RayPPOTrainer):  # type: ignore[misc]
        def _fit(self, number: int) -> int:
            return number

        fit = functools.partialmethod(_fit, 5)

    assert Odd().fit() == 5


def test_two_trainings_of_a_process_end_each_its_own_run(fresh_job: Path) -> None:
    class Nested(trainer_module().RayPPOTrainer):  # type: ignore[misc]
        def fit(self, inner: Any = None) -> None:
            JOB.head("p", "outer" if inner else "inner", {}).log({"a": 1}, 1)
            if inner is None:
                raise StopError
            with pytest.raises(StopError):
                inner.fit()

    Nested().fit(Nested())
    assert sorted(exit_codes(fresh_job)) == [0, 1]


def test_a_signal_handler_that_ends_the_run_while_a_client_begins_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = Client._start

    def slow(self: Client) -> Any:
        JOB.heads()  # what a handler does in the middle of it
        JOB.helper("p", "e2")
        return begin(self)

    monkeypatch.setattr(Client, "_start", slow)
    thread = threading.Thread(target=lambda: JOB.head("p", "e", {}), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_a_fork_in_the_middle_of_a_beginning_leaves_the_child_free() -> None:
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with JOB._lock:
            held.set()
            go.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        JOB.heads()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    go.set()
    thread.join()
    assert status == 0
