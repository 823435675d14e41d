"""Rollout traces: one tree of spans per trajectory, tokens written once, whatever the loop does."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unit.client.spooled import records
from unit.client.verl.stand_in import trace_module
from verl_shipper_client.verl import rollout
from verl_shipper_client.verl.job import JOB
from verl_shipper_client.verl.patch import MARK
from verl_shipper_spool.record import RecordKind


@dataclass
class Turn:
    """What a server answers."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None


@dataclass
class Output:
    """What an agent loop returns."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    reward_score: float | None = None
    num_turns: int = 2
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class Call:
    name: str
    arguments: str


class Batch:
    """Like a tensor with the step of every sample of a batch."""

    def tolist(self) -> list[int]:
        return [5, 5]


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = trace_module()
    rollout.patch_trace(module)
    monkeypatch.setitem(sys.modules, "verl.utils.rollout_trace", module)
    module.RolloutTraceConfig.init("p", "e", "shipper")
    return module


def agent(module: types.ModuleType) -> Any:
    """An agent that asks a calculator and then answers: what ToolAgentLoop does, without its machinery."""
    op: Callable[[Any], Any] = module.rollout_trace_op

    class Server:
        answers = ([100, 101], [102])

        @op
        async def generate(self, request_id: str, *, prompt_ids: list[int], image_data: Any = None) -> Turn:
            await asyncio.sleep(0)
            turn = len(prompt_ids) > 3
            return Turn(list(self.answers[turn]), [-0.5] * len(self.answers[turn]))

    class Parser:
        @op
        async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[Call]]:
            if 102 in responses_ids:
                return "It is 4.", []
            return "", [Call("calculator", '{"expression": "2+2"}')]

    class Loop:
        @op
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Output:
            server, parser, tokens = Server(), Parser(), [1, 2, 3]
            turn = await server.generate("r1", prompt_ids=tokens)
            _, calls = await parser.extract_tool_calls(turn.token_ids, [])
            await self._call_tool(calls[0], {}, None)
            turn = await server.generate("r1", prompt_ids=[*tokens, 100, 101, 50])
            await parser.extract_tool_calls(turn.token_ids, [])
            return Output(tokens, [100, 101, 50, 102], [1, 1, 0, 1], [-0.5, -0.5, 0.0, -0.5], num_turns=4)

        async def _call_tool(self, tool_call: Call, *_: Any) -> tuple[str, float, dict[str, Any]]:
            if tool_call.arguments == "broken":
                raise ValueError("no such expression")
            return "4", 0.25, {}

    tools = types.ModuleType("verl.experimental.agent_loop.tool_agent_loop")
    tools.ToolAgentLoop = Loop  # type: ignore[attr-defined]
    rollout.patch_tools(tools)
    return Loop()


def spans(spool: Path) -> list[dict[str, Any]]:
    found = records(spool) if spool.exists() else []
    return [record.body for record in found if record.kind is RecordKind.SPAN]


def tell(module: types.ModuleType, loop: Any = None, **attributes: Any) -> Output:
    """One trajectory as verl's worker drives it: the reward comes when the loop has returned."""

    async def drive() -> Output:
        given = {"step": 3, "sample_index": 9, "rollout_n": 1, "name": "agent_loop", **attributes}
        with module.rollout_trace_attr(**given):
            question = [{"role": "user", "content": "2+2?"}]
            output = await (loop or agent(module)).run({"temperature": 1.0}, raw_prompt=question, uid="u7", index=9)
            output.reward_score = 1.0
            output.extra_fields["reward_extra_info"] = {"acc": 1.0}
            return output  # type: ignore[no-any-return]

    return asyncio.run(drive())


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


def test_a_loop_inside_a_loop_does_not_change_whose_trajectory_it_is(verl: types.ModuleType, fresh_job: Path) -> None:
    class Inner:
        @verl.rollout_trace_op  # type: ignore[untyped-decorator]
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Output:
            return Output([7], [8], [1], reward_score=9.0)

    class Outer:
        @verl.rollout_trace_op  # type: ignore[untyped-decorator]
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Output:
            await Inner().run({}, uid="inner", raw_prompt=[])
            return Output([1], [2], [1])

    tell(verl, Outer())
    root = spans(fresh_job)[-1]
    assert (root["attributes"]["uid"], root["attributes"]["reward"]) == ("u7", 1.0)
    assert root["inputs"] == {"messages": [{"role": "user", "content": "2+2?"}]}


def test_an_answer_that_was_not_parsed_is_not_an_earlier_one(verl: types.ModuleType, fresh_job: Path) -> None:
    class Server:
        @verl.rollout_trace_op  # type: ignore[untyped-decorator]
        async def generate(self, request_id: str, *, prompt_ids: list[int]) -> Turn:
            return Turn([len(prompt_ids) + 100])

    class Parser:
        @verl.rollout_trace_op  # type: ignore[untyped-decorator]
        async def extract_tool_calls(self, responses_ids: list[int]) -> tuple[str, list[Call]]:
            return "the first answer", []

    class Loop:
        @verl.rollout_trace_op  # type: ignore[untyped-decorator]
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Output:
            await Server().generate("r", prompt_ids=[1])
            await Parser().extract_tool_calls([101])
            await Server().generate("r", prompt_ids=[1, 101, 5])  # cut off: nobody parses it
            return Output([1], [101, 5, 103], [1, 0, 1])

    tell(verl, Loop())
    *_, turn, _, root = spans(fresh_job)
    assert "response_text" not in root["outputs"]
    assert root["outputs"]["response_of"] == [turn["span_id"]]


@pytest.mark.parametrize("output", [None, "text", 7, object(), [], {"reward_score": 0.5}])
def test_a_loop_may_return_anything(verl: types.ModuleType, fresh_job: Path, output: Any) -> None:
    class Loop:
        @verl.rollout_trace_op  # type: ignore[untyped-decorator]
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            return output

    async def drive() -> Any:
        with verl.rollout_trace_attr(step=1, name="agent_loop"):
            return await Loop().run({})

    assert asyncio.run(drive()) is output
    run, root = spans(fresh_job)
    assert (run["status"], root["status"]) == ("ok", "ok")


class Contrary:
    """Like a tensor of many elements: what it is equal to cannot be said in one word."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


def test_a_conversation_that_a_dataset_has_twice_is_written_once(verl: types.ModuleType, fresh_job: Path) -> None:
    class Loop:
        @verl.rollout_trace_op  # type: ignore[untyped-decorator]
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> None:
            return None

    async def drive() -> None:
        messages = [{"role": "user", "content": "2+2?"}]
        with verl.rollout_trace_attr(name="agent_loop"):
            await Loop().run({}, raw_prompt=messages, prompt=list(messages), odd=Contrary(), odds=[Contrary()])

    asyncio.run(drive())
    run, root = spans(fresh_job)
    assert root["inputs"] == {"messages": [{"role": "user", "content": "2+2?"}]}
    assert set(run["inputs"]) == {"odd", "odds"}


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


class Grudging:
    """An argument that cannot be looked into."""

    __slots__ = ()
    __fields__ = ("a",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not today")


class Unopened(dict[str, Any]):
    """Like a configuration with a missing value."""

    def items(self) -> Any:
        raise KeyError("???")


@pytest.mark.parametrize("reward", [np.float64(0.5), np.float32(0.5), np.array([0.5]), np.array(0.5)])
def test_a_reward_may_come_from_numpy(verl: types.ModuleType, fresh_job: Path, reward: Any) -> None:
    class Loop:
        @verl.rollout_trace_op  # type: ignore[untyped-decorator]
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Output:
            fields = {"turn_scores": np.array([1.0, 2.0]), "reward_extra_info": {"acc": np.array([0.25, 0.5])}}
            return Output([1], [2], [1], reward_score=reward, extra_fields=fields)

    async def drive() -> None:
        with verl.rollout_trace_attr(step=1, name="agent_loop"):
            await Loop().run({}, raw_prompt=[{"role": "user", "content": "2+2?"}], uid="u")

    asyncio.run(drive())
    root = spans(fresh_job)[-1]
    assert (root["attributes"]["reward"], root["outputs"]["reward"], root["attributes"]["uid"]) == (0.5, 0.5, "u")
    assert root["inputs"] == {"messages": [{"role": "user", "content": "2+2?"}]}


ODD = (Grudging, lambda: Unopened(a=1), lambda: "[" * 100_000, lambda: b"x" * 10_000_000)


@pytest.mark.parametrize("make", ODD, ids=["grudging", "unopened", "deep", "large"])
def test_no_argument_costs_a_span(verl: types.ModuleType, fresh_job: Path, make: Callable[[], Any]) -> None:
    odd = make()

    class Loop(type(agent(verl))):  # type: ignore[misc]
        async def _call_tool(self, tool_call: Call, *_: Any) -> tuple[str, float, dict[str, Any]]:
            return "", 0.0, {}

        @verl.rollout_trace_op  # type: ignore[untyped-decorator]
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Output:
            await super()._call_tool(Call("calculator", odd), {}, None)
            return Output([1], [2], [1])

    async def drive() -> None:
        with verl.rollout_trace_attr(step=1, name="agent_loop"):
            await Loop().run({}, raw_prompt=[odd], uid="u", odd=odd)

    asyncio.run(drive())
    *_, tool, run, root = spans(fresh_job)
    assert [span["name"].rpartition(".")[2] for span in (tool, run, root)] == ["tool calculator", "run", "agent_loop"]
    assert root["attributes"]["uid"] == "u"


def test_images_in_a_conversation_are_noted_and_not_kept(verl: types.ModuleType, fresh_job: Path) -> None:
    url = "data:image/png;base64," + "A" * 3_000_000
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "image", "image": {"bytes": b"x" * 3_000_000}}]

    class Loop:
        @verl.rollout_trace_op  # type: ignore[untyped-decorator]
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> str:
            return "y" * 3_000_000

    async def drive() -> None:
        with verl.rollout_trace_attr(step=1, name="agent_loop"):
            await Loop().run({}, raw_prompt=[{"role": "user", "content": parts * 6}])

    asyncio.run(drive())
    run, root = spans(fresh_job)
    shown = root["inputs"]["messages"][0]["content"]
    assert shown[0]["image_url"]["url"] == f"<data:image/png;base64, {len(url)} characters>"
    assert shown[1]["image"]["bytes"] == "<3000000 bytes>"
    assert len(run["outputs"]) < 1_100_000


def test_a_decorator_that_hides_a_coroutine_does_not_end_its_span(verl: types.ModuleType, fresh_job: Path) -> None:
    def hiding(func: Any) -> Any:
        def hidden(*args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

        return hidden

    class Loop:
        async def _run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Output:
            await asyncio.sleep(0.01)
            return Output([1], [2], [1])

        run = hiding(_run)
        run.__name__ = "run"
        run.__qualname__ = "Loop.run"
        run = verl.rollout_trace_op(run)

    tell(verl, Loop())
    run, root = spans(fresh_job)
    assert run["end_ns"] - run["start_ns"] >= 10_000_000
    assert (root["attributes"]["reward"], run["parent_id"]) == (1.0, root["span_id"])


def test_a_judge_behind_the_loop_does_not_change_its_reward(verl: types.ModuleType, fresh_job: Path) -> None:
    class Judge:
        @verl.rollout_trace_op  # type: ignore[untyped-decorator]
        async def run(self, text: str) -> Output:
            return Output([7], [8], [1], reward_score=0.1)

    async def drive() -> None:
        with verl.rollout_trace_attr(step=1, name="agent_loop"):
            output = await agent(verl).run({}, raw_prompt=[], uid="u")
            output.reward_score = 0.9
            await Judge().run("text")

    asyncio.run(drive())
    assert spans(fresh_job)[-1]["attributes"]["reward"] == 0.9
