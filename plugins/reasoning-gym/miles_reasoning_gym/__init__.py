"""Tasks made on the fly, with their own scorers: the datasets of reasoning-gym."""

from __future__ import annotations

import re
from string import Formatter
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from miles_core import BuildContext, Component, ComponentConfig, Environment, hookimpl


class ReasoningGymConfig(ComponentConfig):
    """Options of the data source `reasoning-gym`. Texts with braces are templates: `{question}` is the dataset's question,
    `{part}` what `pattern` finds in it; literal braces are doubled."""

    dataset: str
    """Name of the dataset, for example "basic_arithmetic"."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The dataset's own parameters, checked by reasoning-gym itself."""
    size: int | None = Field(default=None, gt=0)
    """Number of different problems, after which the first one comes again; without it, new ones for ever."""
    seed_offset: int = Field(default=0, ge=0)
    """Another set of problems for the same run seed."""
    system: str | None = None
    """Text of a system message; "" is an empty one, and without it the chat template decides."""
    shots: tuple[tuple[str, str], ...] = ()
    """Solved examples, (question, answer) each, told as earlier turns of the chat."""
    pattern: str | None = None
    """A regular expression searched in the question; `{part}` is its first group, or the whole match."""
    template: str = "{question}"
    """The user's message."""
    open_answer: str | None = None
    """Text that opens the assistant's turn; the model goes on after it."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _known_fields(self) -> ReasoningGymConfig:
        for name in ("template", "open_answer"):
            for _, used, _, _ in Formatter().parse(getattr(self, name) or ""):
                if used not in (None, "question", "part"):
                    raise ValueError(f"{name} may hold {{question}} and {{part}}, not {{{used}}}; double literal braces")
                if used == "part" and self.pattern is None:
                    raise ValueError(f"{name} holds {{part}}, and there is no pattern that finds it")
        return self


class ReasoningGymRewardConfig(ComponentConfig):
    """Options of the reward `reasoning-gym`."""

    extract: Literal["all", "first-line", "last-integer"] = "all"
    """What of the response is scored: all of it, its first line that is not blank, or its last integer."""
    exact: bool = False
    """Only a full score counts: no partial credit, which many datasets give for an answer inside longer text."""


def _build_data(config: ReasoningGymConfig, context: BuildContext) -> Any:
    from miles_reasoning_gym.source import ReasoningGymSource

    return ReasoningGymSource(config, context.seed)


def _check_data(config: ReasoningGymConfig, environment: Environment) -> None:
    from miles_reasoning_gym.source import check

    check(config, environment.where)


def _build_reward(config: ReasoningGymRewardConfig, context: BuildContext) -> Any:
    from miles_reasoning_gym.scorer import ReasoningGymReward

    return ReasoningGymReward(config, context)


@hookimpl
def miles_data_sources() -> list[Component[Any]]:
    return [
        Component(
            name="reasoning-gym",
            summary="Problems of a reasoning-gym dataset, as many as are needed.",
            config=ReasoningGymConfig,
            build=_build_data,
            check=_check_data,
        )
    ]


@hookimpl
def miles_rewards() -> list[Component[Any]]:
    return [
        Component(
            name="reasoning-gym",
            summary="The score that a reasoning-gym dataset gives to an answer.",
            config=ReasoningGymRewardConfig,
            build=_build_reward,
        )
    ]
