"""Verdicts of `format`, `length` and `f1`, with what each number comes from."""

from __future__ import annotations

import time

import pytest
from pydantic import ValidationError

from miles_core import Prompt
from miles_core.testing.samples import make_sample
from miles_text_rewards import F1Config, FormatConfig, LengthConfig
from miles_text_rewards.form import FormatReward
from miles_text_rewards.length import LengthReward
from miles_text_rewards.overlap import F1Reward

EOS = "<|im_end|>"


def sample(response: str = "", tokens: int = 2, label=None, **metadata):
    made = make_sample(tokens, prompt=Prompt(id="p", text="q", label=label, metadata=metadata))
    made.response = response
    return made


def formatted(response: str, **options):
    return FormatReward(FormatConfig(**options)).score(sample(response))


# --- format ----------------------------------------------------------------------------------------------------------

GOOD = "<think>so</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("response", "options", "value"),
    [
        (GOOD, {}, 1.0),
        (f"  {GOOD}\n", {}, 1.0),
        (GOOD + EOS, {}, 1.0),  # R8: the end of the turn right after the tag
        (GOOD + EOS + "<answer>5</answer>", {}, 1.0),  # R8: what follows it does not count
        (f"Sure! {GOOD}", {}, 0.0),
        (f"{GOOD} So 4.", {}, 0.0),
        (f"Sure! {GOOD} So 4.", {"strict": False}, 1.0),
        ("<answer>4</answer><think>so</think>", {"strict": False}, 0.0),
        ("<think>so</think><answer>4", {}, 0.0),
        ("<think>so<answer>4</answer>", {}, 0.0),
        ("<think>so</think><answer></answer>", {}, 0.0),
        ("<think> </think><answer>4</answer>", {"nonempty": False}, 1.0),
        (GOOD + "<answer>5</answer>", {"strict": False}, 0.0),
        ("<think>so<answer>4</answer></think>", {"strict": False}, 0.0),
        ("<think>so</think></think><answer>4</answer>", {}, 0.0),
        ("so</think><answer>4</answer>", {"opened": True}, 1.0),
        (GOOD, {"opened": True}, 0.0),  # opened twice
        ("<a>1</a>", {"tags": ("a",)}, 1.0),
        ("", {}, 0.0),
    ],
)
def test_R8_tags(response, options, value):
    assert formatted(response, **options).value == value


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (GOOD, 1.0),
        ("<think>so</think> 4", 1 / 3),  # think, not answer, not the order
        ("<answer>4</answer><think>so</think>", 2 / 3),  # both tags, not the order
        ("4", 0.0),
    ],
)
def test_partial_credit_counts_tags_and_their_order(response, value):
    assert formatted(response, partial=True).value == pytest.approx(value)


def test_parts_and_reason_say_what_is_missing():
    verdict = formatted("<think>so</think> 4")
    assert verdict.parts == {"think": 1.0, "answer": 0.0, "order": 0.0}
    assert verdict.reason == "not well formed: answer, order"


def test_a_pattern_matches_the_whole_response():
    options = {"tags": (), "pattern": r"Answer: \d+"}
    assert [formatted(t, **options).value for t in ("Answer: 4" + EOS, "Answer: 4\n", "So Answer: 4")] == [1.0, 1.0, 0.0]


def test_a_pattern_that_takes_for_ever_gives_no_verdict_in_time():
    """(a+)+b needs 2^n steps for n letters a without a b."""
    start = time.monotonic()
    verdict = formatted("a" * 40 + "!", tags=(), pattern=r"(a|aa)+b", pattern_s=0.1)
    assert verdict.value is None and verdict.reason == "the pattern took longer than 0.1 s on 41 characters"
    assert time.monotonic() - start < 3


def test_an_endless_response_is_scanned_in_no_time():
    start = time.monotonic()
    for piece in ("<think>", "</think>", "<think></think><answer>"):
        assert formatted(piece * 50_000).value == 0.0
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "("}, "not a regular expression"),
        ({"tags": ()}, "every response would be well formed"),
        ({"tags": ("<think>",)}, "names without brackets"),
        ({"tags": ("a", "a")}, "different names"),
        ({"tags": (), "pattern": "a", "opened": True}, "opened speaks of the first"),
    ],
)
def test_options_of_format_that_cannot_be(options, message):
    with pytest.raises(ValidationError, match=message):
        FormatConfig(**options)


# --- length ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "length", "value"),
    [
        # budget: limit 100, ramp 20: free up to 80
        ({"limit": 100, "ramp": 20}, 80, 0.0),
        ({"limit": 100, "ramp": 20}, 85, -0.25),  # (100 - 20 - 85) / 20
        ({"limit": 100, "ramp": 20}, 100, -1.0),
        ({"limit": 100, "ramp": 20}, 500, -1.0),
        ({"limit": 100}, 100, 0.0),  # without a ramp the limit itself is free
        ({"limit": 100}, 101, -1.0),
        # target 50, limit 100
        ({"shape": "target", "target": 50, "limit": 100}, 50, 1.0),
        ({"shape": "target", "target": 50, "limit": 100}, 25, 0.75),  # 1 - 25/100
        ({"shape": "target", "target": 50, "limit": 100}, 75, 0.75),
        ({"shape": "target", "target": 50, "limit": 100}, 200, 0.0),  # 1 - 150/100, not below 0
        # cosine from 2 to 1 over 100
        ({"shape": "cosine", "start": 2.0, "end": 1.0, "limit": 100}, 0, 2.0),
        ({"shape": "cosine", "start": 2.0, "end": 1.0, "limit": 100}, 50, 1.5),  # cos(pi / 2) = 0
        ({"shape": "cosine", "start": 2.0, "end": 1.0, "limit": 100}, 100, 1.0),
        ({"shape": "cosine", "start": 2.0, "end": 1.0, "limit": 100}, 101, 1.0),
        ({"shape": "cosine", "start": 2.0, "end": 1.0, "limit": 100, "over": -1.0}, 101, -1.0),
        ({"shape": "cosine", "start": -1.0, "end": 0.0, "limit": 60}, 20, -0.75),  # 0 - 1 (1 + cos 60 deg) / 2
    ],
)
def test_values_by_length(options, length, value):
    verdict = LengthReward(LengthConfig(**options)).score(sample(tokens=length))
    assert verdict.value == pytest.approx(value) and verdict.parts == {"length": length}


def test_only_sampled_tokens_count():
    made = make_sample(4, mask=[1, 1, 0, 1])  # one token came from a tool
    assert LengthReward(LengthConfig(limit=10)).length(made) == 3


@pytest.mark.parametrize(("unit", "length"), [("words", 3), ("characters", 11)])
def test_text_is_counted_before_the_end_of_the_turn(unit, length):
    made = LengthReward(LengthConfig(limit=10, unit=unit))
    assert (
        made.length(sample("two  words!" + EOS + " not these" if unit == "characters" else f"one two three{EOS}x"))
        == length
    )


def test_the_target_may_come_with_the_prompt():
    made = LengthReward(LengthConfig(shape="target", target_key="budget", limit=100))
    assert made.score(sample(tokens=30, budget=50)).value == pytest.approx(0.8)  # 1 - 20/100
    assert made.target(sample(budget=7.0)) == 7.0
    for wrong in ({}, {"budget": "50"}, {"budget": True}, {"budget": -1}, {"budget": float("nan")}):
        with pytest.raises(ValueError, match=r'reads the target from prompt.metadata\["budget"\]'):
            made.score(sample(**wrong))
    assert LengthReward(LengthConfig(shape="target", target_key="budget", target=9, limit=100)).target(sample()) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 10, "ramp": 20}, "longer than limit"),
        ({"limit": 10, "target": 5}, 'shape = "budget" does not read target'),
        ({"limit": 10, "shape": "target"}, "needs target or target_key"),
        ({"limit": 10, "shape": "cosine", "ramp": 1}, 'shape = "cosine" does not read ramp'),
        ({"limit": 0}, "greater than 0"),
    ],
)
def test_options_of_length_that_cannot_be(options, message):
    with pytest.raises(ValidationError, match=message):
        LengthConfig(**options)


# --- f1 --------------------------------------------------------------------------------------------------------------


def judged(response: str, label, **options):
    return F1Reward(F1Config(**options)).score(sample(response, label=label))


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("in Paris France", "Paris", 0.5),  # p = 1/3, r = 1: 2 (1/3) / (4/3)
        ("big big dog", "big dog", 0.8),  # p = 2/3, r = 1: (4/3) / (5/3)
        ("big dog", "big big dog", 0.8),
        ("cat", "dog", 0.0),
        ("", "dog", 0.0),
        ("red car", ["blue car", "red car", "x"], 1.0),  # the best reference counts
        ("don't", "dont", 1.0),
        ("the the", "The The", 1.0),  # nothing would be left of the reference
        ("", "The The", 0.0),
        ("<think>dog</think> cat", "dog", 0.0),
        ("<think>cat", "cat", 0.0),
        ("It is <answer>dog</answer>, not a cat", "dog", 1.0),
        ("dog" + EOS + "cat", "dog", 1.0),
        ("1,000", "1000", 1.0),
        ("\u201cdog\u201d", "dog", 1.0),  # punctuation outside ASCII
        ("caf\u00e9", "cafe\u0301", 1.0),  # composed and decomposed
        (42, 42, 1.0),
    ],
)
def test_f1(response, label, value):
    assert judged(str(response), label).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("options", "response", "label", "value"),
    [
        ({"metric": "exact"}, "The dog!", "dog", 1.0),
        ({"metric": "exact"}, "big dog", "dog", 0.0),
        ({"metric": "exact"}, "dog big", "big dog", 0.0),  # order counts
        ({"lower": False}, "Dog", "dog", 0.0),
        ({"punctuation": True}, "dog.", "dog", 0.0),
        ({"articles": ("der", "die", "das")}, "der Hund", "Hund", 1.0),
        ({"unit": "characters"}, "\u5317\u4eac\u5e02", "\u5317\u4eac", 0.8),  # p = 2/3, r = 1
        ({"after": "Answer:"}, "cat Answer: dog", "dog", 1.0),
        ({"after": "Answer:"}, "dog", "dog", 0.0),
    ],
)
def test_options_of_f1(options, response, label, value):
    assert judged(response, label, **options).value == pytest.approx(value)


def test_both_numbers_are_kept():
    assert judged("in Paris France", "Paris").parts == {"f1": 0.5, "exact": 0.0}


@pytest.mark.parametrize("label", [None, [], "", " ", ["dog", ""]])
def test_a_missing_label_is_an_error_and_not_a_zero(label):
    with pytest.raises(ValueError, match="f1 needs a label"):
        judged("dog", label)
