"""Where the answer of a response stands, the same for every reward: before the end of the turn, and after the thinking."""

from __future__ import annotations

ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>", "<eos>", "<end_of_turn>")
"""What follows an end-of-text token, where a tokenizer left it in the text, is not part of the response."""


def before_end(text: str) -> str:
    """`text` up to the first end-of-text token in it."""
    cuts = [at for end in ENDS if (at := text.find(end)) >= 0]
    return text[: min(cuts)] if cuts else text


def after_thinking(text: str) -> str | None:
    """What follows the last </think>; all of a text that never thinks; None while a <think> is open."""
    _, closed, after = text.rpartition("</think>")
    rest = after if closed else text
    return None if "<think>" in rest else rest


def spoken(response: str) -> str | None:
    """The part of a response in which an answer counts, or None when it never stops thinking."""
    return after_thinking(before_end(response))
