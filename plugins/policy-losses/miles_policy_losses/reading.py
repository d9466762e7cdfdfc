"""How every loss here reads its inputs and counts. Tensor methods only: the same code runs on torch tensors and on the toy
trainer's arrays. Letters: N tokens of a microbatch, S sequences."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from miles_core import ComponentConfig, LossInputs


class RatioConfig(ComponentConfig):
    """What every loss with an importance ratio has."""

    log_ratio_clamp: float = Field(default=20.0, gt=0, le=80)
    """log(ratio) is clamped to plus or minus this before exp (fp32 overflows above 88.7); clamped tokens are counted."""


def masked(values: Any, mask: Any) -> Any:
    """`values` where the mask is True and exactly 0 elsewhere, whatever stood there: inf * 0 would be NaN."""
    return values.where(mask, values.new_zeros(()))


def read(x: LossInputs, name: str) -> Any:
    """fp32 [N] of `x.get(name)`, 0 outside the mask. Numbers of lower precision are converted before any arithmetic."""
    return masked(x.get(name).float(), x.mask)


def advantages_of(x: LossInputs) -> Any:
    """fp32 [N], 0 outside the mask."""
    return masked(x.advantages.float(), x.mask)


def visible(values: Any) -> Any:
    """`values` with NaN for infinity: a clamp would make an ordinary number of it, and the trainer could not report it."""
    still = values.detach()
    return values + (still - still)


def bounded_exp(log_ratio: Any, clamp: float) -> Any:
    """exp of `log_ratio` within plus or minus `clamp`; outside it there is no gradient. NaN and infinity give NaN."""
    return visible(log_ratio).clamp(-clamp, clamp).exp()


def total(values: Any) -> Any:
    return values.detach().float().sum()


def mean_over(values: Any, x: LossInputs) -> tuple[Any, Any, str]:
    """The metric "mean over trained tokens" of [N] numbers."""
    return (total(masked(values, x.mask)), total(x.mask), "mean")


def count_over(where: Any, x: LossInputs) -> tuple[Any, Any, str]:
    """The metric "how many trained tokens" of [N] booleans."""
    return (total(where & x.mask), total(x.mask), "sum")


def ratio_metrics(x: LossInputs, ratio: Any, log_ratio: Any, clamp: float) -> dict[str, tuple[Any, Any, Any]]:
    """Mean and largest ratio of trained tokens, and how many log-ratios lay beyond the clamp."""
    metrics: dict[str, tuple[Any, Any, Any]] = {
        "ratio": mean_over(ratio, x),
        "log_ratio_clamped": count_over(log_ratio.abs() > clamp, x),
    }
    if x.mask.numel():
        metrics["ratio_max"] = (masked(ratio, x.mask).detach().max(), total(x.mask), "max")
    return metrics


def fraction(where: Any, x: LossInputs) -> dict[str, tuple[Any, Any, Any]]:
    """`clip_fraction`: the share of trained tokens at which a clip took effect."""
    return {"clip_fraction": (total(where & x.mask), total(x.mask), "mean")}
