"""The demo's trainer: a program as a user would write it. Trains the policy of grpo.py and logs all of it.

    python -m verl_shipper.demo.train [--steps 300] [--seed 7] [--project demo] [--experiment grpo-digits]

Metrics each step under verl's names; every VALIDATE_EVERY steps a validation with a table of samples, and a few
rollouts told as spans. Whether a daemon listens makes no difference: what is logged waits in the spool.

Promises: exit code 0 after a whole training, 2 without NumPy. Must not know: daemon, trackers.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from verl_shipper_client import Client

try:
    import numpy as np

    from verl_shipper.demo import grpo
except ModuleNotFoundError as missing:
    if missing.name != "numpy":
        raise
    sys.stderr.write("verl-shipper: the demo trains with NumPy, which is missing; pip install 'verl-shipper[demo]'\n")
    sys.exit(2)

if TYPE_CHECKING:
    from collections.abc import Sequence

VALIDATE_EVERY = 50
SAMPLES_SHOWN = 20
ROLLOUTS_TRACED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print a line now and then."""
    options = _options(arguments)
    config = grpo.Config()
    told = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor": asdict(config),
        "data": {"task": "digit_sum", "response_tokens_max": grpo.RESPONSE_TOKENS_MAX},
        "trainer": {"steps": options.steps, "seed": options.seed, "test_freq": VALIDATE_EVERY},
    }
    with Client(options.project, options.experiment, config=told) as client:
        print(f"training {options.steps} steps as run {client.run_id}", flush=True)  # noqa: T201 - a program of its own
        train(client, config, options.steps, options.seed, options.experiment)
        client.finish(exit_code=0)
        print(f"run id: {client.run_id}", flush=True)  # noqa: T201 - same
    return 0


def train(client: Client, config: grpo.Config, steps: int, seed: int, experiment: str) -> None:
    """The loop. Every random number of the training comes from `seed`; the traced rollouts draw their own."""
    rng = np.random.default_rng(seed)
    trace_rng = np.random.default_rng(seed + 1)
    learner = grpo.start(config, rng)
    for step in range(1, steps + 1):
        begun_s = time.perf_counter()
        learner, rollouts, metrics = grpo.train_step(config, learner, rng)
        if step % VALIDATE_EVERY == 0 or step == steps:
            answers, validation = grpo.validate(learner)
            metrics |= validation
            client.log_generations(samples(answers), step)
            for index in range(ROLLOUTS_TRACED):
                trace_rollout(client, learner, trace_rng, step, index, experiment)
        step_s = time.perf_counter() - begun_s
        tokens = int(rollouts.lengths().sum())
        metrics |= {
            "timing_s/step": step_s,
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / step_s,
            "training/global_step": step,
        }
        client.log(metrics, step)
        if step % VALIDATE_EVERY == 0 or step == steps:
            _print_progress(step, metrics)


def samples(answers: grpo.Rollouts) -> list[tuple[str, str, float]]:
    """The first SAMPLES_SHOWN answers as rows of (input, output, score)."""
    rows = zip(answers.prompts, answers.tokens, answers.mask, answers.rewards, strict=True)
    told = [
        (grpo.question_text(prompt), grpo.answer_text(tokens, mask), float(reward))
        for prompt, tokens, mask, reward in rows
    ]
    return told[:SAMPLES_SHOWN]


def trace_rollout(
    client: Client, learner: grpo.Learner, rng: np.random.Generator, step: int, index: int, experiment: str
) -> None:
    """One rollout told as spans: the question, a calculator as the tool that knows, the policy's answer."""
    attributes = {
        "step": step,
        "sample_index": index,
        "rollout_n": 0,
        "validate": False,
        "experiment_name": experiment,
    }
    with client.span("rollout_trace", attributes=attributes) as root:
        with client.span("question", inputs={"sample_index": index}, attributes=attributes) as span:
            prompt = learner.train_prompts[rng.integers(len(learner.train_prompts))]
            question = grpo.question_text(prompt)
            span.set_outputs(question)
        root.set_inputs({"question": question})
        with client.span("tool_call.calculator", inputs={"expression": question}, attributes=attributes) as span:
            expected = str(int(prompt.sum()))
            span.set_outputs(expected)
        with client.span("answer", inputs=question, attributes=attributes) as span:
            rollout = grpo.sample(learner.policy, prompt[None], rng)
            answer = grpo.answer_text(rollout.tokens[0], rollout.mask[0])
            span.set_outputs(answer)
        root.set_outputs({"answer": answer, "expected": expected, "reward": float(rollout.rewards[0])})


def _print_progress(step: int, metrics: dict[str, float]) -> None:
    reward, entropy = metrics["critic/rewards/mean"], metrics["actor/entropy"]
    seen, held_out = metrics["val-aux/digit_sum_seen/acc/mean@1"], metrics["val-core/digit_sum/acc/mean@1"]
    line = (
        f"step {step:4d}  reward {reward:.2f}  entropy {entropy:.2f}  right: seen {seen:.0%}, held out {held_out:.0%}"
    )
    print(line, flush=True)  # noqa: T201 - a program of its own


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m verl_shipper.demo.train", description="Train the toy policy.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--project", default="demo")
    parser.add_argument("--experiment", default="grpo-digits")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
