"""Advantages beyond those of the core (`grpo`, `rloo`, `gae`): options and registration; the arithmetic is `estimators`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

from pydantic import Field

from miles_core import BuildContext, Component, ComponentConfig, Environment, NoOptions, hookimpl
from miles_core.advantages import KL_COLUMNS, order_check
from miles_core.errors import ConfigError
from miles_policy_advantages import estimators

GROUP = {"baseline": "group"}
"""Compares the answers to one prompt with each other."""
UNBIASED = ("constant-length", "sequence-mean-token-sum")
"""Aggregations without Dr. GRPO's length bias; they differ by a constant factor."""


class DrGrpoConfig(ComponentConfig):
    """Options of `dr-grpo`."""

    any_aggregation: bool = False
    """Allow a `train.aggregation` that divides by an answer's length or by the tokens of a batch; the paper's loss divides
    by a constant, "constant-length"."""


class ScaleConfig(ComponentConfig):
    """Options of `reinforce-pp-baseline`."""

    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation of the batch."""


class ReinforcePpConfig(ComponentConfig):
    """Options of `reinforce-pp`."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Beta of the penalty beta * (old_logprobs - reference_logprobs) per token in the return; above 0 it needs
    `[roles.reference]`."""
    over: Literal["tokens", "trajectories"] = "tokens"
    """What counts once in mean and standard deviation of the batch: every trainable token, or every trajectory."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation of the batch."""


class GdpoConfig(ComponentConfig):
    """Options of `gdpo`."""

    weights: Mapping[str, float] = {}
    """Weight of each reward by its name; empty takes `weight` of all `[[reward]]` tables."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to both standard deviations, that of a reward in its group and that of the batch."""


class DistillationConfig(ComponentConfig):
    """Options of `on-policy-distillation`."""

    coef: float = Field(default=1.0, gt=0)
    """Factor of the reverse KL; what stands before it in the chain keeps its own scale."""
    gamma: float = Field(default=0.0, ge=0, le=1)
    """Discount of the differences at later tokens; 0 rates each token by its own."""
    clip: float | None = Field(default=None, gt=0)
    """Bound on |old_logprobs - teacher_logprobs| per token, in nats; None is none."""


class WhitenConfig(ComponentConfig):
    """Options of `whiten`."""

    shift: bool = True
    """Subtract the mean; False only divides, and leaves zeros and signs as they are."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


# --- Checks ----------------------------------------------------------------------------------------------------------


def _check_dr_grpo(config: DrGrpoConfig, env: Environment) -> None:
    order_check("dr-grpo", first=True)(config, env)
    if env.run_config is None or config.any_aggregation or env.run_config.train.aggregation in UNBIASED:
        return
    raise ConfigError(
        f'{env.where}: advantage "dr-grpo" is made for a loss over a constant length, and train.aggregation is '
        f'"{env.run_config.train.aggregation}", which brings back the length bias that it removes',
        'set train.aggregation = "constant-length" (L is train.constant_length, or else max_new_tokens)',
        "or set any_aggregation = true in [advantage.dr-grpo], or use grpo with std = false",
    )


def _check_gdpo(config: GdpoConfig, env: Environment) -> None:
    order_check("gdpo", first=True)(config, env)
    if env.run_config is None:
        return
    if env.run_config.rewards.combine != "sum":
        raise ConfigError(
            f'{env.where}: advantage "gdpo" weighs each reward by itself, and rewards.combine = '
            f'"{env.run_config.rewards.combine}" would have no effect on it',
            'leave rewards.combine at "sum", or use grpo',
        )
    known = _table_weights(env.run_config)
    unknown = sorted(set(config.weights) - set(known))
    if unknown:
        raise ConfigError(
            f'{env.where}: advantage "gdpo" weighs a reward "{unknown[0]}", and no [[reward]] has that name',
            f"rewards: {', '.join(sorted(known)) or 'none'}",
        )
    if not any((config.weights or known).values()):
        raise ConfigError(f'{env.where}: advantage "gdpo" has no reward with a weight other than 0')


def _table_weights(run_config: Any) -> dict[str, float]:
    """The weight of each `[[reward]]` table by the name of its score."""
    return {table.name or table.use.rpartition(":")[2]: table.weight for table in run_config.reward}


# --- Components ------------------------------------------------------------------------------------------------------


def _build(function: Callable[..., Any], config: ComponentConfig, context: BuildContext) -> Any:
    """`function` with every option that it takes."""
    return partial(function, **{name: getattr(config, name) for name in type(config).model_fields})


def _build_dr_grpo(config: DrGrpoConfig, context: BuildContext) -> Any:
    return estimators.dr_grpo


def _build_gdpo(config: GdpoConfig, context: BuildContext) -> Any:
    weights = config.weights or _table_weights(context.run_config)
    return partial(estimators.gdpo, weights={n: w for n, w in weights.items() if w}, eps=config.eps)


COMPONENTS: list[Component[Any]] = [
    Component(
        name="dr-grpo",
        summary="Rewards minus the group's mean, for a loss over a constant length",
        config=DrGrpoConfig,
        build=_build_dr_grpo,
        check=_check_dr_grpo,
        traits=GROUP,
    ),
    Component(
        name="gdpo",
        summary="Several rewards, each normalised by itself in its group, then weighted, summed and scaled",
        config=GdpoConfig,
        build=_build_gdpo,
        check=_check_gdpo,
        traits=GROUP,
    ),
    Component(
        name="on-policy-distillation",
        summary="Minus the reverse KL to a teacher at each sampled token, added to what stands before it",
        config=DistillationConfig,
        build=partial(_build, estimators.on_policy_distillation),
        requires=("role/teacher",),
        needs=lambda config: frozenset({"old_logprobs", "teacher_logprobs"}),
    ),
    Component(
        name="opo",
        summary="Rewards minus the group's mean weighted by length, which minimises the gradient's variance",
        build=partial(_build, estimators.opo),
        check=order_check("opo", first=True),
        traits=GROUP,
    ),
    Component(
        name="reinforce-pp",
        summary="Rewards, optionally less a KL penalty per token, normalised over the whole batch",
        config=ReinforcePpConfig,
        build=partial(_build, estimators.reinforce_pp),
        requires=lambda config: ("role/reference",) if config.kl_coef else (),
        needs=lambda config: KL_COLUMNS if config.kl_coef else frozenset(),
        check=order_check("reinforce-pp", first=True),
    ),
    Component(
        name="reinforce-pp-baseline",
        summary="Rewards minus the group's mean, over the standard deviation of the whole batch",
        config=ScaleConfig,
        build=partial(_build, estimators.reinforce_pp_baseline),
        check=order_check("reinforce-pp-baseline", first=True),
        traits=GROUP,
    ),
    Component(
        name="remax",
        summary="Rewards minus that of a greedy answer to the same prompt",
        build=partial(_build, estimators.remax),
        needs=lambda config: frozenset({"baseline"}),
        check=order_check("remax", first=True),
    ),
    Component(
        name="whiten",
        summary="Advantages of the one before it, normalised over all trainable tokens of the batch",
        config=WhitenConfig,
        build=partial(_build, estimators.whiten),
        check=order_check("whiten", first=False),
    ),
]


@hookimpl
def miles_advantages() -> Iterable[Component[Any]]:
    return COMPONENTS
