"""Advantages of the core: `grpo`, `rloo`, `gae`. Statistics are float64 inside, results float32.

Shape letters: T tokens of a sample, M trainable tokens of a trajectory (all its segments, in order).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from miles_core.advantages import (
    KL_COLUMNS,
    discounted_sums,
    gather,
    group_normalised,
    kl_rows,
    leave_one_out,
    order_check,
    per_group,
    refuse_chain,
    scatter,
    token_mean,
    trajectories,
)
from miles_core.component import BuildContext, Component, ComponentConfig
from miles_core.types import AdvantageInputs, AdvantageOutput, Metric

__all__ = ["COMPONENTS", "gae", "group_normalised", "leave_one_out", "per_group", "rloo"]


class GrpoConfig(ComponentConfig):
    """Options of `grpo`."""

    std: bool = True
    """Divide by the group's standard deviation (ddof = 1); False is Dr. GRPO's choice."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


class RlooConfig(ComponentConfig):
    """Options of `rloo`."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Beta: beta * sum(old_logprobs - reference_logprobs) is taken from a trajectory's reward before the others' mean is;
    above 0 it needs `[roles.reference]`."""


class GaeConfig(ComponentConfig):
    """Options of `gae`."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per trainable token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Lambda: 0 is the one-step error, 1 the whole return minus the value."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Beta of a reward -beta * (old_logprobs - reference_logprobs) for every token, the KL penalty of PPO for language
    models; above 0 it needs `[roles.reference]`."""


def rloo(inputs: AdvantageInputs, kl_coef: float = 0.0) -> AdvantageOutput:
    """Rewards minus the mean of the group's others; RLOO, arXiv:2402.14740. With `kl_coef` the reward of a trajectory is
    r - kl_coef * sum over its trainable tokens of (old_logprobs - reference_logprobs); arXiv:1909.08593."""
    if not kl_coef:
        return per_group(inputs, "rloo", leave_one_out)
    found = trajectories(inputs, "rloo")
    kl = kl_rows(inputs, found, "rloo")
    rewards = {t.id: t.reward - kl_coef * row.sum() for t, row in zip(found, kl, strict=True) if t.reward is not None}
    output = per_group(inputs, "rloo", leave_one_out, rewards)
    output.metrics["kl"] = token_mean(kl)
    return output


def gae(inputs: AdvantageInputs, gamma: float, lam: float, kl_coef: float = 0.0) -> AdvantageOutput:
    """Generalised advantage estimation, arXiv:1506.02438 eq. 16, over the trainable tokens of each trajectory.

    Masked tokens do not exist here: they take no discount, and neither their rewards nor their values are read. The
    reward falls on the trajectory's last trainable token, after which the value is 0; with `kl_coef` every token has the
    reward -kl_coef * (old_logprobs - reference_logprobs) besides (arXiv:1909.08593). returns = advantages + values.
    """
    refuse_chain(inputs, "gae")
    found = trajectories(inputs, "gae")
    values = gather(inputs, found, "gae", "old_values")
    errors = []
    for t, row in zip(found, values, strict=True):
        error = gamma * np.append(row[1:], 0.0) - row if len(row) else row.copy()
        error[-1:] += t.reward or 0.0
        errors.append(error)
    metrics: dict[str, Metric] = {}
    if kl_coef:
        kl = kl_rows(inputs, found, "gae")
        errors = [error - kl_coef * row for error, row in zip(errors, kl, strict=True)]
        metrics["kl"] = token_mean(kl)
    advantages = discounted_sums(errors, gamma * lam)
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    return AdvantageOutput(
        advantages=scatter(inputs, found, advantages), returns=scatter(inputs, found, returns), metrics=metrics
    )


def _build_grpo(config: GrpoConfig, context: BuildContext) -> Any:
    return lambda inputs: per_group(inputs, "grpo", lambda r: group_normalised(r, config.std, config.eps))


def _build_rloo(config: RlooConfig, context: BuildContext) -> Any:
    return lambda inputs: rloo(inputs, config.kl_coef)


def _build_gae(config: GaeConfig, context: BuildContext) -> Any:
    return lambda inputs: gae(inputs, config.gamma, config.lam, config.kl_coef)


COMPONENTS: dict[str, list[Component[Any]]] = {
    "miles_advantages": [
        Component(
            name="grpo",
            summary="Rewards minus the group's mean, over its standard deviation",
            config=GrpoConfig,
            build=_build_grpo,
            check=order_check("grpo", first=True),
            traits={"baseline": "group"},
        ),
        Component(
            name="rloo",
            summary="Rewards minus the mean of the group's others",
            config=RlooConfig,
            build=_build_rloo,
            requires=lambda config: ("role/reference",) if config.kl_coef else (),
            needs=lambda config: KL_COLUMNS if config.kl_coef else frozenset(),
            check=order_check("rloo", first=True),
            traits={"baseline": "group"},
        ),
        Component(
            name="gae",
            summary="Generalised advantage estimation from a critic's values",
            config=GaeConfig,
            build=_build_gae,
            requires=lambda config: ("role/critic", *(("role/reference",) if config.kl_coef else ())),
            needs=lambda config: frozenset({"old_values"}) | (KL_COLUMNS if config.kl_coef else frozenset()),
            check=order_check("gae", first=True),
            provides=frozenset({"column/returns"}),
        ),
    ]
}
