"""Losses of policy gradient methods. They use tensor methods only, so that this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from pydantic import Field

from miles_core import Component, ComponentConfig, LossInputs, LossOutput, NoOptions, hookimpl


class PpoClipConfig(ComponentConfig):
    """Options of `ppo-clip`."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high; larger than clip_low is the "clip-higher" of DAPO."""
    dual_clip: float | None = Field(default=None, gt=1)
    """For negative advantages the loss of a token is at most dual_clip * |advantage|; None switches it off."""
    log_ratio_clamp: float = Field(default=20.0, gt=0, le=80)
    """log(ratio) is clamped to plus or minus this before exp (fp32 overflows above 88.7); clamped tokens are counted."""


class KlConfig(ComponentConfig):
    """Options of `kl`."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = log(p/ref), unbiased as a value, but its gradient is zero on average when it is used as a loss;
    k2 = log(p/ref)**2 / 2; k3 = ref/p - 1 - log(ref/p), never negative."""
    log_ratio_clamp: float = Field(default=20.0, gt=0, le=80)
    """In k3, log(ref/p) is clamped to plus or minus this before exp; clamped tokens are counted."""


def _masked(values: Any, mask: Any) -> Any:
    """`values` where the mask is True and exactly 0 elsewhere, whatever stood there: inf * 0 would be NaN."""
    return values.where(mask, values.new_zeros(()))


def _total(values: Any) -> Any:
    return values.detach().float().sum()


def ppo_clip(x: LossInputs, config: PpoClipConfig) -> LossOutput:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs); [N], 0 outside the mask.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5. A NaN in an
    unmasked log-probability stays a NaN in the loss, for the trainer to report.
    """
    log_ratio = _masked(x.get("logprobs") - x.get("old_logprobs"), x.mask)
    advantages = _masked(x.advantages, x.mask)
    ratio = log_ratio.clamp(-config.log_ratio_clamp, config.log_ratio_clamp).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    per_token = plain.maximum(clipped)
    if config.dual_clip is not None:
        bound = -config.dual_clip * advantages
        per_token = per_token.minimum(bound).where(advantages < 0, per_token)
    count = _total(x.mask)
    metrics: dict[str, tuple[Any, Any, Any]] = {
        "clip_fraction": (_total((clipped > plain) & x.mask), count, "mean"),
        "ratio": (_total(_masked(ratio, x.mask)), count, "mean"),
        "log_ratio_clamped": (_total((log_ratio.abs() > config.log_ratio_clamp) & x.mask), count, "sum"),
    }
    if x.mask.numel():
        metrics["ratio_max"] = (_masked(ratio, x.mask).detach().max(), count, "max")
    return LossOutput(per_token=per_token, metrics=metrics)


def kl(x: LossInputs, config: KlConfig) -> LossOutput:
    """KL(policy || reference) per token by the estimator of the config; [N], 0 outside the mask.

    Schulman 2020, "Approximating KL divergence": k1, k2, k3. Weight it with `weight` of its `[[loss]]` table.
    """
    log_ratio = _masked(x.get("reference_logprobs") - x.get("logprobs"), x.mask)
    clamped = log_ratio.new_zeros(())
    if config.estimator == "k1":
        per_token = -log_ratio
    elif config.estimator == "k2":
        per_token = log_ratio.square() / 2
    else:
        clamped = (log_ratio.abs() > config.log_ratio_clamp) & x.mask
        bounded = log_ratio.clamp(-config.log_ratio_clamp, config.log_ratio_clamp)
        per_token = bounded.expm1() - bounded
    count = _total(x.mask)
    metrics: dict[str, tuple[Any, Any, Any]] = {
        "kl": (_total(per_token), count, "mean"),
        "log_ratio_clamped": (_total(clamped), count, "sum"),
    }
    return LossOutput(per_token=per_token, metrics=metrics)


def entropy(x: LossInputs, config: NoOptions) -> LossOutput:
    """Minus the entropy of the policy's whole next-token distribution, in nats; [N], 0 outside the mask."""
    values = _masked(x.get("entropy"), x.mask)
    return LossOutput(per_token=-values, metrics={"entropy": (_total(values), _total(x.mask), "mean")})


def _build(function: Any, config: ComponentConfig, context: Any) -> Any:
    return partial(function, config=config)


@hookimpl
def miles_losses() -> Iterable[Component[Any]]:
    return [
        Component(
            name="entropy",
            summary="Entropy bonus: minus the entropy of the policy, per token",
            build=partial(_build, entropy),
            needs=lambda config: frozenset({"entropy"}),
            traits={"scope": "policy"},
        ),
        Component(
            name="kl",
            summary="KL to the reference model, estimator k1, k2 or k3",
            config=KlConfig,
            build=partial(_build, kl),
            requires=("role/reference",),
            needs=lambda config: frozenset({"logprobs", "reference_logprobs"}),
            traits={"scope": "policy"},
        ),
        Component(
            name="ppo-clip",
            summary="Clipped policy gradient of PPO and GRPO, with asymmetric and dual clip",
            config=PpoClipConfig,
            build=partial(_build, ppo_clip),
            needs=lambda config: frozenset({"logprobs", "old_logprobs"}),
            traits={"scope": "policy", "zero_advantage": "no-gradient"},
        ),
    ]
