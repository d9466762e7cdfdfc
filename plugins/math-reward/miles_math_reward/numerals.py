"""Plain numbers, read as a person would read them and kept exact: integers with thousands separators, decimals, scientific
notation, powers, fractions, mixed numbers, percentages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPONENT = 4096
ABSOLUTE, RELATIVE = Fraction(1, 2_000_000), Fraction(1, 100_000)
"""A decimal may stand for a number that it was rounded from: right to 6 decimals, and to 5 significant digits, so that
tiny numbers are not all equal."""

_INT = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(rf"({_INT})?(\.\d+)?(?:[eE]([+-]?\d+))?")
_TIMES_TEN = re.compile(r"(.+?)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{([+-]?\d+)\}|([+-]?\d+))")
_POWER = re.compile(rf"({_INT})\s*\^\s*(?:\{{([+-]?\d+)\}}|([+-]?\d+))")
_SLASH = re.compile(r"([^/\s]+)\s*/\s*([^/\s]+)")
_FRAC = re.compile(r"\\frac\s*(?:\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|(\d))\s*(?:\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|(\d))")
_MIXED = re.compile(rf"({_INT})(?:\s+(?=\d)|\s*(?=\\frac))(\d+\s*/\s*\d+|\\frac.*)")
_COMMA = re.compile(r"(\d+),(\d+)")


@dataclass(frozen=True, slots=True)
class Numeral:
    """`decimal`: written with a decimal fraction, and so perhaps rounded."""

    value: Fraction
    decimal: bool = False
    percent: bool = False


def read(text: str, decimal_comma: bool = False) -> Numeral | None:
    """The number that the whole of `text` is, or None."""
    text = text.strip()
    bare = text.removesuffix("%").strip()
    percent = bare != text
    if decimal_comma and (match := _COMMA.fullmatch(bare.lstrip("+-"))) and (len(match[2]) != 3 or match[1] == "0"):
        bare = bare.replace(",", ".")
    sign = -1 if bare.startswith("-") else 1
    found = _unsigned(bare[1:].strip() if bare[:1] in ("+", "-") else bare)
    if found is None:
        return None
    return Numeral(sign * found.value / (100 if percent else 1), found.decimal, percent)


def _unsigned(text: str) -> Numeral | None:
    for reader in (_decimal, _scientific, _power, _fraction, _mixed):
        found = reader(text)
        if found is not None:
            return found
    return None


def _decimal(text: str) -> Numeral | None:
    match = _DECIMAL.fullmatch(text)
    if not match or not (match[1] or match[2]):
        return None
    digits = Fraction((match[1] or "0").replace(",", "") + (match[2] or ""))
    scale = _ten_to(match[3] or "0")
    return None if scale is None else Numeral(digits * scale, decimal=bool(match[2]))


def _scientific(text: str) -> Numeral | None:
    match = _TIMES_TEN.fullmatch(text)
    base = match and _decimal(match[1])
    scale = match and _ten_to(match[2] or match[3])
    return Numeral(base.value * scale, base.decimal) if base and scale else None


def _power(text: str) -> Numeral | None:
    match = _POWER.fullmatch(text)
    if not match:
        return None
    base, exponent = int(match[1].replace(",", "")), int(match[2] or match[3])
    if abs(exponent) * max(base.bit_length(), 1) > 4 * MAX_EXPONENT or (base == 0 and exponent < 0):
        return None
    return Numeral(Fraction(base) ** exponent)


def _fraction(text: str) -> Numeral | None:
    if match := _SLASH.fullmatch(text):
        above, below = match[1], match[2]
    elif match := _FRAC.fullmatch(text):
        above, below = match[1] or match[2] or "", match[3] or match[4] or ""
    else:
        return None
    top, bottom = _atom(above), _atom(below)
    return Numeral(top.value / bottom.value, top.decimal or bottom.decimal) if top and bottom and bottom.value else None


def _atom(text: str) -> Numeral | None:
    text = text.strip().removeprefix("(").removesuffix(")") if text.strip().startswith("(") else text.strip()
    sign = -1 if text.startswith("-") else 1
    found = _decimal(text.removeprefix("-")) or _power(text.removeprefix("-"))
    return found and Numeral(sign * found.value, found.decimal)


def _mixed(text: str) -> Numeral | None:
    match = _MIXED.fullmatch(text)
    part = match and _fraction(match[2].strip())
    return Numeral(int(match[1].replace(",", "")) + part.value) if part else None


def _ten_to(exponent: str) -> Fraction | None:
    power = int(exponent) if len(exponent) <= 6 else MAX_EXPONENT + 1
    return Fraction(10) ** power if abs(power) <= MAX_EXPONENT else None


def same(gold: Numeral, answer: Numeral, percent: str = "strict") -> bool:
    """Whether two numbers are equal under the percent policy. With "either", 50% may stand for 50 where the other one is
    not written as a percentage."""
    if _close(gold, gold.value, answer, answer.value):
        return True
    if percent == "either" and gold.percent != answer.percent:
        return _close(
            gold, gold.value * (100 if gold.percent else 1), answer, answer.value * (100 if answer.percent else 1)
        )
    return False


def _close(gold: Numeral, a: Fraction, answer: Numeral, b: Fraction) -> bool:
    if a == b or not (gold.decimal or answer.decimal):
        return a == b
    return abs(a - b) <= ABSOLUTE and abs(a - b) <= RELATIVE * abs(a)
