"""Whether two answers are the same mathematics: numbers by exact arithmetic, words as words, the rest by math-verify."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import math_verify.grader
import math_verify.parser
import sympy
from math_verify import LatexExtractionConfig, parse, verify

from miles_math_reward import numerals

MAX_CHARACTERS = 500
"""An answer longer than this is no answer; parsing it could take minutes."""

# Its own time limits use signals, which only work in a main thread. Ours stand outside: the worker is killed.
math_verify.parser.TIMEOUT_WARNING_SHOWN = math_verify.grader.TIMEOUT_WARNING_SHOWN = True

_SYMBOLS = str.maketrans(
    {
        "\u2212": "-",
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u00f7": "/",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u00b0": r"^\circ ",
        **dict.fromkeys("\u00a0\u202f\u2009", " "),
    }
)
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), (r"\boxed{", "}"))
_REWRITES = [
    (re.compile(r"\\(?:left|right|displaystyle|[!;:])(?![a-zA-Z])"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=\d)\\[, ](?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\[, ]"), " "),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\\$"), ""),
    (re.compile(r"\\?sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"^\s*\\approx"), ""),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)"), r"\\times "),
    (re.compile(r"(?<![\\A-Za-z])(ln|log|sin|cos|tan)(?![A-Za-z])"), r"\\\1 "),
]
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(.*[\d})])\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?"
    r"|(.*[\d})])\s+(?!or\b|and\b)[A-Za-z]{2}[A-Za-z .]*"
)
_ASSIGNED = re.compile(r"[A-Za-z]\w*\s*=\s*([^=]+)")
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]+)*")
_LOOSE_NUMBERS = re.compile(r"\d\s+\.?\d")


def equal(gold: str, answer: str, *, percent: str = "strict", decimal_comma: bool = False) -> bool:
    """Whether `answer` is `gold`. Nothing that can be parsed raises; what cannot be parsed is compared as text."""
    gold, answer = tidy(gold), tidy(answer)
    if not answer or not gold or len(answer) > MAX_CHARACTERS:
        return False
    if gold == answer:
        return True
    ours, theirs = (numerals.read(_value(text), decimal_comma) for text in (gold, answer))
    if ours is not None and theirs is not None:
        return numerals.same(ours, theirs, percent)
    if _WORDS.fullmatch(gold) or _LOOSE_NUMBERS.search(answer):
        return gold.casefold() == answer.casefold()
    if "%" in answer and ours is None and "%" not in gold:
        return False
    return _symbolic(gold, answer)


def tidy(text: str) -> str:
    """The answer itself: without dollars, bold marks, boxes, closing stops, units and typographic variants."""
    text = text.translate(_SYMBOLS).strip()
    while True:
        before = text
        text = text.strip().rstrip(".,;:").strip()
        for left, right in _WRAPPERS:
            if len(text) >= len(left) + len(right) and text.startswith(left) and text.endswith(right):
                inner = text[len(left) : len(text) - len(right)]
                if left not in inner or left == r"\boxed{":
                    text = inner
        if text == before:
            break
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if match := _UNIT.fullmatch(text):
        text = match[1] or match[2]
    if match := _TEXT.fullmatch(text.strip()):
        text = match[1]
    return text.strip()


def _value(text: str) -> str:
    """What stands right of "x =", for reading a number."""
    match = _ASSIGNED.fullmatch(text)
    return match[1] if match else text


def _symbolic(gold: str, answer: str) -> bool:
    ours, theirs = _parsed(gold), _parsed(answer)
    if ours is None or theirs is None:
        return "".join(gold.split()) == "".join(answer.split())
    return bool(verify(ours, theirs, timeout_seconds=None)) and not _clearly_differ(ours, theirs)


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """A sympy object for the whole of `text`, or None."""
    found = parse(
        f"${text}$",
        [LatexExtractionConfig()],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found[0] if found else None


def _clearly_differ(ours: Any, theirs: Any) -> bool:
    """math-verify compares numbers by 6 decimals, so that all tiny ones are equal: these must agree in 5 digits too."""
    if not all(isinstance(x, sympy.Expr) and x.is_number for x in (ours, theirs)):
        return False
    a, b = sympy.N(ours, 40), sympy.N(theirs, 40)
    if not (a.is_finite and b.is_finite) or abs(a - b) <= float(numerals.RELATIVE) * max(abs(a), abs(b)):
        return False
    return sympy.simplify(ours - theirs) != 0
