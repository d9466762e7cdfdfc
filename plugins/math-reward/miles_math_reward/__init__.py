"""Whether a response gives the right mathematical answer."""

from __future__ import annotations

from typing import Any, Literal

from miles_core import BuildContext, Component, ComponentConfig, Environment, hookimpl


class MathConfig(ComponentConfig):
    """Options of the reward `math`. What counts as equal is pinned, row by row, in the package's `cases.toml`."""

    require_box: bool = True
    """Only a marked answer counts: \\boxed{...}, <answer>...</answer> or a line "#### ...". Otherwise, where nothing is
    marked, the text after the last "answer is" or "answer:", the last formula between dollars or the last number counts."""
    percent: Literal["strict", "either"] = "strict"
    """"strict": 50% is 1/2 and nothing else. "either": it may also stand for 50."""
    decimal_comma: bool = False
    """Whether 0,5 is 1/2. Groups of three digits after a comma stay thousands."""


def _check(config: MathConfig, environment: Environment) -> None:
    import math_verify


def _build(config: MathConfig, context: BuildContext) -> Any:
    from miles_math_reward.reward import MathReward

    return MathReward(config)


@hookimpl
def miles_rewards() -> list[Component[Any]]:
    return [
        Component(
            name="math",
            summary="1 when the marked answer equals the label as mathematics, else 0.",
            config=MathConfig,
            build=_build,
            check=_check,
        )
    ]
