"""Where in a response the answer stands."""

from __future__ import annotations

import re
from typing import NamedTuple

from miles_core.answers import spoken

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_SAID = re.compile(r"answer\s*(?:is|:|=)\s*:?\s*([^\n]*)", re.IGNORECASE)
_DOLLARS = re.compile(r"\$([^$\n]+)\$")
_NUMBER = re.compile(r"[-\u2212]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?%?")


class Marked(NamedTuple):
    start: int
    end: int
    content: str | None
    """None: the brace of the box is never closed."""


def answer_text(response: str, require_box: bool) -> str | None:
    """The text of the answer, or None when there is none.

    Thinking does not count: only what follows the last </think> does, and nothing does while <think> is open.
    """
    text = spoken(response)
    if text is None:
        return None
    found = last_marked(text)
    if found is not None:
        return found.content
    return None if require_box else _guessed(text)


def last_marked(text: str) -> Marked | None:
    """The last marked answer. Lines "#### ..." may be headings, so they count only where there is neither box nor tag.
    A box that is never closed is an answer without content: the text was cut inside it."""
    boxes = [_box_at(text, match) for match in _BOX.finditer(text)]
    tags = [Marked(*match.span(), match[1].strip()) for match in _TAG.finditer(text)]
    hashes = [Marked(*match.span(), match[1].strip()) for match in _HASHES.finditer(text)]
    outer = [box for box in boxes if not any(_holds(other, box) for other in boxes)]
    places = [*outer, *(tag for tag in tags if not any(_holds(tag, box) for box in outer))] or hashes
    return max(places, key=lambda place: place.end, default=None)


def _holds(outer: Marked, inner: Marked) -> bool:
    return outer.content is not None and outer.start < inner.start and inner.end < outer.end


def _box_at(text: str, match: re.Match[str]) -> Marked:
    depth = 1
    for place in range(match.end(), len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return Marked(match.start(), place, text[match.end() : place].strip())
    return Marked(match.start(), len(text), None)


def _guessed(text: str) -> str | None:
    for pattern in (_SAID, _DOLLARS, _NUMBER):
        found = pattern.findall(text)
        if found and found[-1].strip():
            return found[-1].strip()
    return None
