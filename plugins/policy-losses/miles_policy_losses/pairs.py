"""Losses on pairs of answers. N: tokens of a microbatch, S: sequences of it; pairs are never split over microbatches."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from miles_core import ComponentConfig, LossInputs, LossOutput
from miles_policy_losses.reading import masked, read


class DpoConfig(ComponentConfig):
    """Options of `dpo`."""

    beta: float = Field(default=0.1, gt=0)
    """How much the policy is held to the reference: the temperature of the implicit reward. For "ipo" it is tau."""
    variant: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: -log sigmoid(beta m); ipo: (m - 1 / (2 beta))**2 with token means instead of sums in the margin m."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """The probability that a pair is labelled the wrong way round; with "sigmoid"."""

    @model_validator(mode="after")
    def _smoothing_is_used(self) -> DpoConfig:
        if self.variant == "ipo" and self.label_smoothing:
            raise ValueError('label_smoothing has no meaning with variant = "ipo"')
        return self


class Sides(NamedTuple):
    """Of the pair that each sequence belongs to, fp32 [S]; 0 for a sequence in no pair."""

    chosen: Any
    rejected: Any
    sign: Any
    """+1: the sequence is chosen, -1: rejected, 0: in no pair."""


def sides_of_pairs(x: LossInputs, values: Any, mean: bool = False) -> Sides:
    """Sums (or means) of `values` [N] over the trained tokens of the chosen and of the rejected answer of each sequence's
    pair. Reads the columns "pair_ids" and "pair_sign"; works through `x.seq` alone, so also where a sequence is spread over
    context-parallel ranks. An answer may have several sequences: the segments of a trajectory."""
    pair = x.seq.mean(x.get("pair_ids").double())  # of equal numbers; in doubles, it is exactly that number
    sign = x.seq.mean(x.get("pair_sign").double()).float()
    together = (pair[:, None] == pair[None, :]) & (pair > 0)[None, :]

    def over(side: Any, numbers: Any) -> Any:
        return masked(numbers[None, :], together & side[None, :]).sum(-1)

    sums, counts = x.seq.sum(values), x.seq.sum(values.detach() * 0 + 1)
    sides = [over(side, sums) for side in (sign > 0, sign < 0)]
    if mean:
        sides = [s / over(side, counts).clamp(min=1) for s, side in zip(sides, (sign > 0, sign < 0), strict=True)]
    return Sides(*sides, sign)


def dpo(x: LossInputs, config: DpoConfig) -> LossOutput:
    """With h = sum_t (logprobs - reference_logprobs) of an answer and m = h_chosen - h_rejected:
    -(1 - s) log sigmoid(beta m) - s log sigmoid(-beta m), s = label_smoothing. [N]: every token of both answers has its
    pair's loss, which the token weights of scope "pair" make a mean over pairs.

    Rafailov et al. 2023, arXiv:2305.18290, eq. 7; label smoothing (conservative DPO): Mitchell 2023; IPO: Azar et al. 2023,
    arXiv:2310.12036, eq. 17, on means over tokens as its authors do.
    """
    ratio = read(x, "logprobs") - read(x, "reference_logprobs")
    chosen, rejected, sign = sides_of_pairs(x, ratio, mean=config.variant == "ipo")
    margin = chosen - rejected
    if config.variant == "ipo":
        loss = (margin - 1 / (2 * config.beta)).square()
    else:
        m, zero = config.beta * margin, margin.new_zeros(())
        wrong, right = (-m).logaddexp(zero), m.logaddexp(zero)  # -log sigmoid(m) and -log sigmoid(-m)
        loss = (1 - config.label_smoothing) * wrong + config.label_smoothing * right
    loss = masked(loss, sign != 0)
    first = (sign > 0).float()  # one row per pair
    rows = {
        "accuracy": (margin > 0).float(),
        "margin": config.beta * margin,
        "reward_chosen": config.beta * chosen,
        "reward_rejected": config.beta * rejected,
    }
    metrics = {n: (masked(v, sign > 0).detach().sum(), first.sum(), "mean") for n, v in rows.items()}
    return LossOutput(per_token=masked(x.seq.broadcast(loss), x.mask), metrics=metrics, scope="pair")
