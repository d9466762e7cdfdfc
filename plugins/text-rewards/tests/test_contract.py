"""The contract suite of rewards, on each of them."""

from __future__ import annotations

import miles_text_rewards
from miles_core.testing.contracts import RewardContract

FORMAT, LENGTH, F1, IFEVAL = miles_text_rewards.miles_rewards()
JUNK = (
    *RewardContract.junk,
    "<think>" * 20_000,
    "[" * 50_000,
    "*" * 50_001,
    "." * 50_000 + "x",
    "<<" * 50_000,
    "a<" * 20_000,
)


class TestFormat(RewardContract):
    component = FORMAT
    right = "<think>2 and 2</think>\n<answer>4</answer>"
    wrong = "<think>2 and 2</think> 4"
    junk = JUNK


class TestFormatByPattern(RewardContract):
    component = FORMAT
    options = {"tags": (), "pattern": r"(\w+ ?)+: \d+", "partial": True, "pattern_s": 0.2}
    right = "the answer: 4"
    wrong = "four"
    junk = JUNK


class TestLengthOfWords(RewardContract):
    component = LENGTH
    options = {"unit": "words", "limit": 10, "ramp": 5}
    right = "short"
    wrong = "a very " * 5 + "long answer"
    junk = JUNK


class TestLengthInTokens(RewardContract):
    """The suite gives a sample as many tokens as its text has characters, up to 9."""

    component = LENGTH
    options = {"shape": "target", "target": 2, "limit": 10}
    right = "ab"
    wrong = "abcdef"
    junk = JUNK


class TestF1(RewardContract):
    component = F1
    label = ["the Eiffel Tower", "Tour Eiffel"]
    right = "Eiffel Tower."
    wrong = "the Louvre"
    junk = JUNK


class TestIFEval(RewardContract):
    component = IFEVAL
    options = {"score": "fraction", "loose": True}
    label = {
        "instruction_id_list": [
            "punctuation:no_comma", "length_constraints:number_sentences", "detectable_content:number_placeholders",
            "detectable_format:number_highlighted_sections", "detectable_format:title",
            "detectable_format:multiple_sections",
        ],
        "kwargs": [{}, {"num_sentences": 1, "relation": "at least"}, {"num_placeholders": 1}, {"num_highlights": 1}, {},
                   {"section_spliter": "Part", "num_sections": 2}],
    }  # fmt: skip
    right = "<<A title>>\nPart 1\nOne [sentence] is *enough*.\nPart 2"
    wrong = "No, it is, not"
    junk = JUNK
