"""Rollout traces: one tree of spans per trajectory, tokens written once, whatever the loop does."""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from unit.client.spooled import records
from unit.client.verl.rollouts import Batch, Call, Output, agent, spans, tell, verl
from verl_shipper_client.verl import rollout
from verl_shipper_client.verl.job import JOB
from verl_shipper_client.verl.patch import MARK
from verl_shipper_spool.record import RecordKind

__all__ = ["verl"]  # a fixture


def test_a_trajectory_is_one_tree_with_question_tool_call_answer_and_reward(
    verl: types.ModuleType, fresh_job: Path
) -> None:
    tell(verl)
    told = spans(fresh_job)
    root = told[-1]
    names = [span["name"].rpartition(".")[2] for span in told]
    assert names == [
        "generate",
        "extract_tool_calls",
        "tool calculator",
        "generate",
        "extract_tool_calls",
        "run",
        "agent_loop",
    ]
    run = told[-2]
    assert {span["parent_id"] for span in told[:-2]} == {run["span_id"]}
    assert (run["parent_id"], root["parent_id"]) == (root["span_id"], None)
    assert {span["trace_id"] for span in told} == {root["trace_id"]}

    assert root["inputs"] == {"messages": [{"role": "user", "content": "2+2?"}]}
    assert root["outputs"]["response_text"] == "It is 4."
    attributes = root["attributes"]
    assert (attributes["uid"], attributes["step"], attributes["sample_index"], attributes["rollout_n"]) == (
        "u7",
        3,
        9,
        1,
    )
    assert (attributes["reward"], attributes["reward_extra_info"]) == (1.0, {"acc": 1.0})
    tool = told[2]
    assert (tool["inputs"], tool["outputs"]) == (
        {"arguments": {"expression": "2+2"}},
        {"response": "4", "reward": 0.25},
    )
    assert [span["attributes"]["span_type"] for span in told] == [
        "chat",
        "parser",
        "tool",
        "chat",
        "parser",
        "agent",
        "agent",
    ]


def test_tokens_and_log_probabilities_are_written_once(verl: types.ModuleType, fresh_job: Path) -> None:
    tell(verl)
    first, _, _, second, _, run, root = spans(fresh_job)
    assert (first["inputs"]["prompt_ids"], first["outputs"]["token_ids"]) == ([1, 2, 3], [100, 101])
    assert (second["inputs"]["prompt_ids"], second["outputs"]["token_ids"]) == ([50], [102])
    assert second["attributes"]["known_tokens"] == 5
    assert (second["attributes"]["prompt_tokens"], second["attributes"]["response_tokens"]) == (6, 1)
    for gone in ("prompt_ids", "response_ids", "response_logprobs", "response_mask"):
        assert gone not in run["outputs"]
    assert run["outputs"]["response_mask_runs"] == [[1, 2], [0, 1], [1, 1]]
    assert "response_of" not in {**run["outputs"], **root["outputs"]}  # the root has the text


def test_what_is_seen_does_not_change_what_is_done(verl: types.ModuleType) -> None:
    output = tell(verl)
    assert output.response_mask == [1, 1, 0, 1]
    assert output.response_logprobs == [-0.5, -0.5, 0.0, -0.5]


def test_the_default_trainer_of_verl_0_9_is_traced_though_it_asks_for_none(
    verl: types.ModuleType, fresh_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, rollout.V1_MODULES[0], types.ModuleType("v1"))
    verl.RolloutTraceConfig.get_instance().max_samples_per_step_per_worker = 1
    for sample in (1, 1, 2):  # two rollouts of one sample, and another sample
        tell(verl, step=Batch(), sample_index=sample, trace=False)
    roots = [span for span in spans(fresh_job) if span["parent_id"] is None]
    assert [root["attributes"]["step"] for root in roots] == [5, 5]


def test_a_trajectory_that_verl_does_not_want_traced_is_not(verl: types.ModuleType, fresh_job: Path) -> None:
    tell(verl, trace=False)
    assert spans(fresh_job) == []


def test_trajectories_that_run_together_do_not_see_each_other(verl: types.ModuleType, fresh_job: Path) -> None:
    async def one(sample: int) -> None:
        with verl.rollout_trace_attr(step=1, sample_index=sample, name="agent_loop"):
            await agent(verl).run({}, raw_prompt=[], index=sample)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(sample) for sample in range(5)))

    asyncio.run(all_of_them())
    told = spans(fresh_job)
    traces = {span["trace_id"] for span in told}
    assert len(traces) == 5
    for trace in traces:
        of_trace = [span for span in told if span["trace_id"] == trace]
        assert len(of_trace) == 7
        assert len({span["attributes"]["sample_index"] for span in of_trace}) == 1


def test_an_error_goes_on_and_is_seen(verl: types.ModuleType, fresh_job: Path) -> None:
    loop = agent(verl)

    async def drive() -> None:
        with verl.rollout_trace_attr(step=1, name="agent_loop"):
            await loop._call_tool(Call("calculator", "broken"), {}, None)

    with pytest.raises(ValueError, match="no such expression"):
        asyncio.run(drive())
    tool, root = spans(fresh_job)
    assert (tool["status"], root["status"]) == ("error", "error")
    assert tool["attributes"]["error"] == "ValueError: no such expression"
    assert tool["inputs"] == {"arguments": "broken"}


def test_a_traced_call_outside_of_any_trajectory_is_a_trace_of_its_own(verl: types.ModuleType, fresh_job: Path) -> None:
    class Judge:
        @verl.rollout_trace_op  # type: ignore[untyped-decorator]
        def score(self, text: str, strict: bool = False) -> dict[str, float]:
            return {"score": 0.5}

    assert Judge().score("text") == {"score": 0.5}
    (span,) = spans(fresh_job)
    assert (span["parent_id"], span["inputs"], span["outputs"]) == (None, {"text": "text"}, {"score": 0.5})


@pytest.mark.parametrize("backend", [None, "weave", "mlflow"])
def test_traces_of_another_backend_are_not_ours(verl: types.ModuleType, fresh_job: Path, backend: str | None) -> None:
    verl.RolloutTraceConfig.init("p", "e", backend)
    tell(verl)
    assert spans(fresh_job) == []


def test_a_takeover_takes_the_traces_too(
    verl: types.ModuleType, fresh_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_SHIPPER_TAKEOVER", "1")
    verl.RolloutTraceConfig.init("p", "e", "weave", token2text=True)
    assert verl.RolloutTraceConfig.get_backend() == "shipper"
    tell(verl)
    assert len(spans(fresh_job)) == 7


def test_loops_that_nobody_has_decorated_are_seen(verl: types.ModuleType, fresh_job: Path) -> None:
    class AgentLoopBase:
        pass

    class AgentLoopWorker:
        def __init__(self, config: Any) -> None:
            self.tokenizer = types.SimpleNamespace(name_or_path="/models/qwen")

    module = types.ModuleType("verl.experimental.agent_loop.agent_loop")
    module.AgentLoopBase, module.AgentLoopWorker = AgentLoopBase, AgentLoopWorker  # type: ignore[attr-defined]
    rollout.patch_agent_loop(module)

    class Mine(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Output:
            return Output([1], [2], [1])

    AgentLoopWorker({"trainer": {"project_name": "p", "experiment_name": "e", "logger": ["wandb"]}})
    tell(verl, Mine())
    assert [span["name"].rpartition(".")[2] for span in spans(fresh_job)] == ["run", "agent_loop"]
    start = next(record for record in records(fresh_job) if record.kind is RecordKind.RUN_START)
    assert start.body["forked"] is True  # a helper of the run, not its beginning
    assert start.body["config"]["actor_rollout_ref"]["model"] == {"path": "/models/qwen"}


def test_a_function_is_changed_once(verl: types.ModuleType) -> None:
    loop = agent(verl)
    assert hasattr(type(loop).run, MARK)
    before = type(loop)._call_tool
    tools = types.ModuleType("verl.experimental.agent_loop.tool_agent_loop")
    tools.ToolAgentLoop = type(loop)  # type: ignore[attr-defined]
    rollout.patch_tools(tools)
    assert type(loop)._call_tool is before


def test_our_own_fault_costs_the_rollout_nothing(verl: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(JOB, "helper", fail)
    assert tell(verl).num_turns == 4
