"""Numbers about what was sampled. Every number is finite, or absent when there was nothing to count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from miles_core.errors import ContractError
from miles_core.types import SampleGroup
from miles_core.votes import CUT, FAILED, all_equal, last_segments, trajectory_rewards, votes

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp (e^20 = 4.85e8), so that one wild token cannot overflow a mean."""


def rollout_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Lengths (true ones, whatever is masked), how samples ended, rewards over votes, and groups without a signal.

    `groups/dead` counts groups whose verdicts are all equal, `groups/no_verdict` those that have none at all.
    """
    samples = [s for g in groups for s in g.samples]
    if not samples:
        return {}
    lengths = np.array([s.num_response_tokens for s in samples])
    rewards = [votes(g.samples, trajectory_rewards(g.samples)) for g in groups]
    values = [np.array(list(r.values())) for r in rewards]
    last = last_segments(samples).values()
    metrics = {
        "samples": len(samples),
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/min": lengths.min(),
        "response_length/empty": np.count_nonzero(lengths == 0),
        "tokens/sampled": sum(np.count_nonzero(s.loss_mask) for s in samples),
        "tokens/total": sum(s.num_tokens for s in samples),
        "truncated": np.mean([s.status in CUT for s in samples]),
        **{f"status/{status}": sum(s.status == status for s in samples) for status in sorted(FAILED)},
        "reward/no_verdict": sum(s.reward is None or s.status in FAILED for s in last),
        "groups/dead": sum(len(v) > 0 and all_equal(v) for v in values),
        "groups/no_verdict": sum(len(v) == 0 for v in values),
        "groups/all_zero": sum(len(v) > 0 and bool((v == 0).all()) for v in values),
        "groups/all_one": sum(len(v) > 0 and bool((v == 1).all()) for v in values),
    }
    metrics |= _spread("reward", np.concatenate(values))
    for name in sorted({name for s in last for name in s.scores}):
        scores = [s.scores[name].value for s in last if name in s.scores]
        metrics |= _spread(f"score/{name}", np.array([v for v in scores if v is not None], dtype=np.float64))
    return {key: float(value) for key, value in metrics.items()}


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    if len(values) == 0:
        return {}
    return {f"{name}/mean": values.mean(), f"{name}/std": values.std(ddof=1) if len(values) > 1 else 0.0}


def logprob_gap(
    rollout_logprobs: Sequence[np.ndarray], trainer_logprobs: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the engine's on the tokens that the engine sampled, in nats.

    With d = trainer - rollout: mean, 95th percentile and maximum of |d|; the estimates of KL(engine || trainer)
    k1 = mean(-d) and k3 = mean(e^d - 1 - d) (Schulman, "Approximating KL divergence"); and how many |d| were clamped.
    Empty when nothing is masked in. Raises ContractError for a value that is not finite.
    """
    if not masks or not any(m.any() for m in masks):
        return {}
    rollout, trainer = (
        np.concatenate([np.asarray(row, dtype=np.float64)[mask] for row, mask in zip(rows, masks, strict=True)])
        for rows in (rollout_logprobs, trainer_logprobs)
    )
    diff = trainer - rollout
    if not np.isfinite(diff).all():
        raise ContractError(f"{np.count_nonzero(~np.isfinite(diff))} of {len(diff)} log-probabilities are not finite")
    size = np.abs(diff)
    clamped = np.clip(diff, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mean_abs": float(size.mean()),
        "p95_abs": float(np.quantile(size, 0.95)),
        "max_abs": float(size.max()),
        "kl_k1": float(-diff.mean()),
        "kl_k3": float(np.mean(np.expm1(clamped) - clamped)),
        "clamped": float(np.count_nonzero(size > MAX_LOG_RATIO)),
    }


def value_metrics(columns: Mapping[str, Sequence[np.ndarray]], masks: Sequence[np.ndarray]) -> dict[str, float]:
    """How well a critic's values foretold the returns, over the trainable tokens of a step: means of both, and the
    explained variance 1 - Var(returns - values) / Var(returns), which is 1 for a perfect critic and 0 for a constant one;
    it is absent where all returns are equal. Empty without the columns "old_values" and "returns"."""
    if "old_values" not in columns or "returns" not in columns or not any(m.any() for m in masks):
        return {}
    values, returns = (
        np.concatenate([np.asarray(row, dtype=np.float64)[m] for row, m in zip(columns[name], masks, strict=True)])
        for name in ("old_values", "returns")
    )
    found = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
    if not all_equal(returns):
        found["critic/explained_variance"] = float(1 - np.var(returns - values) / np.var(returns))
    return found
