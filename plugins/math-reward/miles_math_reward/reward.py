"""The reward `math`."""

from __future__ import annotations

from miles_core.types import Sample, Score
from miles_math_reward import MathConfig
from miles_math_reward.equality import equal
from miles_math_reward.places import answer_text, last_marked


class MathReward:
    """1 when the answer equals the label, or one of the labels when it is a list; else 0. A function of its arguments
    alone: it may run in any thread or process, under the time limit of whoever runs it."""

    def __init__(self, config: MathConfig) -> None:
        self.config = config

    def score(self, sample: Sample) -> Score:
        """Raises ValueError for a prompt without a label: 0 would be a verdict."""
        label = sample.prompt.label if sample.prompt is not None else None
        golds = [gold_text(one) for one in (label if isinstance(label, (list, tuple)) else [label])]
        if not golds or not all(golds):
            raise ValueError(f"math needs a label, and the prompt's is {label!r}")
        answer = answer_text(sample.response, self.config.require_box)
        if answer is None:
            return Score(value=0.0, parts={"answered": 0.0}, reason="no answer found")
        policy = {"percent": self.config.percent, "decimal_comma": self.config.decimal_comma}
        right = any(equal(gold, answer, **policy) for gold in golds)
        return Score(value=float(right), parts={"answered": 1.0})


def gold_text(label: object) -> str:
    """The answer in a label: the last one marked in it (as in a full solution), or all of it."""
    if label is None:
        return ""
    text = str(label).strip()
    found = last_marked(text)
    return (found.content or "") if found is not None else text
