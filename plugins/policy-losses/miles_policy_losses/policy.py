"""Losses with an importance ratio between the policy and the policy that sampled, and plain REINFORCE.

N tokens of a microbatch, S sequences; r_t = exp(logprobs_t - old_logprobs_t), A_t advantages, sg() stops the gradient. All
return fp32 [N], unweighted, exactly 0 outside the mask. A NaN in a trained log-probability stays a NaN in the loss.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from miles_core import Environment, LossInputs, LossOutput, NoOptions
from miles_core.errors import ConfigError
from miles_policy_losses.reading import (
    RatioConfig,
    advantages_of,
    bounded_exp,
    fraction,
    masked,
    mean_over,
    ratio_metrics,
    read,
)


class ClipConfig(RatioConfig):
    """What the clipped losses have."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high; larger than clip_low is the "clip-higher" of DAPO."""
    dual_clip: float | None = Field(default=None, gt=1)
    """For negative advantages the loss of a token is at most dual_clip * |advantage|; None switches it off."""


class PpoClipConfig(ClipConfig):
    """Options of `ppo-clip`."""


class DapoConfig(ClipConfig):
    """Options of `dapo`."""

    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped above at 1 + clip_high: higher than below, which leaves unlikely tokens room to grow."""


class GspoConfig(ClipConfig):
    """Options of `gspo`."""

    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """The ratio of a sequence is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """The ratio of a sequence is clipped above at 1 + clip_high."""
    variant: Literal["sequence", "token"] = "sequence"
    """"token" is GSPO-token: the same ratio and clip, with each token's own advantage and gradient."""
    length_norm: bool = True
    """The geometric mean of a sequence's token ratios; false: their product, the exact ratio of the whole sequence."""


class CispoConfig(RatioConfig):
    """Options of `cispo`."""

    ratio_min: float = Field(default=0.0, ge=0, le=1)
    """Smallest factor of a token's gradient; 0 leaves small ratios as they are."""
    ratio_max: float = Field(default=5.0, ge=1)
    """Largest factor of a token's gradient."""


class SapoConfig(RatioConfig):
    """Options of `sapo`."""

    tau_positive: float = Field(default=1.0, gt=0)
    """How fast the gate closes as the ratio leaves 1, for tokens with a positive advantage."""
    tau_negative: float = Field(default=1.05, gt=0)
    """The same for all other tokens; larger closes faster, since pushing tokens down is what destabilises."""


def clipped(x: LossInputs, log_ratio: Any, config: ClipConfig) -> LossOutput:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log_ratio) [N]; dual clip: for A < 0 at most
    -dual_clip A."""
    advantages = advantages_of(x)
    ratio = bounded_exp(log_ratio, config.log_ratio_clamp)
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    per_token = plain.maximum(bounded)
    if config.dual_clip is not None:
        bound = -config.dual_clip * advantages
        per_token = per_token.minimum(bound).where(advantages < 0, per_token)
    metrics = fraction(bounded > plain, x) | ratio_metrics(x, ratio, log_ratio, config.log_ratio_clamp)
    return LossOutput(per_token=per_token, metrics=metrics)


def ppo_clip(x: LossInputs, config: PpoClipConfig | DapoConfig) -> LossOutput:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).

    Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; other bounds above
    and below: DAPO, arXiv:2503.14476, eq. 10.
    """
    return clipped(x, read(x, "logprobs") - read(x, "old_logprobs"), config)


def gspo(x: LossInputs, config: GspoConfig) -> LossOutput:
    """The clipped loss with one ratio for a whole sequence: s = exp(mean_t log r_t), or exp(sum_t log r_t) without
    `length_norm`. Zheng et al. 2025, arXiv:2507.18071; variant "token": sg(s) r_t / sg(r_t).

    Only masked-in tokens enter s. A sequence is one sample: segments of a trajectory have a ratio each. With `[train]
    aggregation = "sequence-mean-token-mean"` the weighted sum is the objective of the paper.
    """
    logprobs = read(x, "logprobs")
    token = logprobs - read(x, "old_logprobs")
    log_ratio = x.seq.broadcast(x.seq.mean(token) if config.length_norm else x.seq.sum(token))
    if config.variant == "token":
        log_ratio = log_ratio.detach() + (logprobs - logprobs.detach())
    return clipped(x, masked(log_ratio, x.mask), config)


def cispo(x: LossInputs, config: CispoConfig) -> LossOutput:
    """-sg(clip(r, ratio_min, ratio_max)) A logprobs: every token keeps a gradient, with a bounded factor.

    MiniMax-M1, arXiv:2506.13585, eqs. 4-5; bounded above only, at 5: ScaleRL, arXiv:2510.13786.
    """
    logprobs = read(x, "logprobs")
    log_ratio = logprobs.detach() - read(x, "old_logprobs")
    ratio = bounded_exp(log_ratio, config.log_ratio_clamp)
    factor = ratio.clamp(config.ratio_min, config.ratio_max)
    outside = (ratio > config.ratio_max) | (ratio < config.ratio_min)
    metrics = fraction(outside, x) | ratio_metrics(x, ratio, log_ratio, config.log_ratio_clamp)
    return LossOutput(per_token=-factor * advantages_of(x) * logprobs, metrics=metrics)


def sapo(x: LossInputs, config: SapoConfig) -> LossOutput:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_positive for A > 0 and tau_negative otherwise: a gate that closes
    smoothly instead of a clip, with gradient r A at r = 1. Gao et al. 2025, arXiv:2511.20347.
    """
    advantages = advantages_of(x)
    log_ratio = read(x, "logprobs") - read(x, "old_logprobs")
    ratio = bounded_exp(log_ratio, config.log_ratio_clamp)

    def gated(tau: float) -> Any:
        return (4 / tau) / (1 + ((1 - ratio) * tau).exp())

    gate = gated(config.tau_positive).where(advantages > 0, gated(config.tau_negative))
    metrics = {"gate": mean_over(gate, x)} | ratio_metrics(x, ratio, log_ratio, config.log_ratio_clamp)
    return LossOutput(per_token=-gate * advantages, metrics=metrics)


def reinforce(x: LossInputs, config: NoOptions) -> LossOutput:
    """-A logprobs, Williams 1992: no ratio, no clip. What was sampled by older weights is not corrected for; a correction
    may do that."""
    logprobs = read(x, "logprobs")
    return LossOutput(per_token=-advantages_of(x) * logprobs, metrics={"logprobs": mean_over(logprobs, x)})


def check_dapo(config: DapoConfig, env: Environment) -> None:
    """Raises ConfigError unless losses are averaged over tokens: the other half of what DAPO's loss is."""
    train = getattr(env.run_config, "train", None)
    if train is not None and train.aggregation != "token-mean":
        raise ConfigError(
            f'{env.where or "loss"}: the loss dapo is a mean over tokens, and train.aggregation = "{train.aggregation}"',
            'set [train] aggregation = "token-mean", or use ppo-clip with clip_high = 0.28',
        )
