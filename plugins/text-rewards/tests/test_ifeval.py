"""Every instruction on a response that follows it and one that does not."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import miles_text_rewards
from miles_core import Prompt
from miles_core.testing.samples import make_sample
from miles_text_rewards import IFEvalConfig
from miles_text_rewards.ifeval import IFEvalReward
from miles_text_rewards.instructions import INSTRUCTIONS, count_sentences, follows

TABLE = [
    # name, arguments, follows, does not follow
    ("keywords:existence", {"keywords": ["Sun", "moon"]}, "sunny moon", "sun"),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "at least"}, "Go, go", "go"),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "less than"}, "go", "go go"),
    ("keywords:forbidden_words", {"forbidden_words": ["rain"]}, "rainy train", "No RAIN."),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 3, "let_relation": "at least"}, "eEe", "ee"),
    ("change_case:english_capital", {}, "ALL 4 OF US.", "All"),
    ("change_case:english_lowercase", {}, "all 4 of us.", "All"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "NASA and A", "NASA"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, "NASA", "NASA ESA"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two-three", "one two"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at most"}, "one two three", "1 2 3 4"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "exactly"}, "one two three", "1 2 3 4"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "more than"}, "1 2 3 4", "one two three"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two", "Dr. No is one."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\nTwo", "One\n\nTwo"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\nOne\n***\nTwo\n***", "One\n***\n***\nTwo"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "well"},
        'So\n\n\n"Well," it is',
        "Well\n\nSo",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\nP. S. More", "Bye, P.S. more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye\np.p.s. more", "Bye\nP.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "Two:\n* a\n- b\n---", "* a"),
    ("detectable_format:constrained_response", {}, "Well. My answer is maybe.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**", "*one* and ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\nSubSection 2",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    ("detectable_format:json_format", {}, "[1, 2]", "Here: [1, 2]"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<<>> text"),
    ("combination:two_responses", {}, "one ****** two", "one ****** one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why? "}, "why? Because.", "Because."),
    ("startend:end_checker", {"end_phrase": "The end."}, "So it was. the END.\n", "The end. Almost"),
    ("startend:quotation", {}, '"Quoted."', '"'),
    ("punctuation:no_comma", {}, "one two", "one, two"),
]


@pytest.mark.parametrize(("name", "kwargs", "good", "bad"), TABLE, ids=[f"{i}-{row[0]}" for i, row in enumerate(TABLE)])
def test_instructions(name, kwargs, good, bad):
    assert follows(name, kwargs, good) and not follows(name, kwargs, bad)


def test_every_instruction_is_in_the_table_and_in_the_readme():
    readme = Path(miles_text_rewards.__file__).parents[1] / "README.md"
    documented = set(re.findall(r"^\| `([a-z_]+:[a-z_]+)`", readme.read_text("utf-8"), re.MULTILINE))
    assert documented == set(INSTRUCTIONS)
    assert {row[0] for row in TABLE} | {"language:response_language"} == set(INSTRUCTIONS)


@pytest.mark.parametrize("name", sorted(INSTRUCTIONS))
def test_an_empty_response_follows_nothing(name):
    kwargs = next((row[1] for row in TABLE if row[0] == name), {"language": "en"})
    assert not follows(name, kwargs, " \n")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("Wait... what?! Yes", 3),
        ('He said "no." Then left.', 2),
        ("Version 3.5 of Mr. Smith, e.g. here", 1),
        ("J. Smith came. So did U. Eco.", 2),
        ("...", 0),
        ("no end", 1),
        ("a.\n\nb.", 2),
    ],
)
def test_sentences_are_counted(text, count):
    assert count_sentences(text) == count


# --- The reward ------------------------------------------------------------------------------------------------------

TWO = {"instructions": [{"id": "punctuation:no_comma"}, {"id": "change_case:english_lowercase", "kwargs": {"x": None}}]}


def judged(response: str, label=TWO, **options):
    made = make_sample(2, prompt=Prompt(id="p", text="q", label=label))
    made.response = response
    return IFEvalReward(IFEvalConfig(**options)).score(made)


def test_all_or_the_fraction():
    assert judged("so it is").value == 1.0
    assert judged("so, it is").value == 0.0 and judged("so, it is", score="fraction").value == 0.5


def test_parts_and_reason():
    verdict = judged("so, it is")
    parts = {"punctuation:no_comma": 0.0, "change_case:english_lowercase": 1.0, "fraction": 0.5}
    assert verdict.parts == parts and verdict.reason == "not followed: punctuation:no_comma"


def test_one_instruction_twice_has_two_parts():
    name = "keywords:existence"
    label = {"instruction_id_list": [name, name], "kwargs": [{"keywords": ["a"], "relation": None}, {"keywords": ["z"]}]}
    assert judged("a", label).parts == {name: 1.0, f"{name}#1": 0.0, "fraction": 0.5}


def test_thinking_and_what_follows_the_end_do_not_count():
    assert judged("<think>well, WELL</think> so it is<|im_end|>, NO").value == 1.0
    assert judged("<think>so it is").value == 0.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("Sure, here:\nso it is", TWO),  # without the first line
        ("so it is\nHope that helps, bye", TWO),  # without the last
        ("Sure, here:\nso it is\nBye, then", TWO),  # without both
        ('*"quoted"*', [{"id": "startend:quotation"}]),  # without asterisks
    ],
)
def test_loose_forgives_introductions_and_marks(response, label):
    assert judged(response, label).value == 0.0 and judged(response, label, loose=True).value == 1.0


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, "needs instructions as the label"),
        ([], "needs instructions as the label"),
        ("words", "is not JSON"),
        ([{"name": "x"}], "an instruction of a label is"),
        ([{"id": "length:words"}], 'no instruction "length:words"; there are: change_case:'),
        ([{"id": "keywords:existence"}], 'instruction "keywords:existence" lacks keywords'),
        ([{"id": "punctuation:no_comma", "kwargs": {"n": 1}}], "does not take n"),
        ({"instruction_id_list": ["a"], "kwargs": [{}, {}]}, "1 instructions and 2 sets"),
        (
            [{"id": "length_constraints:number_words", "kwargs": {"num_words": 1, "relation": "about"}}],
            'no relation "about"',
        ),
    ],
)
def test_a_label_that_cannot_be_judged_is_an_error_and_not_a_zero(label, message):
    with pytest.raises(ValueError, match=message):
        judged("text", label)


def test_a_language_without_its_library_is_no_verdict():
    if importlib.util.find_spec("langdetect") is not None:
        pytest.skip("langdetect is installed")
    verdict = judged("Das ist gut.", [{"id": "language:response_language", "kwargs": {"language": "de"}}])
    assert verdict.value is None and 'pip install "miles-text-rewards[language]"' in verdict.reason


def test_languages_are_told_apart():
    pytest.importorskip("langdetect", reason="needs the extra language of miles-text-rewards")
    label = [{"id": "language:response_language", "kwargs": {"language": "de"}}]
    assert judged("Das ist ein ganz gewöhnlicher deutscher Satz.", label).value == 1.0
    assert judged("This is quite an ordinary English sentence.", label).value == 0.0
    assert judged("123 456", label).value == 0.0
