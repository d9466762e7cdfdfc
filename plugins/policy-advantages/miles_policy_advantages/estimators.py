"""The arithmetic of the advantages; statistics are float64, results float32.

A trajectory is one vote and counts once, however many segments it has; one without verdict is left out everywhere. Shape
letters: G votes of a group; M trainable tokens of a trajectory, those of all its segments in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from miles_core import AdvantageInputs, AdvantageOutput
from miles_core.advantages import (
    Trajectory,
    discounted_sums,
    gather,
    group_normalised,
    group_values,
    kl_rows,
    per_group,
    refuse_chain,
    require_chain,
    scatter,
    spread,
    token_mean,
    trajectories,
)
from miles_core.errors import ContractError
from miles_core.types import Metric
from miles_core.votes import all_equal


def one(value: float) -> Metric:
    """A number of the whole batch as a metric."""
    return (float(value), 1.0, "mean")


def centred(rewards: np.ndarray) -> np.ndarray:
    """r - mean over one group [G]; exactly 0 when all are equal."""
    return group_normalised(rewards, std=False, eps=0.0)


# --- One number per trajectory ---------------------------------------------------------------------------------------


def dr_grpo(inputs: AdvantageInputs) -> AdvantageOutput:
    """A = r - mean(group), without a standard deviation. Dr. GRPO, arXiv:2503.20783."""
    return per_group(inputs, "dr-grpo", centred)


def reinforce_pp_baseline(inputs: AdvantageInputs, eps: float) -> AdvantageOutput:
    """A = (r - mean(group)) / (std over the batch of those differences + eps). REINFORCE++ with baseline, arXiv:2501.03262.

    The standard deviation is over votes, ddof=1. The mean over the batch that the paper subtracts as well is 0 over votes,
    whatever the rewards are, and is not subtracted: equal rewards in a group give exactly 0.
    """
    refuse_chain(inputs, "reinforce-pp-baseline")
    return _batch_scaled(inputs, group_values(inputs, "reinforce-pp-baseline", centred), eps)


def _batch_scaled(inputs: AdvantageInputs, values: Mapping[str, float], eps: float, **metrics: Metric) -> AdvantageOutput:
    """`values` by trajectory, which sum to 0, over their standard deviation; all equal, they are 0."""
    array = np.array(list(values.values()), dtype=np.float64)
    std = 0.0 if all_equal(array) else float(array.std(ddof=1))
    scaled = array / (std + eps) if std > 0 else np.zeros(len(array))
    return spread(inputs, dict(zip(values, scaled.tolist(), strict=True)), std=one(std), **metrics)


def remax(inputs: AdvantageInputs) -> AdvantageOutput:
    """A = r - r(greedy answer to the same prompt). ReMax, arXiv:2310.10505.

    A group whose greedy answer failed or has no verdict gets no advantage and is counted in `no_baseline`. Raises
    ContractError when no group of the step has one: then it is not a sample that failed.
    """
    refuse_chain(inputs, "remax")
    known = [b for b in inputs.baselines if b is not None]
    if not known:
        raise ContractError(
            f'advantage "remax" compares with a greedy answer, and no group of {len(inputs.groups)} has one with a verdict',
            "a rollout makes one where `RolloutContext.baseline` is set, and the rewards judge it like a sample",
        )
    values: dict[str, float] = {}
    for members, baseline in zip(inputs.groups, inputs.baselines, strict=True):
        if baseline is not None:
            votes = (t for t in trajectories(inputs, "remax", members) if t.reward is not None)
            values |= {t.id: t.reward - baseline for t in votes}
    missing = float(len(inputs.baselines) - len(known))
    return spread(
        inputs, values, baseline=(float(sum(known)), float(len(known)), "mean"), no_baseline=(missing, 1.0, "sum")
    )


def opo(inputs: AdvantageInputs) -> AdvantageOutput:
    """A = r - b, b = sum(l r) / sum(l) over the group, l the number of sampled tokens. OPO, arXiv:2505.23585.

    Sampled tokens count whether or not they are trained, so that masking an answer that was cut does not move the baseline
    of the others. Exactly 0 when all rewards are equal.
    """
    refuse_chain(inputs, "opo")
    values: dict[str, float] = {}
    baselines = []
    for members in inputs.groups:
        votes = [t for t in trajectories(inputs, "opo", members) if t.reward is not None]
        rewards = np.array([t.reward for t in votes], dtype=np.float64)
        lengths = np.array([sum(np.count_nonzero(inputs.samples[i].loss_mask) for i in t.members) for t in votes])
        if all_equal(rewards) or not lengths.any():
            advantages = np.zeros(len(rewards))
        else:
            baselines.append(float(lengths @ rewards / lengths.sum()))
            advantages = rewards - baselines[-1]
        values.update(zip((t.id for t in votes), advantages.tolist(), strict=True))
    return spread(inputs, values, baseline=(float(sum(baselines)), float(len(baselines)), "mean"))


def gdpo(inputs: AdvantageInputs, weights: Mapping[str, float], eps: float) -> AdvantageOutput:
    """Each reward k normalised by itself in each group, A_k = (r_k - mean) / (std + eps); then A = sum(w_k A_k), over its
    standard deviation in the batch plus eps. GDPO, arXiv:2601.05242. Standard deviations have ddof=1.

    A score without verdict is left out of the statistics of its reward and adds 0; without a verdict on the whole, a
    trajectory is left out of all. The mean over the batch that the paper subtracts is 0. Equal scores give exactly 0.
    Raises ContractError naming the sample when a score of `weights` is missing.
    """
    refuse_chain(inputs, "gdpo")
    values: dict[str, float] = {}
    dead = dict.fromkeys(weights, 0)
    for members in inputs.groups:
        votes = [t for t in trajectories(inputs, "gdpo", members) if t.reward is not None]
        values |= dict.fromkeys((t.id for t in votes), 0.0)
        for name, weight in weights.items():
            scored = {t.id: score for t in votes if (score := _score(inputs, t, name)) is not None}
            rewards = np.array(list(scored.values()), dtype=np.float64)
            dead[name] += all_equal(rewards)
            for key, value in zip(scored, group_normalised(rewards, True, eps).tolist(), strict=True):
                values[key] += weight * value
    groups = float(len(inputs.groups))
    metrics: dict[str, Metric] = {f"equal/{name}": (float(count), groups, "mean") for name, count in dead.items()}
    return _batch_scaled(inputs, values, eps, **metrics)


def _score(inputs: AdvantageInputs, t: Trajectory, name: str) -> float | None:
    scores = inputs.samples[t.members[-1]].scores
    if name not in scores:
        raise ContractError(
            f'advantage "gdpo" weighs a reward "{name}", and sample {t.id} was not judged by it',
            f"its scores: {', '.join(sorted(scores)) or 'none'}",
        )
    return scores[name].value


# --- One number per token --------------------------------------------------------------------------------------------


def reinforce_pp(inputs: AdvantageInputs, kl_coef: float, over: str, eps: float) -> AdvantageOutput:
    """A[t] = r - kl_coef * sum of (old_logprobs - reference_logprobs) from t to the end, then (A - mean) / (std + eps) over
    the whole batch. REINFORCE++, arXiv:2501.03262.

    `over` says what is counted once: "tokens" as in the paper, where A is defined for each token, or "trajectories", each
    the mean of its tokens, those that are not trained included. ddof=1. All equal, the advantages are exactly 0.
    """
    refuse_chain(inputs, "reinforce-pp")
    found = [t for t in trajectories(inputs, "reinforce-pp") if t.reward is not None]
    metrics: dict[str, Metric] = {}
    if kl_coef:
        kl = kl_rows(inputs, found, "reinforce-pp")
        metrics["kl"] = token_mean(kl)
        rows = [t.reward - kl_coef * row for t, row in zip(found, discounted_sums(kl, 1.0), strict=True)]
    else:
        counts = [sum(np.count_nonzero(inputs.mask[i]) for i in t.members) for t in found]
        rows = [np.full(count, t.reward) for t, count in zip(found, counts, strict=True)]
    if over == "tokens":
        values = np.concatenate(rows) if rows else np.zeros(0)
        weights, count = np.ones(len(values)), len(values)
    else:
        whole = [row if len(row) else np.array([t.reward]) for t, row in zip(found, rows, strict=True)]
        values = np.concatenate(whole) if whole else np.zeros(0)
        weights, count = np.concatenate([np.full(len(row), 1 / len(row)) for row in whole] or [values]), len(whole)
    mean, std = _moments(values, weights, count)
    scaled = [(row - mean) / (std + eps) if std > 0 else np.zeros(len(row)) for row in rows]
    return AdvantageOutput(
        advantages=scatter(inputs, found, scaled), metrics={"mean": one(mean), "std": one(std), **metrics}
    )


def _moments(values: np.ndarray, weights: np.ndarray, count: int) -> tuple[float, float]:
    """Weighted mean and standard deviation; `weights` sum to `count`, which loses 1 as ddof. 0 for the standard deviation
    means that there is nothing to divide by: one value, or all equal."""
    if count == 0:
        return 0.0, 0.0
    mean = float(weights @ values) / count
    if count == 1 or all_equal(values):
        return mean, 0.0
    return mean, float(np.sqrt(weights @ (values - mean) ** 2 / (count - 1)))


def on_policy_distillation(inputs: AdvantageInputs, coef: float, gamma: float, clip: float | None) -> AdvantageOutput:
    """A[t] = before[t] - coef * sum over i >= t of gamma^(i-t) (old_logprobs - teacher_logprobs)[i].

    The difference at a sampled token estimates the reverse KL, KL(policy || teacher), without bias (arXiv:2306.08543,
    arXiv:2306.13649); gamma = 0 rates each token by its own difference alone. `before` are the advantages of the chain so
    far, or 0. `clip` bounds each difference.
    """
    found = trajectories(inputs, "on-policy-distillation")
    old, teacher = (gather(inputs, found, "on-policy-distillation", c) for c in ("old_logprobs", "teacher_logprobs"))
    differences = [a - b for a, b in zip(old, teacher, strict=True)]
    metrics: dict[str, Metric] = {"reverse_kl": token_mean(differences)}
    if clip is not None:
        metrics["clipped"] = (float(sum(np.count_nonzero(np.abs(row) > clip) for row in differences)), 1.0, "sum")
        differences = [row.clip(-clip, clip) for row in differences]
    values: Sequence[np.ndarray] = [-coef * row for row in discounted_sums(differences, gamma)]
    if inputs.advantages is not None:
        before = gather(inputs, found, "on-policy-distillation", "advantages", inputs.advantages)
        values = [a + b for a, b in zip(before, values, strict=True)]
    return AdvantageOutput(advantages=scatter(inputs, found, values), metrics=metrics)


def whiten(inputs: AdvantageInputs, shift: bool, eps: float) -> AdvantageOutput:
    """(A - mean) / (std + eps) over all trainable tokens of the batch, ddof=1; without `shift`, A / (std + eps).

    As PPO implementations do (arXiv:2005.12729, arXiv:2006.05990). Where all advantages are equal there is no
    spread to divide by: they become exactly 0, and without `shift` stay as they are.
    """
    before = require_chain(inputs, "whiten")
    found = trajectories(inputs, "whiten")
    rows = gather(inputs, found, "whiten", "advantages", before)
    values = np.concatenate(rows) if rows else np.zeros(0)
    mean = float(values.mean()) if len(values) else 0.0
    std = 0.0 if all_equal(values) else float(values.std(ddof=1))
    metrics = {"mean": one(mean), "std": one(std)} if len(values) else {}
    if std > 0:
        away = mean if shift else 0.0
        rows = [(row - away) / (std + eps) for row in rows]
    elif shift:
        rows = [np.zeros(len(row)) for row in rows]
    return AdvantageOutput(advantages=scatter(inputs, found, rows), metrics=metrics)
