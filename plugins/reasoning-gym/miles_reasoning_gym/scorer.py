"""The reward: the dataset's own scorer, guarded against answers that it did not expect."""

from __future__ import annotations

import re
from typing import Any

from miles_core.errors import ContractError
from miles_core.types import Sample, Score
from miles_reasoning_gym import ReasoningGymRewardConfig
from miles_reasoning_gym.problems import METADATA, Problem, entry_of, open_dataset

LONGEST_INTEGER = 4000
"""Digits; Python refuses to convert much longer ones, and no dataset's answer is one."""
# A sign counts where no operand stands before it: the last integer of "7-3" is 3.
_NUMBER = re.compile(r"(?<![\w.)])[-+\u2212]?\d[\d,]*(?:\.\d+)?|\d[\d,]*(?:\.\d+)?")


class ReasoningGymReward:
    """Scores in [0, 1] for most datasets. Works on prompts of the data source `reasoning-gym`, whose metadata say how to
    make the problem again."""

    def __init__(self, config: ReasoningGymRewardConfig, context: Any = None) -> None:
        self.config, self.context = config, context

    def score(self, sample: Sample) -> Score:
        """Raises ContractError for a prompt of another data source, and what the dataset's scorer raises on its own
        answer. An answer that only the scorer cannot read is wrong: 0, with the reason, and counted as a metric."""
        problem = problem_of(sample)
        dataset = open_dataset(*problem[:4])
        entry = entry_of(problem)
        answer = extract(sample.response, self.config.extract)
        if answer is None:
            return Score(value=0.0, reason="no integer in the response")
        try:
            value = float(dataset.score_answer(answer, entry))
        except Exception as error:
            dataset.score_answer(entry["answer"], entry)  # raises too when the scorer, and not the answer, is at fault
            if self.context is not None:
                self.context.metric("unreadable", 1.0, "sum")
            return Score(value=0.0, reason=f"the scorer cannot read this answer: {type(error).__name__}")
        if self.config.exact:
            return Score(value=float(value >= 1.0), parts={"partial": value})
        return Score(value=value)


def problem_of(sample: Sample) -> Problem:
    row = sample.prompt.metadata.get(METADATA) if sample.prompt is not None else None
    if row is None:
        raise ContractError(
            'the reward reasoning-gym scores prompts of the data source "reasoning-gym" only, and this prompt is of another'
        )
    return Problem(*row)


def extract(response: str, how: str) -> str | None:
    """The part of a response that is scored; None when "last-integer" finds no number, or one with a fraction."""
    if how == "first-line":
        return response.strip().partition("\n")[0].strip()
    if how == "last-integer":
        numbers = _NUMBER.findall(response)
        whole, _, fraction = numbers[-1].partition(".") if numbers else ("", "", "")
        if not numbers or fraction.strip("0"):
            return None
        digits = whole.replace(",", "").replace("\u2212", "-")
        return str(int(digits)) if len(digits) <= LONGEST_INTEGER else digits
    return response
