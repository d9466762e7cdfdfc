"""The reward `format`: tags are found by scanning the text once, patterns run under a time limit."""

from __future__ import annotations

import regex

from miles_core.answers import before_end
from miles_core.types import Sample, Score
from miles_text_rewards import FormatConfig


class FormatReward:
    """1 when the response has the form, else 0; with `partial` the fraction of what was asked. Parts: `<tag>` for each
    tag, `order`, `pattern`, where asked."""

    def __init__(self, config: FormatConfig) -> None:
        self.config = config
        self._pattern = regex.compile(config.pattern, regex.DOTALL) if config.pattern is not None else None

    def score(self, sample: Sample) -> Score:
        text = before_end(sample.response).strip()
        parts = self.tags(text) if self.config.tags else {}
        if self._pattern is not None:
            try:
                found = self._pattern.fullmatch(text, timeout=self.config.pattern_s)
            except TimeoutError:
                reason = f"the pattern took longer than {self.config.pattern_s:g} s on {len(text)} characters"
                return Score(value=None, parts=parts, reason=reason)
            parts["pattern"] = float(found is not None)
        missed = [name for name, part in parts.items() if not part]
        value = sum(parts.values()) / len(parts) if self.config.partial else float(not missed)
        return Score(value=value, parts=parts, reason=f"not well formed: {', '.join(missed)}" if missed else "")

    def tags(self, text: str) -> dict[str, float]:
        """1 or 0 for each tag: opened once, closed once, in this order, and not empty; and for their `order`."""
        first = self.config.tags[0]
        text = f"<{first}>{text}" if self.config.opened else text
        parts, spans = {}, []
        for tag in self.config.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            start, end = text.find(opening), text.find(closing)
            once = text.count(opening) == 1 and text.count(closing) == 1 and start < end
            content = text[start + len(opening) : end] if once else ""
            parts[tag] = float(once and (bool(content.strip()) or not self.config.nonempty))
            spans.append((start, end + len(closing)) if once else None)
        parts["order"] = float(self._ordered(text, spans))
        return parts

    def _ordered(self, text: str, spans: list[tuple[int, int] | None]) -> bool:
        place = 0
        for span in spans:
            if span is None or span[0] < place or (self.config.strict and text[place : span[0]].strip()):
                return False
            place = span[1]
        return not (self.config.strict and text[place:].strip())
