"""Losses of the core. `policy-gradient` runs on any array library: numpy, torch, or the toy trainer's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from miles_core.component import Component
from miles_core.types import LossInputs, LossOutput


def policy_gradient(x: LossInputs) -> LossOutput:
    """-A * exp(logprobs - stop_gradient(logprobs)) per token [N] with advantages A; 0 where masked.

    Its value is -A and its gradient -A * grad(logprobs): REINFORCE, Williams 1992. The ratio is written as
    1 + (logprobs - stop_gradient(logprobs)), which has the same value and gradient and no exponential to overflow.
    The multiplier of corrections is not applied here: it goes with the token weights, which are the trainer's.
    """
    logprobs = _masked(x.get("logprobs"), x.mask)
    fixed = logprobs.detach() if hasattr(logprobs, "detach") else logprobs
    return LossOutput(per_token=-_masked(x.advantages, x.mask) * (1.0 + (logprobs - fixed)))


def _masked(values: Any, mask: Any) -> Any:
    """`values`, and exactly 0 outside the mask, whatever stands there: NaN and infinity times 0 would be NaN."""
    if isinstance(values, np.ndarray):
        return np.where(mask, values, np.zeros((), dtype=values.dtype))
    return values.where(mask, values.new_zeros(()))


COMPONENTS: dict[str, list[Component[Any]]] = {
    "miles_losses": [
        Component(
            name="policy-gradient",
            summary="Plain policy gradient, without ratio or clipping",
            build=lambda config, context: policy_gradient,
            needs=lambda config: frozenset({"logprobs"}),
            traits={"scope": "policy", "zero_advantage": "no-gradient"},
        )
    ]
}
