"""A policy of some thousand weights learns to add two digits, by GRPO as verl does it, in NumPy alone.

    prompt    two digits, "7+8="
    response  digits one by one, then an end sign: "1" "5" "."           at most RESPONSE_TOKENS_MAX tokens
    reward    0.1 ended, 0.3 x the share of digits in their right place, 0.6 the whole answer right

One step: draw prompts, sample a group of responses for each, score them, normalise the rewards within the group (that
is the advantage), then a few epochs of the clipped policy gradient with an entropy bonus and a KL penalty towards the
untrained policy. Some sums are held out of training and seen in validation only.

Promises: everything is a function of its arguments, equal seeds give equal runs; no file, no clock, no client.
Must not know: who logs this. On failure: whatever NumPy raises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

END = 10  # the token behind the last digit
NONE_YET = 11  # stands in for the token before the first
TOKENS = 11  # ten digits and the end
RESPONSE_TOKENS_MAX = 4  # "18." needs three; one more leaves room for being wrong
LAMPS = 9  # a digit lights as many lamps as it counts; both shine on the same row, so 7+8 looks like 8+7
FEATURES = LAMPS + RESPONSE_TOKENS_MAX + TOKENS + 1  # digits, position, token before


@dataclass(frozen=True, slots=True)
class Config:
    """What a run is made of; all of it is logged as the run's configuration."""

    prompts_per_step: int = 32
    rollouts_per_prompt: int = 8
    hidden_units: int = 64
    epochs_per_step: int = 2
    learning_rate: float = 0.02
    clip_ratio: float = 0.2
    kl_coefficient: float = 0.001
    entropy_coefficient: float = 0.15  # much: with less it settles early on answers that are half right
    grad_norm_max: float = 1.0
    held_out_prompts: int = 20


@dataclass(frozen=True, slots=True)
class Weights:
    """The policy, one hidden layer. Also the shape of its gradient and of Adam's two moments."""

    into: Floats
    into_bias: Floats
    out: Floats
    out_bias: Floats

    def arrays(self) -> tuple[Floats, ...]:
        return self.into, self.into_bias, self.out, self.out_bias


@dataclass(frozen=True, slots=True)
class Learner:
    """Everything that changes from step to step, and the two sets of prompts."""

    policy: Weights
    reference: Weights
    mean: Weights
    square: Weights
    updates: int
    train_prompts: Ints
    held_out_prompts: Ints


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Sampled responses, one row each; `mask` holds for the tokens up to and with the end sign."""

    prompts: Ints
    tokens: Ints
    mask: Bools
    log_probs: Floats
    rewards: Floats
    correct: Bools

    def lengths(self) -> Ints:
        lengths: Ints = self.mask.sum(axis=1)
        return lengths


# --- the policy ---------------------------------------------------------------------------------------------


def start(config: Config, rng: np.random.Generator) -> Learner:
    """An untrained learner; `rng` also decides which sums are held out."""
    hidden = config.hidden_units
    policy = Weights(
        into=rng.normal(0.0, 0.5, (FEATURES, hidden)),
        into_bias=np.zeros(hidden),
        out=rng.normal(0.0, 0.01, (hidden, TOKENS)),  # near zero: the first answers are uniform noise
        out_bias=np.zeros(TOKENS),
    )
    zero = Weights(*(np.zeros_like(array) for array in policy.arrays()))
    sums = rng.permutation(np.array([(left, right) for left in range(10) for right in range(10)]))
    held_out = config.held_out_prompts
    return Learner(policy, policy, zero, zero, 0, sums[held_out:], sums[:held_out])


def features(prompts: Ints, tokens: Ints) -> Floats:
    """One row for each token of each response: what the policy sees before it chooses that token."""
    count, length = tokens.shape
    before = np.concatenate([np.full((count, 1), NONE_YET), tokens[:, :-1]], axis=1)
    seen = np.zeros((count, length, FEATURES))
    row, place = np.arange(count)[:, None], np.arange(length)[None, :]
    seen[:, :, :LAMPS] = (np.arange(LAMPS) < prompts[:, :, None]).sum(axis=1)[:, None]
    seen[row, place, LAMPS + place] = 1.0
    seen[row, place, LAMPS + RESPONSE_TOKENS_MAX + before] = 1.0
    return seen


def forward(weights: Weights, seen: Floats) -> tuple[Floats, Floats]:
    """Log-probabilities of all tokens, and the hidden layer that the gradient needs."""
    hidden = np.tanh(seen @ weights.into + weights.into_bias)
    logits = hidden @ weights.out + weights.out_bias
    logits -= logits.max(axis=-1, keepdims=True)
    log_probs: Floats = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return log_probs, hidden


def sample(weights: Weights, prompts: Ints, rng: np.random.Generator | None) -> Rollouts:
    """One response for each row of `prompts`; without `rng` the likeliest token each time."""
    count = len(prompts)
    tokens = np.full((count, RESPONSE_TOKENS_MAX), END)
    mask = np.zeros((count, RESPONSE_TOKENS_MAX), dtype=np.bool_)
    log_probs = np.zeros((count, RESPONSE_TOKENS_MAX))
    running = np.ones(count, dtype=np.bool_)
    for place in range(RESPONSE_TOKENS_MAX):
        choices, _ = forward(weights, features(prompts, tokens)[:, place])
        if rng is not None:
            noise = rng.gumbel(size=choices.shape)  # the largest of log p + Gumbel noise is a draw from p
            chosen = (choices + noise).argmax(axis=1)
        else:
            chosen = choices.argmax(axis=1)
        tokens[running, place] = chosen[running]
        log_probs[:, place] = np.take_along_axis(choices, chosen[:, None], axis=1)[:, 0]
        mask[:, place] = running
        running &= chosen != END
    rewards, correct = score(prompts, tokens, mask)
    return Rollouts(prompts, tokens, mask, log_probs * mask, rewards, correct)


# --- the reward ---------------------------------------------------------------------------------------------


def score(prompts: Ints, tokens: Ints, mask: Bools) -> tuple[Floats, Bools]:
    """Reward of each response within 0 .. 1, and whether its answer is right to the letter."""
    sums = prompts.sum(axis=1)
    two_digits = sums >= 10
    right = np.full_like(tokens, END)
    right[:, 0] = np.where(two_digits, sums // 10, sums)
    right[:, 1] = np.where(two_digits, sums % 10, END)
    is_digit = right != END
    hits = (tokens == right) & mask & is_digit
    share = hits.sum(axis=1) / is_digit.sum(axis=1)
    ended = (np.where(mask, tokens, -1) == END).any(axis=1)
    correct = (tokens == right).all(axis=1) & ended
    rewards = 0.1 * ended + 0.3 * share + 0.6 * correct
    return rewards, correct


def question_text(prompt: Ints) -> str:
    """What the policy is asked, for people."""
    return f"{prompt[0]}+{prompt[1]}="


def answer_text(tokens: Ints, mask: Bools) -> str:
    """What the policy said, for people; "." is the end sign."""
    return "".join("." if token == END else str(token) for token in tokens[mask])


# --- learning -----------------------------------------------------------------------------------------------


def train_step(
    config: Config, learner: Learner, rng: np.random.Generator
) -> tuple[Learner, Rollouts, dict[str, float]]:
    """One GRPO step: the learner after it, the rollouts it learned from, and its metrics under verl's names."""
    group = config.rollouts_per_prompt
    drawn = rng.choice(len(learner.train_prompts), config.prompts_per_step, replace=False)
    rollouts = sample(learner.policy, np.repeat(learner.train_prompts[drawn], group, axis=0), rng)
    advantages = group_advantages(rollouts.rewards, group)
    metrics: dict[str, float] = {}
    for _ in range(config.epochs_per_step):
        gradient, metrics = policy_gradient(config, learner, rollouts, advantages)
        norm = float(np.sqrt(sum((array**2).sum() for array in gradient.arrays())))
        shrink = min(1.0, config.grad_norm_max / (norm + 1e-12))
        gradient = Weights(*(array * shrink for array in gradient.arrays()))
        learner = adam(learner, gradient, config.learning_rate)
        metrics["actor/grad_norm"] = norm
    metrics["actor/lr"] = config.learning_rate
    return learner, rollouts, metrics | batch_metrics(rollouts, advantages)


def group_advantages(rewards: Floats, group: int) -> Floats:
    """Rewards of each group of `group` neighbours, shifted to mean 0 and scaled to deviation 1."""
    groups = rewards.reshape(-1, group)
    centred = groups - groups.mean(axis=1, keepdims=True)
    flat: Floats = (centred / (groups.std(axis=1, keepdims=True) + 1e-6)).reshape(-1)
    return flat


def policy_gradient(
    config: Config, learner: Learner, rollouts: Rollouts, advantages: Floats
) -> tuple[Weights, dict[str, float]]:
    """Gradient of the whole loss over all response tokens, with the loss's parts under verl's names."""
    seen = features(rollouts.prompts, rollouts.tokens)[rollouts.mask]
    chosen = rollouts.tokens[rollouts.mask]
    old = rollouts.log_probs[rollouts.mask]
    advantage = np.repeat(advantages, rollouts.lengths())
    count, row = len(chosen), np.arange(len(chosen))
    choices, hidden = forward(learner.policy, seen)
    now = choices[row, chosen]
    reference = forward(learner.reference, seen)[0][row, chosen]

    ratio = np.exp(now - old)
    plain = -advantage * ratio
    clipped = -advantage * np.clip(ratio, 1.0 - config.clip_ratio, 1.0 + config.clip_ratio)
    is_clipped = clipped > plain  # the clipped loss is a constant: no gradient
    away = reference - now
    kl = np.exp(away) - away - 1.0  # low-variance estimate, never negative
    probabilities = np.exp(choices)
    entropy = -(probabilities * choices).sum(axis=1)

    by_log_prob = np.where(is_clipped, 0.0, plain) + config.kl_coefficient * (1.0 - np.exp(away))
    by_logit = -by_log_prob[:, None] * probabilities
    by_logit[row, chosen] += by_log_prob
    by_logit += config.entropy_coefficient * probabilities * (choices + entropy[:, None])
    gradient = backward(learner.policy, seen, hidden, by_logit / count)
    return gradient, {
        "actor/pg_loss": float(np.maximum(plain, clipped).mean()),
        "actor/pg_clipfrac": float(is_clipped.mean()),
        "actor/ppo_kl": float((old - now).mean()),
        "actor/kl_loss": float(kl.mean()),
        "actor/kl_coef": config.kl_coefficient,
        "actor/entropy": float(entropy.mean()),
    }


def backward(weights: Weights, seen: Floats, hidden: Floats, by_logit: Floats) -> Weights:
    """The chain rule through the one hidden layer."""
    by_hidden = (by_logit @ weights.out.T) * (1.0 - hidden**2)
    return Weights(seen.T @ by_hidden, by_hidden.sum(axis=0), hidden.T @ by_logit, by_logit.sum(axis=0))


def adam(learner: Learner, gradient: Weights, learning_rate: float) -> Learner:
    """One update, with the usual decay rates 0.9 and 0.999."""
    updates = learner.updates + 1
    means, squares, weights = [], [], []
    parts = zip(
        learner.policy.arrays(),
        learner.mean.arrays(),
        learner.square.arrays(),
        gradient.arrays(),
        strict=True,
    )
    for weight, mean, square, slope in parts:
        means.append(0.9 * mean + 0.1 * slope)
        squares.append(0.999 * square + 0.001 * slope**2)
        scale = np.sqrt(squares[-1] / (1.0 - 0.999**updates)) + 1e-8
        weights.append(weight - learning_rate * means[-1] / (1.0 - 0.9**updates) / scale)
    return replace(learner, policy=Weights(*weights), mean=Weights(*means), square=Weights(*squares), updates=updates)


# --- what is told -------------------------------------------------------------------------------------------


def batch_metrics(rollouts: Rollouts, advantages: Floats) -> dict[str, float]:
    """Rewards, advantages and lengths of one batch under verl's names."""
    metrics = {"response_length/clip_ratio": float((~_ended(rollouts)).mean())}
    told = {
        "critic/score": rollouts.rewards,
        "critic/rewards": rollouts.rewards,
        "critic/advantages": advantages,
        "response_length": rollouts.lengths().astype(np.float64),
    }
    for name, values in told.items():
        metrics[f"{name}/mean"] = float(values.mean())
        metrics[f"{name}/max"] = float(values.max())
        metrics[f"{name}/min"] = float(values.min())
    return metrics


def validate(learner: Learner) -> tuple[Rollouts, dict[str, float]]:
    """Greedy answers to the held-out sums, and the metrics of all sums under verl's names."""
    held_out = sample(learner.policy, learner.held_out_prompts, None)
    trained = sample(learner.policy, learner.train_prompts, None)
    return held_out, {
        "val-core/digit_sum/acc/mean@1": float(held_out.correct.mean()),
        "val-core/digit_sum/reward/mean@1": float(held_out.rewards.mean()),
        "val-aux/digit_sum_seen/acc/mean@1": float(trained.correct.mean()),
        "val-aux/digit_sum/response_length/mean@1": float(held_out.lengths().mean()),
    }


def _ended(rollouts: Rollouts) -> Bools:
    ended: Bools = ((rollouts.tokens == END) & rollouts.mask).any(axis=1)
    return ended
