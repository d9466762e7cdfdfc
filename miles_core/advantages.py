"""What advantages share: trajectories as votes, columns over trainable tokens, and the order of a chain.

For the core's advantages and for those of plugins; statistics are float64, what is returned is float32. Shape letters: T
tokens of a sample; M trainable tokens of a trajectory, those of all its segments in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_core.component import Environment
from miles_core.errors import ConfigError, ContractError
from miles_core.types import AdvantageInputs, AdvantageOutput, Metric
from miles_core.votes import all_equal, sample_id

Rule = Callable[[np.ndarray], np.ndarray]
"""Rewards float64[G] of the votes of one group to their advantages float64[G]."""


@dataclass(slots=True, frozen=True)
class Trajectory:
    """One vote. `members` are the indices of its segments in `inputs.samples`, in order; `reward` is None where there is
    no verdict."""

    id: str
    members: tuple[int, ...]
    reward: float | None


def trajectories(inputs: AdvantageInputs, name: str, members: Iterable[int] | None = None) -> list[Trajectory]:
    """The trajectories of the whole batch, or of the samples `members`, in order of first appearance.

    Raises ContractError naming advantage `name` and the sample for a reward that is NaN or infinite.
    """
    samples, rewards = inputs.samples, inputs.rewards
    segments: dict[str, list[int]] = {}
    for i in range(len(samples)) if members is None else members:
        segments.setdefault(samples[i].trajectory_id, []).append(i)
    found = []
    for key, indices in segments.items():
        indices.sort(key=lambda i: samples[i].segment)
        reward = rewards[indices[-1]]
        if reward is not None and not math.isfinite(reward):
            raise ContractError(f'advantage "{name}" was given the reward {reward} of sample {key}')
        found.append(Trajectory(key, tuple(indices), reward))
    return found


# --- One number per trajectory ---------------------------------------------------------------------------------------


def per_group(
    inputs: AdvantageInputs, name: str, rule: Rule, rewards: Mapping[str, float] | None = None
) -> AdvantageOutput:
    """Applies `rule` to the votes of each group and spreads each trajectory's advantage over its trainable tokens.

    `rewards` by trajectory id stand for the verdicts, for example after a penalty. Raises ConfigError when `name` is not
    the first advantage of the chain.
    """
    refuse_chain(inputs, name)
    return spread(inputs, group_values(inputs, name, rule, rewards))


def group_values(
    inputs: AdvantageInputs, name: str, rule: Rule, rewards: Mapping[str, float] | None = None
) -> dict[str, float]:
    """What `rule` gives each vote of each group, by trajectory id; without verdict, there is no vote."""
    values: dict[str, float] = {}
    for members in inputs.groups:
        votes = [t for t in trajectories(inputs, name, members) if t.reward is not None]
        given = [t.reward if rewards is None else rewards[t.id] for t in votes]
        values.update(zip((t.id for t in votes), rule(np.array(given, dtype=np.float64)).tolist(), strict=True))
    return values


def spread(inputs: AdvantageInputs, values: Mapping[str, float], **metrics: Metric) -> AdvantageOutput:
    """The advantage of each trajectory on all its trainable tokens; 0 for those that `values` does not hold.

    Its metric `zero` is the part of `values` that is exactly 0, and teaches nothing; `metrics` are added.
    """
    rows = [
        mask * np.float32(values.get(sample.trajectory_id, 0.0))
        for sample, mask in zip(inputs.samples, inputs.mask, strict=True)
    ]
    zeros = sum(value == 0 for value in values.values())
    return AdvantageOutput(advantages=rows, metrics={"zero": (float(zeros), float(len(values)), "mean"), **metrics})


def group_normalised(rewards: np.ndarray, std: bool, eps: float) -> np.ndarray:
    """(r - mean) / (std + eps) over one group, standard deviation with ddof=1; GRPO, arXiv:2402.03300 section 4.1.

    Exactly 0 when all are equal, which is tested by equality: the mean of equal numbers need not equal them, and a
    rounding error divided by eps is no advantage. A single reward gives 0.
    """
    if all_equal(rewards):
        return np.zeros(len(rewards))
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + eps) if std else centred


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """r minus the mean of the others; RLOO, arXiv:2402.14740. Exactly 0 when all are equal, or for a single reward."""
    if all_equal(rewards):
        return np.zeros(len(rewards))
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


# --- One number per token --------------------------------------------------------------------------------------------


def gather(
    inputs: AdvantageInputs, found: Sequence[Trajectory], name: str, column: str, rows: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """float64[M] of `column` per trajectory. `rows` are its rows, those of `inputs.columns` by default.

    Raises ContractError naming advantage `name` when the column is missing, or not finite at a trainable token.
    """
    if rows is None:
        if column not in inputs.columns:
            known = ", ".join(sorted(inputs.columns)) or "none"
            raise ContractError(
                f'advantage "{name}" reads the column "{column}", and the batch does not have it (it has: {known})',
                "a component says in `needs` which columns it reads, and the loop then computes them",
            )
        rows = inputs.columns[column]
    mask = inputs.mask
    taken = []
    for t in found:
        parts = [rows[i][mask[i]] for i in t.members]
        values = (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.float64)
        if not np.isfinite(values).all():
            raise ContractError(_not_finite(inputs, t, name, column, rows))
        taken.append(values)
    return taken


def _not_finite(inputs: AdvantageInputs, t: Trajectory, name: str, column: str, rows: Sequence[np.ndarray]) -> str:
    for i in t.members:
        bad = np.flatnonzero(inputs.mask[i] & ~np.isfinite(rows[i]))
        if len(bad):
            where = f"sample {sample_id(inputs.samples[i])} at token {bad[0]}"
            return f'advantage "{name}" was given {column} {rows[i][bad[0]]} for {where}'
    raise AssertionError("every value is finite")


def scatter(inputs: AdvantageInputs, found: Sequence[Trajectory], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The reverse of `gather`: float32[T] per sample from [M] per trajectory, 0 outside the mask."""
    rows = [np.zeros(len(mask), dtype=np.float32) for mask in inputs.mask]
    for t, row in zip(found, values, strict=True):
        start = 0
        for i in t.members:
            stop = start + np.count_nonzero(inputs.mask[i])
            rows[i][inputs.mask[i]] = row[start:stop]
            start = stop
    return rows


def discounted_sums(rows: Sequence[np.ndarray], discount: float) -> list[np.ndarray]:
    """y[t] = x[t] + discount * y[t+1] for each row [M]: discounted sums from each token to the end."""
    if discount == 0:
        return [row.copy() for row in rows]
    if discount == 1:
        return [np.cumsum(row[::-1])[::-1] for row in rows]
    # Rows sorted by length are walked from their ends together; no padding, whatever the lengths are.
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    flat = np.concatenate(rows) if len(rows) else np.zeros(0)
    order = np.argsort(-lengths, kind="stable")
    last = (np.cumsum(lengths) - 1)[order]
    alive = np.searchsorted(-lengths[order], -np.arange(1, lengths.max(initial=1)), side="left")
    for back, count in enumerate(alive, start=1):
        at = last[:count] - back
        flat[at] += discount * flat[at + 1]
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(rows) else []


def kl_rows(inputs: AdvantageInputs, found: Sequence[Trajectory], name: str) -> list[np.ndarray]:
    """old_logprobs - reference_logprobs, [M] per trajectory, in nats: the estimator k1 of KL(policy || reference)."""
    old = gather(inputs, found, name, "old_logprobs")
    return [a - b for a, b in zip(old, gather(inputs, found, name, "reference_logprobs"), strict=True)]


KL_COLUMNS = frozenset({"old_logprobs", "reference_logprobs"})
"""What `kl_rows` reads."""


def token_mean(rows: Sequence[np.ndarray]) -> Metric:
    """The mean over all tokens of `rows` as a metric."""
    return (float(sum(row.sum() for row in rows)), float(sum(len(row) for row in rows)), "mean")


# --- The order of a chain --------------------------------------------------------------------------------------------


def refuse_chain(inputs: AdvantageInputs, name: str) -> None:
    """Raises ConfigError when something stands before advantage `name`, which starts from rewards."""
    if inputs.advantages is not None:
        raise ConfigError(
            f'advantage "{name}" starts from rewards and would discard the advantages before it; put it first'
        )


def require_chain(inputs: AdvantageInputs, name: str) -> list[np.ndarray]:
    """What the advantage before `name` produced. Raises ConfigError when there is none."""
    if inputs.advantages is None:
        raise ConfigError(f'advantage "{name}" changes the advantages of another, and none stands before it; put one first')
    return inputs.advantages


def order_check(name: str, *, first: bool) -> Callable[[Any, Environment], None]:
    """A `Component.check` that refuses a wrong place in the chain before anything starts: after others for an advantage
    that starts from rewards (`first`), before all others for one that changes theirs."""

    def check(config: Any, env: Environment) -> None:
        chain = [table.use.rpartition(":")[2] for table in env.run_config.advantage] if env.run_config is not None else []
        said = f'advantage "{name}" stands in the chain {" -> ".join(chain)}'
        if first and name in chain[1:]:
            raise ConfigError(
                f"{env.where}: {said}, starts from rewards and would discard the advantages before it",
                "put it first, and leave out others that start from rewards",
            )
        if not first and chain[:1] == [name]:
            raise ConfigError(
                f"{env.where}: {said} and changes the advantages of another, but none stands before it",
                'put one first, for example: [[advantage]] use = "grpo"',
            )

    return check
