"""Losses for Miles: policy gradients, divergences, pairs, values. Tensor methods only: nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from miles_core import Component, ComponentConfig, LossInputs, LossOutput, NoOptions, hookimpl
from miles_policy_losses import additive, pairs, policy
from miles_policy_losses.additive import DistillConfig, KlConfig, ValueConfig
from miles_policy_losses.pairs import DpoConfig
from miles_policy_losses.policy import CispoConfig, DapoConfig, GspoConfig, PpoClipConfig, SapoConfig

RATIO = frozenset({"logprobs", "old_logprobs"})
POLICY = {"scope": "policy", "ratio": "token"}
NO_GRADIENT = {"zero_advantage": "no-gradient"}
"""Of losses with the advantage as a factor."""

Function = Callable[[LossInputs, Any], LossOutput]


def _loss(name: str, summary: str, function: Function, config: type[ComponentConfig] = NoOptions, **more: Any) -> Any:
    """A component that builds `function` with its options; `needs` may be a set or a function of the options."""
    needs = more.pop("needs")
    return Component(
        name=name,
        summary=summary,
        config=config,
        build=lambda options, context: partial(function, config=options),
        needs=needs if callable(needs) else lambda options: frozenset(needs),
        **{"traits": POLICY, **more},
    )


@hookimpl
def miles_losses() -> Iterable[Component[Any]]:
    ratio = {"needs": RATIO, "traits": POLICY | NO_GRADIENT}
    sequence = {"needs": RATIO, "traits": POLICY | NO_GRADIENT | {"ratio": "sequence"}}
    return [
        _loss("cispo", "Policy gradient with a bounded importance ratio as its factor", policy.cispo, CispoConfig, **ratio),
        _loss(
            "dapo", "ppo-clip with DAPO's bounds, averaged over tokens",
            policy.ppo_clip, DapoConfig, check=policy.check_dapo, **ratio,
        ),
        _loss(
            "distill", "KL to the teacher's whole next-token distribution", additive.distill, DistillConfig,
            needs=lambda options: frozenset({options.column}), requires=("role/teacher",),
        ),
        _loss(
            "dpo", "Direct preference optimisation on pairs of answers, or IPO", pairs.dpo, DpoConfig,
            needs={"logprobs", "reference_logprobs", "pair_ids", "pair_sign"}, requires=("role/reference",),
            traits={"scope": "pair"},
        ),
        _loss("entropy", "Entropy bonus: minus the entropy of the policy, per token", additive.entropy, needs={"entropy"}),
        _loss("gspo", "Clipped policy gradient with one ratio per sequence", policy.gspo, GspoConfig, **sequence),
        _loss(
            "kl", "KL to the reference model by estimator k1, k2, k3 or an unbiased one", additive.kl, KlConfig,
            needs=additive.needs_of_kl, requires=("role/reference",),
        ),
        _loss(
            "ppo-clip", "Clipped policy gradient of PPO and GRPO, with asymmetric and dual clip",
            policy.ppo_clip, PpoClipConfig, **ratio,
        ),
        _loss(
            "reinforce", "Plain policy gradient: minus advantage times log-probability", policy.reinforce,
            needs={"logprobs"}, traits=POLICY | NO_GRADIENT,
        ),
        _loss("sapo", "Policy gradient behind a smooth gate instead of a clip", policy.sapo, SapoConfig, **ratio),
        _loss("sft", "Cross-entropy of the given tokens", additive.sft, needs={"logprobs"}, check=additive.check_sft),
        _loss(
            "value", "Squared error of a critic's values, clipped", additive.value, ValueConfig,
            needs={"values", "old_values", "returns"}, requires=("role/critic", "column/returns"),
            traits={"scope": "value"},
        ),
        _loss("z-loss", "Square of the log of the softmax normaliser", additive.z_loss, needs={"logsumexp"}),
    ]  # fmt: skip
