"""Rollouts that are not as one expects: loops in loops, odd arguments and answers, images, NumPy, hidden coroutines."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unit.client.verl.rollouts import Call, Output, Turn, agent, spans, tell, verl

__all__ = ["verl"]  # a fixture


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
