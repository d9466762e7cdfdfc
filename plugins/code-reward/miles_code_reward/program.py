"""The program in a response, and whether what it printed is what was expected."""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.answers import spoken


def program_in(response: str, languages: Sequence[str], require_fence: bool) -> str | None:
    """The last closed fenced block of one of `languages`, or else the last without a language; None when there is none.

    A block that is cut off is no program, and nothing inside <think> is. Without `require_fence` a response without any
    fence is a program as a whole.
    """
    text = spoken(response)
    if text is None:
        return None
    found: dict[bool, str] = {}
    language: str | None = None
    lines: list[str] = []
    any_fence = False
    for line in text.split("\n"):
        mark = line.strip()
        if language is None and mark.startswith("```"):
            words = mark.lstrip("`").split()
            language, lines, any_fence = (words[0].lower() if words else ""), [], True
        elif language is not None and mark == "```":
            if language == "" or language in languages:
                found[bool(language)] = "\n".join(lines)
            language = None
        elif language is not None:
            lines.append(line)
    whole = None if require_fence or any_fence or not text.strip() else text
    return found.get(True, found.get(False, whole))


def same_output(got: str, expected: str, how: str, tolerance: float) -> bool:
    """`how`: "exact"; "lines": but for white space at the ends of lines and of the text; "tokens": word by word, where
    numbers may differ by `tolerance`, relative or absolute."""
    if how == "exact":
        return got == expected
    if how == "lines":
        return _lines(got) == _lines(expected)
    ours, theirs = got.split(), expected.split()
    return len(ours) == len(theirs) and all(_near(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().replace("\r\n", "\n").split("\n")]


def _near(got: str, expected: str, tolerance: float) -> bool:
    if got == expected:
        return True
    try:
        a, b = float(got), float(expected)
    except ValueError:
        return False
    return abs(a - b) <= tolerance * max(1.0, abs(b))
