"""The reward `overlong`: a penalty for answers that come near the length limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from miles_core.component import BuildContext, Component, ComponentConfig, Environment
from miles_core.errors import ConfigError
from miles_core.types import Sample, Score


class OverlongConfig(ComponentConfig):
    """Options of `overlong`. The weight of its `[[reward]]` table is the size of the penalty."""

    cache_tokens: int = Field(gt=0)
    """L_cache: over the last so many tokens before the limit the penalty grows from 0 to 1. DAPO: 4096 of 20480."""
    max_tokens: int = Field(default=0, ge=0)
    """L_max: the length that gets the whole penalty; 0 takes `rollout.sampling.max_new_tokens`."""


@dataclass(slots=True, frozen=True)
class Overlong:
    """Soft overlong punishment, DAPO, arXiv:2503.14476 eq. 13: of an answer of n tokens 0 for n <= max - cache,
    (max - cache - n) / cache up to max, and -1 beyond. n counts the tokens after the prompt of the last segment."""

    max_tokens: int
    cache_tokens: int

    def score(self, sample: Sample) -> Score:
        excess = sample.num_response_tokens - (self.max_tokens - self.cache_tokens)
        penalty = min(max(excess / self.cache_tokens, 0.0), 1.0)
        return Score(value=0.0 - penalty, parts={"tokens": float(sample.num_response_tokens)})


def _limit(config: OverlongConfig, run: Any) -> int:
    return config.max_tokens or run.rollout.sampling.max_new_tokens


def _check(config: OverlongConfig, env: Environment) -> None:
    """Refuses a ramp that does not fit, and combinations in which a penalty of 0 would wipe out all other scores."""
    run = env.run_config
    limit = _limit(config, run)
    if config.cache_tokens > limit:
        raise ConfigError(
            f'{env.where}: reward "overlong" has cache_tokens = {config.cache_tokens}, and the longest answer has {limit} '
            "tokens: every answer would be punished",
            "choose cache_tokens below max_tokens (by default rollout.sampling.max_new_tokens), for example a fifth of it",
        )
    rule = run.rewards.combine
    first = run.reward[0].use.rpartition(":")[2] == "overlong"
    if rule == "product" or (rule == "gate" and first):
        raise ConfigError(
            f'{env.where}: reward "overlong" is 0 for answers of a good length, and with rewards.combine = "{rule}" that '
            "makes their whole reward 0",
            'use rewards.combine = "sum"' + (', or put it after the reward that decides ("gate")' if first else ""),
        )


def _build(config: OverlongConfig, context: BuildContext) -> Overlong:
    return Overlong(_limit(config, context.run_config), config.cache_tokens)


COMPONENTS = {
    "miles_rewards": [
        Component(
            name="overlong",
            summary="Penalty that grows as answers come near the length limit (DAPO)",
            config=OverlongConfig,
            build=_build,
            check=_check,
            traits={"inline": True},
        )
    ]
}
