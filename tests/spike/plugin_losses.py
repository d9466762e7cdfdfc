"""Losses as a plugin would bring them: they see a microbatch and know nothing of Megatron."""

from __future__ import annotations

from typing import Any

import miles_core
from miles_core.types import LossInputs, LossOutput


@miles_core.loss("sequence-ratio", needs=("logprobs", "old_logprobs", "trust"))
def sequence_ratio(x: LossInputs, *, clip: float = 0.2) -> LossOutput:
    """One importance ratio per sequence, clipped: s = exp(mean(logprobs - old_logprobs)) over its trainable tokens, loss
    -min(s A, clip(s, 1 - c, 1 + c) A) at every token; GSPO, arXiv:2507.18071 eq. 5 to 7. Each token's loss is then
    scaled by the side channel "trust" in [0, 1], which stands for anything that a plugin measures per token.
    """
    ratio = x.seq.broadcast(x.seq.mean(x.get("logprobs") - x.get("old_logprobs")).exp())
    advantages: Any = x.advantages
    clipped = ratio.clamp(1 - clip, 1 + clip)
    per_token = -(ratio * advantages).minimum(clipped * advantages) * x.get("trust")
    outside = ((ratio - clipped) != 0) & x.mask
    return LossOutput(per_token=per_token, metrics={"clipped": (outside.sum(), x.mask.sum(), "mean")})


@miles_core.loss("value-error", needs=("values", "returns"), scope="value")
def value_error(x: LossInputs) -> LossOutput:
    """(values - returns)^2 / 2 per token."""
    return LossOutput(per_token=(x.get("values") - x.get("returns")).square() / 2, scope="value")
