"""The reward for answers that are right or wrong by their text. Mathematics is the plugin math-reward's."""

from __future__ import annotations

import re
from typing import Any

from pydantic import field_validator

from miles_core.answers import before_end
from miles_core.component import BuildContext, Component, ComponentConfig
from miles_core.types import Sample


class ExactMatchConfig(ComponentConfig):
    after: str | None = None
    """Only the text after the last occurrence of this marker counts, for example "####" or "</think>"; an answer without
    the marker is wrong."""
    pattern: str | None = None
    """A regular expression: its last match counts, or the first group of that; an answer without a match is wrong."""
    first_line: bool = False
    """Only the first line counts; with `strip`, the first that is not blank."""
    strip: bool = True
    """Remove white space around answer and label."""
    case_sensitive: bool = True
    """Whether "Yes" and "yes" differ."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return value


class ExactMatch:
    """1 when the answer equals the label, or one of the labels when it is a list; else 0. A number is compared as text."""

    def __init__(self, config: ExactMatchConfig) -> None:
        self.config = config
        self._pattern = re.compile(config.pattern) if config.pattern is not None else None

    def score(self, sample: Sample) -> float:
        """Raises ValueError for a prompt without a label: it cannot be judged, and 0 would be a verdict."""
        label = sample.prompt.label if sample.prompt is not None else None
        if label is None or label == []:
            raise ValueError("exact-match needs a label, and the prompt has none")
        answer = self.answer(sample.response)
        labels = label if isinstance(label, (list, tuple)) else [label]
        return float(answer is not None and any(answer == self._normal(str(one)) for one in labels))

    def answer(self, response: str) -> str | None:
        """The part of a response that is compared, or None when it has no such part. An end-of-text token that a tokenizer
        left in the text, and what follows it, is no part of the answer."""
        response = before_end(response)
        if self.config.after is not None:
            _, marker, response = response.rpartition(self.config.after)
            if not marker:
                return None
        if self._pattern is not None:
            matches = list(self._pattern.finditer(response))
            if not matches:
                return None
            response = matches[-1].group(1 if self._pattern.groups else 0) or ""
        if self.config.first_line:
            response = (response.strip() if self.config.strip else response).partition("\n")[0]
        return self._normal(response)

    def _normal(self, text: str) -> str:
        text = text.strip() if self.config.strip else text
        return text if self.config.case_sensitive else text.casefold()


def _build(config: ExactMatchConfig, context: BuildContext) -> ExactMatch:
    return ExactMatch(config)


def _is_quick(config: Any) -> bool:
    """Without a regular expression, which can take for ever, it is a few string operations: no worker is needed."""
    return config.pattern is None


COMPONENTS = {
    "miles_rewards": [
        Component(
            name="exact-match",
            summary="1 when the answer equals the label, else 0",
            config=ExactMatchConfig,
            build=_build,
            traits={"inline": _is_quick},
        )
    ]
}
