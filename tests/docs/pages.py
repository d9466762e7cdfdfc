"""Reading Markdown pages: sections, fenced blocks and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w*)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: "```language info", its text, and the offsets of the whole in the page."""

    language: str
    info: str
    text: str
    start: int
    stop: int


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def blocks(text: str, language: str = "") -> list[Block]:
    """The fenced blocks of a page, of one language or of all."""
    found = [Block(m[1], m[2].strip(), m[3], m.start(), m.end()) for m in FENCE.finditer(text)]
    return [b for b in found if not language or b.language == language]


def without_blocks(text: str) -> str:
    return FENCE.sub("", text)


def sections(text: str, level: int) -> dict[str, str]:
    """Heading -> body of every section at `level`, each up to the next heading of this level or above."""
    plain = FENCE.sub(lambda m: re.sub(r"(?m)^#", "\0", m[0]), text)  # a comment in a block is no heading
    heads = list(re.finditer(rf"(?m)^(#{{1,{level}}}) (.+)$", plain))
    ends = [h.start() for h in heads[1:]] + [len(plain)]
    found = {h[2].strip(): plain[h.end() : e] for h, e in zip(heads, ends, strict=True) if len(h[1]) == level}
    return {head: body.replace("\0", "#") for head, body in found.items()}


def anchors(text: str) -> set[str]:
    """The fragments that headings of a page can be linked by, as GitHub makes them."""
    found: set[str] = set()
    for line in without_blocks(text).splitlines():
        if match := re.match(r"#{1,6} (.+)", line):
            slug = re.sub(r"[^\w\- ]", "", match[1].strip().lower()).replace(" ", "-")
            number = 0
            while (name := slug if not number else f"{slug}-{number}") in found:
                number += 1
            found.add(name)
    return found


def links(text: str) -> list[str]:
    """Targets of inline links and images, outside code."""
    prose = re.sub(r"`[^`\n]*`", "", without_blocks(text))
    return re.findall(r"\]\(([^)\s]+)\)", prose)
