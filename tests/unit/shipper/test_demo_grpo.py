"""The demo's training is real: it learns, it is repeatable, its gradient is the gradient."""

import numpy as np
import pytest

from verl_shipper.demo import grpo

SEED = 7


def trained(
    steps: int, seed: int = SEED, config: grpo.Config | None = None
) -> tuple[grpo.Learner, list[dict[str, float]]]:
    config = config or grpo.Config()
    rng = np.random.default_rng(seed)
    learner = grpo.start(config, rng)
    history = []
    for _ in range(steps):
        learner, _, metrics = grpo.train_step(config, learner, rng)
        history.append(metrics)
    return learner, history


def rollouts_of(prompts: list[tuple[int, int]], answers: list[str]) -> tuple[grpo.Ints, grpo.Ints, grpo.Bools]:
    """Rollouts with given answers; "." is the end sign, what follows it is masked."""
    tokens = np.full((len(answers), grpo.RESPONSE_TOKENS_MAX), grpo.END)
    mask = np.zeros(tokens.shape, dtype=np.bool_)
    for row, answer in enumerate(answers):
        for place, sign in enumerate(answer):
            tokens[row, place] = grpo.END if sign == "." else int(sign)
            mask[row, place] = True
    return np.array(prompts), tokens, mask


def test_rewards_clearly_rise_within_two_hundred_steps() -> None:
    learner, history = trained(steps=200)

    rewards = [metrics["critic/rewards/mean"] for metrics in history]
    assert np.mean(rewards[:10]) < 0.2
    assert np.mean(rewards[-10:]) > 0.6
    _, validation = grpo.validate(learner)
    assert validation["val-aux/digit_sum_seen/acc/mean@1"] > 0.6


def test_equal_seeds_give_equal_runs_and_other_seeds_do_not() -> None:
    _, first = trained(steps=3)
    _, again = trained(steps=3)
    _, other = trained(steps=3, seed=SEED + 1)

    assert first == again
    assert first != other


def test_a_step_leaves_the_learner_it_was_given_as_it_was() -> None:
    config, rng = grpo.Config(), np.random.default_rng(SEED)
    learner = grpo.start(config, rng)
    before = [array.copy() for array in learner.policy.arrays()]

    grpo.train_step(config, learner, rng)

    assert all(np.array_equal(a, b) for a, b in zip(before, learner.policy.arrays(), strict=True))


def test_every_metric_of_a_step_is_a_finite_number() -> None:
    _, history = trained(steps=2)

    for metrics in history:
        assert {"actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm"} <= set(metrics)
        assert {"critic/rewards/mean", "critic/rewards/max", "critic/rewards/min"} <= set(metrics)
        assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("prompt", "answer", "reward", "is_correct"),
    [
        ((7, 8), "15.", 1.0, True),
        ((2, 3), "5.", 1.0, True),
        ((7, 8), "14.", 0.1 + 0.15, False),
        ((7, 8), "1515", 0.3, False),
        ((7, 8), "15", 0.3, False),
        ((2, 3), "50.", 0.1 + 0.3, False),
        ((0, 0), ".", 0.1, False),
        ((9, 9), "9999", 0.0, False),
    ],
)
def test_the_reward_pays_for_ending_for_right_digits_and_for_the_whole_answer(
    prompt: tuple[int, int], answer: str, reward: float, is_correct: bool
) -> None:
    rewards, correct = grpo.score(*rollouts_of([prompt], [answer]))

    assert rewards[0] == pytest.approx(reward)
    assert bool(correct[0]) is is_correct


def test_advantages_have_mean_zero_in_each_group_and_are_zero_where_all_are_equal() -> None:
    advantages = grpo.group_advantages(np.array([0.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5]), group=4)

    assert advantages[:4] == pytest.approx([-1.0, 1.0, -1.0, 1.0], abs=1e-4)
    assert advantages[4:] == pytest.approx([0.0] * 4)


def test_no_prompt_is_both_trained_and_held_out() -> None:
    learner = grpo.start(grpo.Config(), np.random.default_rng(SEED))

    trained_on = {tuple(prompt) for prompt in learner.train_prompts}
    held_out = {tuple(prompt) for prompt in learner.held_out_prompts}

    assert len(held_out) == grpo.Config().held_out_prompts
    assert len(trained_on | held_out) == 100


def test_the_gradient_agrees_with_finite_differences_of_the_loss() -> None:
    config = grpo.Config(hidden_units=8, entropy_coefficient=0.1, kl_coefficient=0.5)
    learner, _ = trained(steps=3, config=config)
    rng = np.random.default_rng(SEED)
    rollouts = grpo.sample(learner.policy, np.repeat(learner.train_prompts[:4], 4, axis=0), rng)
    advantages = rng.normal(size=16)
    learner, _, _ = grpo.train_step(config, learner, rng)  # away from the rollouts' policy: ratios are not 1

    def loss() -> float:
        _, told = grpo.policy_gradient(config, learner, rollouts, advantages)
        entropy = config.entropy_coefficient * told["actor/entropy"]
        return told["actor/pg_loss"] - entropy + config.kl_coefficient * told["actor/kl_loss"]

    gradient, told = grpo.policy_gradient(config, learner, rollouts, advantages)
    assert told["actor/pg_clipfrac"] < 1.0
    for weight, slope in zip(learner.policy.arrays(), gradient.arrays(), strict=True):
        for index in [tuple(rng.integers(size) for size in weight.shape) for _ in range(5)]:
            kept, difference = weight[index], 1e-6
            weight[index] = kept + difference
            above = loss()
            weight[index] = kept - difference
            below = loss()
            weight[index] = kept
            assert slope[index] == pytest.approx((above - below) / (2 * difference), rel=1e-3, abs=1e-6)
