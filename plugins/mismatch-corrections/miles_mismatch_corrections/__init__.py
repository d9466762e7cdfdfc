"""Corrections of the mismatch between engine and trainer. All compare `old_logprobs`, which the trainer computes before
the step, with `rollout_logprobs`, which the engine reported; r = exp(old - rollout) is trainer over engine.

A correction runs on the driver, once per minibatch, before weights are fixed. What it masks either stays in the
denominator of the loss with weight 0 ("keep": a masked token is an estimate of zero) or leaves it ("shrink": a masked
token was never sampled).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from miles_core import (
    BuildContext,
    Component,
    ComponentConfig,
    CorrectionInputs,
    CorrectionOutput,
    Environment,
    hookimpl,
)
from miles_core.errors import ConfigError
from miles_core.stats import MAX_LOG_RATIO
from miles_core.types import Metric
from miles_mismatch_corrections.ratios import Level, Ratios, ratios_of


class TisConfig(ComponentConfig):
    """Options of `tis`."""

    level: Level = "token"
    """Of what the ratio is: each "token", the whole "sequence" (product over its tokens), or its "geometric" mean."""
    upper: float = Field(default=2.0, ge=1, le=1e6)
    """Weights above this become it."""
    lower: float = Field(default=0.0, ge=0, le=1)
    """Weights below this become it: 0 truncates above only, anything else clips on both sides."""


class _Narrow(ComponentConfig):
    @model_validator(mode="after")
    def _geometric_is_narrow(self) -> Any:
        if self.level == "geometric" and "upper" not in self.model_fields_set:  # type: ignore[attr-defined]
            raise ValueError(
                'level = "geometric" needs `upper` to be given: a mean over a sequence stays close to 1, where the default '
                "would mask nothing (start from 1.001 for long and 1.01 for short answers)"
            )
        return self


class MisConfig(_Narrow):
    """Options of `mis`."""

    level: Level = "sequence"
    """Of what the ratio is: each "token", the whole "sequence" (product over its tokens), or its "geometric" mean."""
    upper: float = Field(default=2.0, ge=1, le=1e6)
    """What has a larger ratio is masked."""
    lower: float = Field(default=0.0, ge=0, le=1)
    """What has a smaller ratio is masked; 0 masks above only."""


class IcepopConfig(ComponentConfig):
    """Options of `icepop`."""

    lower: float = Field(default=0.5, ge=0, le=1)
    """Tokens with a smaller ratio are masked (alpha)."""
    upper: float = Field(default=5.0, ge=1, le=1e6)
    """Tokens with a larger ratio are masked (beta)."""


class RejectionConfig(_Narrow):
    """Options of `rejection`."""

    level: Level = "sequence"
    """Of what the ratio is: each "token", the whole "sequence" (product over its tokens), or its "geometric" mean."""
    lower: float = Field(default=0.5, ge=0, le=1)
    """What has a smaller ratio is rejected; 0 sets no bound."""
    upper: float = Field(default=2.0, ge=1, le=1e6)
    """What has a larger ratio is rejected."""
    veto: float = Field(default=1e-4, ge=0, lt=1)
    """A sequence with a token whose ratio is smaller is rejected whole, whatever its level says; 0 switches it off."""


class OpsmConfig(ComponentConfig):
    """Options of `opsm`."""

    delta: float = Field(gt=0)
    """A sequence whose mean of rollout_logprobs - old_logprobs, in nats per token, is larger counts as off-policy. The
    paper names no value; compare with the metric `kl` and with `gap/kl_k1` of a run without it."""


def tis(inputs: CorrectionInputs, config: TisConfig) -> CorrectionOutput:
    """Truncated importance sampling: every trainable token's loss is multiplied with min(r, upper), and raised to `lower`
    where that is above 0. Nothing is masked.

    Ionides 2008 (truncation); Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
    (token level). The sequence's ratio is unbiased for the whole answer and the noisiest.
    """
    ratios = ratios_of(inputs, "tis")
    weights, metrics = _weights(ratios, config.level)
    cut = weights.clip(config.lower, config.upper)
    metrics |= _shares(ratios, config.level, truncated=weights > config.upper, raised=weights < config.lower)
    metrics |= _sizes(ratios, config.level, cut)
    return CorrectionOutput(mask=inputs.mask, multiplier=_multiplier(ratios, config.level, cut), metrics=metrics)


def mis(inputs: CorrectionInputs, config: MisConfig) -> CorrectionOutput:
    """Masked importance sampling: the weight r where lower <= r <= upper, and 0 elsewhere; the denominator is kept.

    Liu, Li et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".
    """
    return _masked_weights(inputs, "mis", config.level, config.lower, config.upper)


def icepop(inputs: CorrectionInputs, config: IcepopConfig) -> CorrectionOutput:
    """`mis` per token with two bounds: the weight r where alpha <= r <= beta, and 0 elsewhere; the denominator is kept.

    Ling team 2025, arXiv:2510.18855, section on IcePop.
    """
    return _masked_weights(inputs, "icepop", "token", config.lower, config.upper)


def rejection(inputs: CorrectionInputs, config: RejectionConfig) -> CorrectionOutput:
    """Rejection sampling: what has a ratio outside [lower, upper] leaves the batch and its denominators; no weights. A
    sequence with any token of r < veto leaves it whole, as one that the trainer would practically never have written.

    With `tis` before or after it, accepted tokens have weights too.
    """
    ratios = ratios_of(inputs, "rejection")
    weights, metrics = _weights(ratios, config.level)
    accepted = (weights >= config.lower) & (weights <= config.upper)
    vetoed = ratios.minima(ratios.log_ratio) < (np.log(config.veto) if config.veto else -np.inf)
    keep = ratios.spread(accepted, config.level) & ~ratios.spread(vetoed, "sequence")
    metrics |= _shares(ratios, config.level, rejected=~accepted) | _shares(ratios, "sequence", vetoed=vetoed)
    metrics |= _shares(ratios, "token", masked=~keep)
    return CorrectionOutput(mask=ratios.rows(keep), metrics=metrics)


def opsm(inputs: CorrectionInputs, config: OpsmConfig) -> CorrectionOutput:
    """Off-policy sequence masking: tokens with a negative advantage are masked in sequences whose estimate of
    KL(engine || trainer), the mean of rollout_logprobs - old_logprobs, exceeds delta; the denominator is kept.

    DeepSeek-AI 2025, arXiv:2512.02556, section 3.1. There the mask moves with the policy within a step; here it is that of
    the step's start. Advantages that differ within a sequence (GAE) are judged token by token.
    """
    ratios = ratios_of(inputs, "opsm")
    kl = -ratios.at("geometric")
    far = kl > config.delta
    negative = np.concatenate(inputs.advantages)[ratios.mask] < 0 if inputs.advantages else np.zeros(0, dtype=bool)
    keep = ~(ratios.spread(far, "sequence") & negative)
    metrics = _shares(ratios, "sequence", off_policy=far) | _shares(ratios, "token", masked=~keep)
    metrics["kl"] = _mean(kl[ratios.living("sequence")])
    return CorrectionOutput(mask=ratios.rows(keep), metrics=metrics)


# --- What they share -------------------------------------------------------------------------------------------------


def _masked_weights(inputs: CorrectionInputs, name: str, level: Level, lower: float, upper: float) -> CorrectionOutput:
    ratios = ratios_of(inputs, name)
    weights, metrics = _weights(ratios, level)
    high, low = weights > upper, weights < lower
    weights[high | low] = 0.0
    keep = ratios.spread(~(high | low), level)
    metrics |= _shares(ratios, level, masked_high=high, masked_low=low) | _shares(ratios, "token", masked=~keep)
    metrics |= _sizes(ratios, level, weights)
    return CorrectionOutput(mask=ratios.rows(keep), multiplier=_multiplier(ratios, level, weights), metrics=metrics)


def _weights(ratios: Ratios, level: Level) -> tuple[np.ndarray, dict[str, Metric]]:
    """r of each unit of the level, finite: its log is clamped to +-MAX_LOG_RATIO, and what had to be is counted."""
    judged = ratios.at(level)
    clamped = np.count_nonzero(np.abs(judged) > MAX_LOG_RATIO)
    return np.exp(judged.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)), {"log_ratio_clamped": (float(clamped), 1.0, "sum")}


def _multiplier(ratios: Ratios, level: Level, weights: np.ndarray) -> list[np.ndarray]:
    return ratios.rows(ratios.spread(weights.astype(np.float32), level))


def _mean(values: np.ndarray) -> Metric:
    return (float(values.sum()), float(len(values)), "mean")


def _shares(ratios: Ratios, level: Level, **flags: np.ndarray) -> dict[str, Metric]:
    """Shares of the level's units: tokens, or sequences that have a trainable token."""
    living = ratios.living(level)
    return {name: _mean(flag[living]) for name, flag in flags.items()}


def _sizes(ratios: Ratios, level: Level, weights: np.ndarray) -> dict[str, Metric]:
    living = weights[ratios.living(level)]
    found = {"weight": _mean(living)}
    if len(living):
        found["weight_max"] = (float(living.max()), float(len(living)), "max")
    return found


# --- Components ------------------------------------------------------------------------------------------------------


def _check(config: Any, env: Environment, name: str) -> None:
    """Refuses a run in which the two log-probabilities are the same thing."""
    if env.run_config.train.old_logprobs == "rollout":
        raise ConfigError(
            f'{env.where}: correction "{name}" compares old_logprobs with rollout_logprobs, and with train.old_logprobs = '
            '"rollout" these are the same: it would do nothing',
            f'set train.old_logprobs = "recompute", or remove "{name}"',
        )


def _ratio(options: Any) -> str:
    """Whether it weighs whole sequences by their probability. One that only masks compares engine and trainer, both before
    top-p and top-k, and is right with either."""
    return "sequence" if options.level == "sequence" else "token"


def _component(
    function: Callable[..., CorrectionOutput],
    config: type[ComponentConfig],
    denominator: Literal["keep", "shrink"],
    summary: str,
    **traits: Any,
) -> Component[Any]:
    name = function.__name__

    def build(options: Any, context: BuildContext) -> Any:
        return partial(function, config=options)

    return Component(
        name=name,
        summary=summary,
        config=config,
        build=build,
        needs=lambda options: frozenset({"old_logprobs"}),
        traits={"denominator": denominator, **traits},
        check=partial(_check, name=name),
    )


@hookimpl
def miles_corrections() -> Iterable[Component[Any]]:
    return [
        _component(icepop, IcepopConfig, "keep", "Weights of tokens, those outside [0.5, 5] masked (IcePop)"),
        _component(
            mis, MisConfig, "keep", "Masked importance sampling, by token, sequence or geometric mean", ratio=_ratio
        ),
        _component(opsm, OpsmConfig, "keep", "Masks sequences that are off-policy and have a negative advantage"),
        _component(rejection, RejectionConfig, "shrink", "Drops tokens or sequences far from the trainer, with a veto"),
        _component(
            tis, TisConfig, "keep", "Truncated importance sampling, by token, sequence or geometric mean", ratio=_ratio
        ),
    ]
