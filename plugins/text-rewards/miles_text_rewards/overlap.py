"""The reward `f1`: overlap of words with references."""

from __future__ import annotations

import string
import unicodedata
from collections import Counter

from miles_core.answers import spoken
from miles_core.types import Sample, Score
from miles_text_rewards import F1Config


class F1Reward:
    """F1 of the bags of words after normalisation, the best over all references (SQuAD, arXiv 1606.05250, section 6.1).

    With c common words, counted as often as both have them: precision p = c / words of the answer, recall r = c / words
    of the reference, F1 = 2 p r / (p + r). Parts: `f1`, `exact`, both always.
    """

    def __init__(self, config: F1Config) -> None:
        self.config = config

    def score(self, sample: Sample) -> Score:
        """Raises ValueError for a prompt without a label: 0 would be a verdict."""
        label = sample.prompt.label if sample.prompt is not None else None
        golds = [str(one) for one in (label if isinstance(label, (list, tuple)) else [label]) if one is not None]
        if not golds or not all(gold.strip() for gold in golds):
            raise ValueError(f"f1 needs a label of one or more texts, and the prompt's is {label!r:.80}")
        answer = self.answer(sample.response)
        if answer is None:
            return Score(value=0.0, parts={"f1": 0.0, "exact": 0.0}, reason="no answer found")
        pairs = [self.words(gold, answer) for gold in golds]
        parts = {"f1": max(f1(a, b) for a, b in pairs), "exact": float(any(a == b for a, b in pairs))}
        return Score(value=parts[self.config.metric], parts=parts)

    def answer(self, response: str) -> str | None:
        """What is compared: the text after thinking, the inside of the last <answer>, what follows the marker."""
        text = spoken(response)
        if text is None:
            return None
        start, end = text.rfind("<answer>"), text.rfind("</answer>")
        if 0 <= start < end:
            text = text[start + len("<answer>") : end]
        if self.config.after is not None:
            _, marker, text = text.rpartition(self.config.after)
            if not marker:
                return None
        return text

    def words(self, gold: str, answer: str) -> tuple[list[str], list[str]]:
        """Both as words. A reference of which nothing is left (the band "The The") is compared as it is written."""
        ours = self.normal(gold)
        return (ours, self.normal(answer)) if ours else (gold.casefold().split(), answer.casefold().split())

    def normal(self, text: str) -> list[str]:
        text = unicodedata.normalize("NFC", text)
        text = text.lower() if self.config.lower else text
        if not self.config.punctuation:
            text = "".join(c for c in text if c not in string.punctuation and not unicodedata.category(c).startswith("P"))
        words = [word for word in text.split() if word not in self.config.articles]
        return words if self.config.unit == "words" else list("".join(words))


def f1(gold: list[str], answer: list[str]) -> float:
    common = sum((Counter(gold) & Counter(answer)).values())
    return 2 * common / (len(gold) + len(answer)) if common else 0.0
