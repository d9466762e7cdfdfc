"""Advantages of the core: `grpo`, `rloo`, `gae`. Statistics are float64 inside, results float32.

Shape letters: T tokens of a sample, M trainable tokens of a trajectory (all its segments, in order).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pydantic import Field

from miles_core.component import BuildContext, Component, ComponentConfig, NoOptions
from miles_core.errors import ConfigError
from miles_core.types import AdvantageInputs, AdvantageOutput
from miles_core.votes import all_equal, votes


class GrpoConfig(ComponentConfig):
    """Options of `grpo`."""

    std: bool = True
    """Divide by the group's standard deviation; False is Dr. GRPO's choice."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


class GaeConfig(ComponentConfig):
    """Options of `gae`."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per trainable token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Lambda: 0 is the one-step error, 1 the whole return minus the value."""


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


def per_group(inputs: AdvantageInputs, name: str, rule: Callable[[np.ndarray], np.ndarray]) -> AdvantageOutput:
    """Applies `rule` to the votes of each group and spreads each trajectory's advantage over its trainable tokens."""
    _refuse_chain(inputs, name)
    advantages = [np.zeros(len(mask), dtype=np.float32) for mask in inputs.mask]
    for members in inputs.groups:
        verdicts = votes([inputs.samples[i] for i in members], [inputs.rewards[i] for i in members])
        values = rule(np.array(list(verdicts.values()), dtype=np.float64))
        by_trajectory = dict(zip(verdicts, values.astype(np.float32), strict=True))
        for i in members:
            advantages[i][inputs.mask[i]] = by_trajectory.get(inputs.samples[i].trajectory_id, 0.0)
    return AdvantageOutput(advantages=advantages)


def gae(inputs: AdvantageInputs, gamma: float, lam: float) -> AdvantageOutput:
    """Generalised advantage estimation, arXiv:1506.02438 eq. 16, over the trainable tokens of each trajectory.

    Masked tokens do not exist here: they take no discount, and neither their rewards nor their values are read. The
    reward falls on the trajectory's last trainable token, after which the value is 0. returns = advantages + values.
    """
    _refuse_chain(inputs, "gae")
    values = inputs.columns["old_values"]
    trajectories: dict[str, list[int]] = {}
    for i in sorted(range(len(inputs.samples)), key=lambda i: inputs.samples[i].segment):
        trajectories.setdefault(inputs.samples[i].trajectory_id, []).append(i)
    rows = [np.concatenate([values[i][inputs.mask[i]] for i in members]) for members in trajectories.values()]
    rewards = [inputs.rewards[members[-1]] or 0.0 for members in trajectories.values()]
    advantages = [np.zeros(len(mask), dtype=np.float32) for mask in inputs.mask]
    returns = [np.zeros(len(mask), dtype=np.float32) for mask in inputs.mask]
    for members, row, advantage in zip(trajectories.values(), rows, _gae_rows(rows, rewards, gamma, lam), strict=True):
        start = 0
        for i in members:
            stop = start + np.count_nonzero(inputs.mask[i])
            advantages[i][inputs.mask[i]] = advantage[start:stop]
            returns[i][inputs.mask[i]] = advantage[start:stop] + row[start:stop]
            start = stop
    return AdvantageOutput(advantages=advantages, returns=returns)


def _gae_rows(rows: list[np.ndarray], rewards: list[float], gamma: float, lam: float) -> list[np.ndarray]:
    """Advantages float64[M] per row of values: one backward scan over all rows, aligned at their ends."""
    width = max((len(row) for row in rows), default=0)
    values = np.zeros((len(rows), width + 1))
    delta = np.zeros((len(rows), width))
    for r, row in enumerate(rows):
        values[r, width - len(row) : width] = row
    if width:
        delta[:] = gamma * values[:, 1:] - values[:, :-1]
        delta[:, -1] += rewards
    for t in range(width - 2, -1, -1):
        delta[:, t] += gamma * lam * delta[:, t + 1]
    return [delta[r, width - len(row) :] for r, row in enumerate(rows)]


def _refuse_chain(inputs: AdvantageInputs, name: str) -> None:
    if inputs.advantages is not None:
        raise ConfigError(
            f'advantage "{name}" starts from rewards and would discard the advantages before it; put it first'
        )


def _build_grpo(config: GrpoConfig, context: BuildContext) -> Any:
    return lambda inputs: per_group(inputs, "grpo", lambda r: group_normalised(r, config.std, config.eps))


def _build_rloo(config: NoOptions, context: BuildContext) -> Any:
    return lambda inputs: per_group(inputs, "rloo", leave_one_out)


def _build_gae(config: GaeConfig, context: BuildContext) -> Any:
    return lambda inputs: gae(inputs, config.gamma, config.lam)


COMPONENTS: dict[str, list[Component[Any]]] = {
    "miles_advantages": [
        Component(
            name="grpo",
            summary="Rewards minus the group's mean, over its standard deviation",
            config=GrpoConfig,
            build=_build_grpo,
        ),
        Component(name="rloo", summary="Rewards minus the mean of the group's others", build=_build_rloo),
        Component(
            name="gae",
            summary="Generalised advantage estimation from a critic's values",
            config=GaeConfig,
            build=_build_gae,
            requires=("role/critic",),
            needs=lambda config: frozenset({"old_values"}),
        ),
    ]
}
