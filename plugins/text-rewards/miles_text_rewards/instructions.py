"""Instructions whose following can be checked by a program, under the names and arguments of IFEval (arXiv 2311.07911), so
that its data sets can be used as they are. The checks are our own; README.md says what each counts.

A check gets the response, without white space around it and never empty, and the instruction's arguments. All are
linear in the length of the response.
"""

from __future__ import annotations

import inspect
import json
import re
import string
from collections.abc import Callable
from typing import Any

Check = Callable[..., bool]
INSTRUCTIONS: dict[str, Check] = {}
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": lambda found, wanted: found >= wanted,
    "at most": lambda found, wanted: found <= wanted,
    "less than": lambda found, wanted: found < wanted,
    "more than": lambda found, wanted: found > wanted,
    "exactly": lambda found, wanted: found == wanted,
}
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]+(?=[\"')\]]*(?:\s|$))")
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No|Fig|Inc|Jr|Sr)|\b[A-Z])$")
_FENCE = re.compile(r"```(?:json|JSON|Json)?\s*\n?")


class Unavailable(Exception):
    """A check needs something that is not installed."""


def check(name: str) -> Callable[[Check], Check]:
    """Registers a check; its keyword-only parameters are the instruction's arguments."""

    def register(function: Check) -> Check:
        assert name not in INSTRUCTIONS, name
        INSTRUCTIONS[name] = function
        return function

    return register


def follows(name: str, kwargs: dict[str, Any], response: str) -> bool:
    """Raises ValueError for an instruction that is unknown, or whose arguments are not what it takes."""
    function = INSTRUCTIONS.get(name)
    if function is None:
        raise ValueError(f'no instruction "{name}"; there are: {", ".join(sorted(INSTRUCTIONS))}')
    given = {key: value for key, value in kwargs.items() if value is not None}
    wanted = {key: p for key, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
    missing = [key for key, p in wanted.items() if p.default is p.empty and key not in given]
    foreign = sorted(given.keys() - wanted.keys())
    if missing or foreign:
        found = [*(f"lacks {key}" for key in missing), *(f"does not take {key}" for key in foreign)]
        raise ValueError(f'instruction "{name}" {", ".join(found)}')
    return bool(response.strip()) and bool(function(response.strip(), **given))


def related(found: int, relation: str, wanted: int) -> bool:
    if relation not in RELATIONS:
        raise ValueError(f'no relation "{relation}"; there are: {", ".join(RELATIONS)}')
    return RELATIONS[relation](found, wanted)


# --- Keywords --------------------------------------------------------------------------------------------------------


@check("keywords:existence")
def existence(text: str, *, keywords: list[str]) -> bool:
    return all(word.casefold() in text.casefold() for word in keywords)


@check("keywords:frequency")
def frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return related(text.casefold().count(keyword.casefold()), relation, frequency)


@check("keywords:forbidden_words")
def forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


@check("keywords:letter_frequency")
def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return related(text.lower().count(letter.lower()), let_relation, let_frequency)


# --- Language and case -----------------------------------------------------------------------------------------------


@check("language:response_language")
def response_language(text: str, *, language: str) -> bool:
    try:
        import langdetect
    except ImportError:
        raise Unavailable('needs langdetect: pip install "miles-text-rewards[language]"') from None
    langdetect.DetectorFactory.seed = 0  # it draws samples otherwise
    try:
        found = langdetect.detect(text)
    except langdetect.LangDetectException:  # nothing in it belongs to a language
        return False
    return found.partition("-")[0] == language.partition("-")[0]


@check("change_case:english_capital")
def english_capital(text: str) -> bool:
    return text.isupper()


@check("change_case:english_lowercase")
def english_lowercase(text: str) -> bool:
    return text.islower()


@check("change_case:capital_word_frequency")
def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return related(sum(word.isupper() for word in _WORD.findall(text)), capital_relation, capital_frequency)


# --- Length ----------------------------------------------------------------------------------------------------------


@check("length_constraints:number_words")
def number_words(text: str, *, num_words: int, relation: str) -> bool:
    return related(len(_WORD.findall(text)), relation, num_words)


@check("length_constraints:number_sentences")
def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return related(count_sentences(text), relation, num_sentences)


def count_sentences(text: str) -> int:
    """Ends of sentences that are no abbreviation, and one more for a rest with a word in it."""
    count, last = 0, 0
    for end in _SENTENCE_END.finditer(text):
        if end[0] == "." and _ABBREVIATION.search(text, max(0, end.start() - 8), end.start()):
            continue
        count += bool(_WORD.search(text, last, end.start()))
        last = end.end()
    return count + bool(_WORD.search(text, last))


@check("length_constraints:number_paragraphs")
def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    parts = [part.strip() for part in text.split("***")]
    if parts and not parts[0]:
        parts = parts[1:]
    if parts and not parts[-1]:
        parts = parts[:-1]
    return all(parts) and len(parts) == num_paragraphs


@check("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    word = parts[nth_paragraph - 1].split()[0]
    return word.strip(string.punctuation).casefold() == first_word.strip(string.punctuation).casefold()


# --- Content and format ----------------------------------------------------------------------------------------------


@check("detectable_content:number_placeholders")
def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders


@check("detectable_content:postscript")
def postscript(text: str, *, postscript_marker: str) -> bool:
    marker = "".join(postscript_marker.split()).casefold()
    return any("".join(line.split()).casefold().startswith(marker) for line in text.split("\n"))


@check("detectable_format:number_bullet_lists")
def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    lines = [line.strip() for line in text.split("\n")]
    bullets = [line for line in lines if line[:1] in ("*", "-") and line[1:2] not in ("", line[:1])]
    return len(bullets) == num_bullets


@check("detectable_format:constrained_response")
def constrained_response(text: str) -> bool:
    return any(answer in text for answer in ANSWERS)


@check("detectable_format:number_highlighted_sections")
def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    found = re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", text)
    return sum(bool(part.strip("* \t")) for part in found) >= num_highlights


@check("detectable_format:multiple_sections")
def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter)}\s?\d+", text)) >= num_sections


@check("detectable_format:json_format")
def json_format(text: str) -> bool:
    start = _FENCE.match(text)
    body = text[start.end() :].removesuffix("```") if start and text.endswith("```") else text
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


@check("detectable_format:title")
def title(text: str) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start + 2 : end].strip("<> \t"):
            return True
    return False


# --- Combination, start and end, punctuation -------------------------------------------------------------------------


@check("combination:two_responses")
def two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@check("combination:repeat_prompt")
def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.casefold().startswith(prompt_to_repeat.strip().casefold())


@check("startend:end_checker")
def end_checker(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').casefold().endswith(end_phrase.strip().strip('"').casefold())


@check("startend:quotation")
def quotation(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] == '"'


@check("punctuation:no_comma")
def no_comma(text: str) -> bool:
    return "," not in text
