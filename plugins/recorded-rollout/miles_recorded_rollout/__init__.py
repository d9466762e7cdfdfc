"""Rollout `recorded`: answers that the data brings become samples; training samples nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, model_validator

from miles_core import BuildContext, Component, ComponentConfig, Environment, hookimpl
from miles_core.errors import ConfigError

KEYS = {"response": ("response_key",), "pair": ("chosen_key", "rejected_key"), "label": (), "last-message": ()}
"""Which keys each kind of answers reads."""


class RecordedConfig(ComponentConfig):
    """Options of the rollout `recorded`."""

    answers: Literal["response", "label", "last-message", "pair"] = "response"
    """Where a row's answer stands: in a column of its own; in the label; in the last message of the chat, which must be the
    assistant's; or in two columns, a chosen and a rejected one, which become a pair for `dpo`. A column or label may
    hold a list of answers, one per sample."""
    response_key: str = "response"
    """Column of the answer: a text, an assistant message, or a list of them; with answers = "response"."""
    chosen_key: str = "chosen"
    """Column of the better answer: a text or an assistant message; with answers = "pair"."""
    rejected_key: str = "rejected"
    """Column of the worse answer; with answers = "pair"."""
    long_answers: Literal["cut", "skip"] = "cut"
    """What happens to an answer longer than rollout.sampling.max_new_tokens or the context allows: "cut" trains its
    beginning without an end (status "length", which train.train_truncated can leave out), "skip" does not train it."""
    stop_token_id: int | None = Field(default=None, ge=0)
    """The token that ends an answer; by default the one that the chat template puts after an assistant's message, and for
    plain text the tokenizer's first stop token."""

    @model_validator(mode="after")
    def _keys_are_read(self) -> RecordedConfig:
        read = KEYS[self.answers]
        for key in ("response_key", "chosen_key", "rejected_key"):
            if key not in read and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f'{key} is not read with answers = "{self.answers}"')
        return self


def _check(config: RecordedConfig, env: Environment) -> None:
    """Raises ConfigError when a pair cannot be a group. How many answers a column holds only the data can say."""
    samples = getattr(getattr(env.run_config, "rollout", None), "samples_per_group", 2)
    if config.answers == "pair" and samples != 2:
        raise ConfigError(
            f"{env.where or 'rollout.use'}: a pair is two samples, and rollout.samples_per_group = {samples}; set it to 2"
        )


def _build(config: RecordedConfig, context: BuildContext) -> Any:
    from miles_recorded_rollout.rollout import Recorded

    return Recorded(config, context.logger)


@hookimpl
def miles_rollouts() -> Iterable[Component[Any]]:
    return [
        Component(
            name="recorded",
            summary="Answers that the data brings, for SFT and DPO; evaluation samples as usual",
            config=RecordedConfig,
            build=_build,
            check=_check,
            traits={"logprobs": "none"},
        )
    ]
