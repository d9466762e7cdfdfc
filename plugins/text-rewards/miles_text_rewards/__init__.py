"""Rewards that look at the text of a response: its form, its length, its words, and the instructions that it follows."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from miles_core import BuildContext, Component, ComponentConfig, hookimpl


class FormatConfig(ComponentConfig):
    """Options of the reward `format`."""

    tags: tuple[str, ...] = ("think", "answer")
    """The response is `<think>...</think><answer>...</answer>` for these names, in this order, each once. Empty: only
    `pattern` counts."""
    strict: bool = True
    """Nothing but white space stands before, between and after the tags."""
    nonempty: bool = True
    """Every tag has content other than white space."""
    opened: bool = False
    """The prompt has opened the first tag already, as chat templates of thinking models do: the response begins inside."""
    partial: bool = False
    """The score is the fraction of tags that are well formed, rather than 1 when everything is and else 0; what `strict`
    asks and the order count as one more, and so does `pattern`."""
    pattern: str | None = None
    """A regular expression (of the package regex; "." matches line ends) that the whole response must match, without what
    follows an end-of-text token and white space around it."""
    pattern_s: float = Field(default=1.0, gt=0)
    """Time limit of the pattern: it stops a match that would take for ever. Then there is no verdict."""

    @field_validator("tags")
    @classmethod
    def _named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        odd = [tag for tag in value if not tag or not all(c.isalnum() or c in "_-" for c in tag)]
        if odd or len(set(value)) < len(value):
            raise ValueError(f"tags are different names without brackets, not {', '.join(map(repr, odd or value))}")
        return value

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        import regex

        try:
            regex.compile(value or "")
        except regex.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _asks_something(self) -> FormatConfig:
        if not self.tags and self.pattern is None:
            raise ValueError("neither tags nor a pattern: every response would be well formed")
        if self.opened and not self.tags:
            raise ValueError("opened speaks of the first of the tags, and there are none")
        return self


class LengthConfig(ComponentConfig):
    """Options of the reward `length`. L is the length of a response."""

    shape: Literal["budget", "target", "cosine"] = "budget"
    """"budget": 0 up to `limit - ramp`, then down a line to -1 at `limit`, and -1 beyond. "target": 1 at `target`, less by
    |L - target| / `limit` down to 0. "cosine": from `start` at L = 0 along half a cosine to `end` at `limit`, and `over`
    beyond."""
    unit: Literal["tokens", "words", "characters"] = "tokens"
    """What is counted: tokens that the policy sampled, words between white space, or characters."""
    limit: int = Field(gt=0)
    """Length at which the shape ends."""
    ramp: int = Field(default=0, ge=0)
    """Of "budget": length of the line before the limit; 0 is a step."""
    target: int | None = Field(default=None, ge=0)
    """Of "target": the length wanted."""
    target_key: str | None = None
    """Of "target": the entry of `prompt.metadata` that holds the length wanted of this prompt; it wins over `target`."""
    start: float = 1.0
    """Of "cosine": value at length 0."""
    end: float = 0.0
    """Of "cosine": value at the limit."""
    over: float | None = None
    """Of "cosine": value beyond the limit; `end` by default."""

    @model_validator(mode="after")
    def _fits(self) -> LengthConfig:
        given = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        foreign = {
            "budget": {"target", "target_key", "start", "end", "over"},
            "target": {"ramp", "start", "end", "over"},
            "cosine": {"ramp", "target", "target_key"},
        }[self.shape] & given
        if foreign:
            raise ValueError(f'shape = "{self.shape}" does not read {", ".join(sorted(foreign))}')
        if self.ramp > self.limit:
            raise ValueError(f"ramp = {self.ramp} is longer than limit = {self.limit}")
        if self.shape == "target" and self.target is None and self.target_key is None:
            raise ValueError('shape = "target" needs target or target_key')
        return self


class F1Config(ComponentConfig):
    """Options of the reward `f1`."""

    metric: Literal["f1", "exact"] = "f1"
    """Harmonic mean of precision and recall of the words; or 1 when they are all the same in the same order, else 0."""
    after: str | None = None
    """Only the text after the last occurrence of this marker is the answer; without it the score is 0. The text inside the
    last `<answer>...</answer>` counts where there is one."""
    lower: bool = True
    """Upper and lower case are the same."""
    punctuation: bool = False
    """Whether punctuation counts; otherwise it is removed, so that "don't" is "dont"."""
    articles: tuple[str, ...] = ("a", "an", "the")
    """Words that do not count."""
    unit: Literal["words", "characters"] = "words"
    """Words between white space; or characters, for languages that do not write blanks."""


class IFEvalConfig(ComponentConfig):
    """Options of the reward `ifeval`. Labels name the instructions and their arguments."""

    score: Literal["all", "fraction"] = "all"
    """1 when every instruction of the label is followed, else 0; or the fraction that is."""
    loose: bool = False
    """An instruction is followed also when it would be without the first or last line, or without asterisks."""


def _module(name: str, attribute: str) -> Any:
    """Builders import their module when they are called: only rewards that are selected cost anything."""

    def build(config: Any, context: BuildContext) -> Any:
        from importlib import import_module

        return getattr(import_module(f"miles_text_rewards.{name}"), attribute)(config)

    return build


@hookimpl
def miles_rewards() -> list[Component[Any]]:
    return [
        Component(
            name="format",
            summary="1 when a response has the tags, or matches the pattern, that was asked for.",
            config=FormatConfig,
            build=_module("form", "FormatReward"),
        ),
        Component(
            name="length",
            summary="How well the length of a response keeps to a budget, a target or a cosine.",
            config=LengthConfig,
            build=_module("length", "LengthReward"),
        ),
        Component(
            name="f1",
            summary="Overlap of words with the best of several references, as on SQuAD; or exact match.",
            config=F1Config,
            build=_module("overlap", "F1Reward"),
        ),
        Component(
            name="ifeval",
            summary="Whether a response follows the verifiable instructions that its label names.",
            config=IFEvalConfig,
            build=_module("ifeval", "IFEvalReward"),
        ),
    ]
