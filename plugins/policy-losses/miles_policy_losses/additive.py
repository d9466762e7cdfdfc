"""Terms that are added with a weight of their own, and supervised ones. N: tokens of a microbatch; all return fp32 [N],
exactly 0 outside the mask."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles_core import ComponentConfig, Environment, LossInputs, LossOutput, NoOptions
from miles_core.errors import ConfigError
from miles_policy_losses.reading import RatioConfig, bounded_exp, count_over, fraction, mean_over, read, visible

LOW_VARIANCE_CAP = 10.0
"""Largest value of the estimator "low-variance" at one token, in nats."""


class KlConfig(RatioConfig):
    """Options of `kl`."""

    estimator: Literal["k1", "k2", "k3", "low-variance", "unbiased", "unbiased-k1"] = "k3"
    """k1 = log(p/ref), unbiased as a value, but its gradient is zero on average when it is used as a loss;
    k2 = log(p/ref)**2 / 2, whose gradient is that of the KL on policy; k3 = ref/p - 1 - log(ref/p), never negative;
    "low-variance" = k3, at most 10; "unbiased" and "unbiased-k1" = k3 and k1 times p/old: value and gradient are those
    of the true KL, also off policy."""
    log_ratio_clamp: float = Field(default=20.0, gt=0, le=80)
    """Log-ratios are clamped to plus or minus this before exp; clamped tokens are counted."""


class DistillConfig(ComponentConfig):
    """Options of `distill`."""

    divergence: Literal["reverse", "forward"] = "reverse"
    """reverse: KL(policy || teacher), which seeks the teacher's modes; forward: KL(teacher || policy), which covers
    them all."""
    top_k: int = Field(default=0, ge=0)
    """Compare the teacher's top_k most likely tokens one by one and all others as one; 0 compares the whole vocabulary."""

    @property
    def column(self) -> str:
        """The name under which the trainer gives the divergence."""
        return f"{self.divergence}_kl:teacher" + (f":{self.top_k}" if self.top_k else "")


def kl(x: LossInputs, config: KlConfig) -> LossOutput:
    """KL(policy || reference) per token by the estimator of the config, d = log(ref/p): k1 = -d, k2 = d**2 / 2,
    k3 = e**d - 1 - d.

    Schulman 2020, "Approximating KL divergence". "low-variance" caps k3. "unbiased": w k with w = p/old, since then
    E_old[w k(p)] = E_p[k(p)] = KL for all parameters, and so for the gradient: DeepSeek-V3.2, arXiv:2512.02556.
    """
    logprobs = read(x, "logprobs")
    log_ratio = visible(read(x, "reference_logprobs") - logprobs)
    clamp = config.log_ratio_clamp
    beyond = (log_ratio.abs() > clamp) & (config.estimator not in ("k1", "k2", "unbiased-k1"))
    if config.estimator in ("k1", "unbiased-k1"):
        per_token = -log_ratio
    elif config.estimator == "k2":
        per_token = log_ratio.square() / 2
    else:
        bounded = log_ratio.clamp(-clamp, clamp)
        per_token = bounded.expm1() - bounded
    if config.estimator == "low-variance":
        per_token = per_token.clamp(-LOW_VARIANCE_CAP, LOW_VARIANCE_CAP)
    if config.estimator in ("unbiased", "unbiased-k1"):
        off_policy = logprobs - read(x, "old_logprobs")
        beyond = beyond | (off_policy.abs() > clamp)
        per_token = per_token * bounded_exp(off_policy, clamp)
    metrics = {"kl": mean_over(per_token, x), "log_ratio_clamped": count_over(beyond, x)}
    return LossOutput(per_token=per_token, metrics=metrics)


def needs_of_kl(config: KlConfig) -> frozenset[str]:
    old = {"old_logprobs"} if config.estimator.startswith("unbiased") else set()
    return frozenset({"logprobs", "reference_logprobs"} | old)


def entropy(x: LossInputs, config: NoOptions) -> LossOutput:
    """Minus the entropy of the policy's whole next-token distribution, in nats."""
    values = read(x, "entropy")
    return LossOutput(per_token=-values, metrics={"entropy": mean_over(values, x)})


def z_loss(x: LossInputs, config: NoOptions) -> LossOutput:
    """logsumexp(logits)**2, which keeps the softmax normaliser near 1; PaLM, arXiv:2204.02311, with weight 1e-4.
    The logits are those divided by the sampling temperature."""
    values = read(x, "logsumexp")
    return LossOutput(per_token=values.square(), metrics={"logsumexp": mean_over(values, x)})


def distill(x: LossInputs, config: DistillConfig) -> LossOutput:
    """The divergence between the policy's and the teacher's next-token distributions, which the trainer computes in the
    same microbatch. On-policy distillation: Agarwal et al. 2023, arXiv:2306.13649; reverse KL: arXiv:2306.08543."""
    values = read(x, config.column)
    return LossOutput(per_token=values, metrics={"kl": mean_over(values, x)})


def sft(x: LossInputs, config: NoOptions) -> LossOutput:
    """-logprobs: the cross-entropy of the given tokens."""
    values = -read(x, "logprobs")
    return LossOutput(per_token=values, metrics={"nll": mean_over(values, x)})


def check_sft(config: NoOptions, env: Environment) -> None:
    """Raises ConfigError where `sft` alone would learn from all of the model's own answers: its expected gradient is 0."""
    run = env.run_config
    if run is None or run.rollout.use != "single-turn" or run.filter or len(run.loss) > 1:
        return
    raise ConfigError(
        f'{env.where}: loss "sft" makes all answers likelier alike, and rollout "single-turn" samples them from the model '
        "itself: nothing would be learnt",
        "use a rollout of given answers, for example recorded (miles-recorded-rollout), or a [[filter]] that keeps some",
    )


class ValueConfig(ComponentConfig):
    """Options of `value`."""

    clip: float | None = Field(default=0.2, gt=0)
    """A value counts as moved by at most this from its value before the step; None switches clipping off."""


def value(x: LossInputs, config: ValueConfig) -> LossOutput:
    """max((V - R)**2, (clip(V, V_old - clip, V_old + clip) - R)**2) / 2 for values V and returns R; trains the critic.

    The clipped value loss of PPO's reference implementation (OpenAI baselines, ppo2; see arXiv:2005.12729).
    """
    values, old, returns = read(x, "values"), read(x, "old_values"), read(x, "returns")
    error = (values - returns).square()
    metrics = {"predicted": mean_over(values, x), "return": mean_over(returns, x), "squared_error": mean_over(error, x)}
    if config.clip is None:
        return LossOutput(per_token=error / 2, metrics=metrics, scope="value")
    held = old + (values - old).clamp(-config.clip, config.clip)
    bounded = (held - returns).square()
    metrics |= fraction(bounded > error, x)
    return LossOutput(per_token=error.maximum(bounded) / 2, metrics=metrics, scope="value")
