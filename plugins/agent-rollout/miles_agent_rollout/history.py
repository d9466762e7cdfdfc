"""The next turn's context: the ids of the turns before, kept as they were sampled, and the ids of what is new.

A chat template renders whole conversations, and some change what was said before: they drop the thinking of earlier
answers, trim blanks, or close a turn otherwise than the model did. So the whole conversation is rendered again, and its
text compared with the text that the ids so far stand for. Where that is a beginning of it, the rest is what is new. Where
it is not, history has been rewritten, and the conversation goes on in a new segment, rendered from its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from miles_agent_rollout.turns import Message
from miles_core.errors import ConfigError, DataError
from miles_core.interfaces import Tokenizer
from miles_core.types import Generation

LOOK_AHEAD = 8
"""Tokens that one character may be spread over, where byte-level tokens do not end at characters."""


def answer_text(tokenizer: Tokenizer, answer: Generation) -> str:
    """What the model wrote, special tokens included, without the stop token at its end."""
    ids = np.asarray(answer.token_ids)
    if answer.finish == "stop" and len(ids) and int(ids[-1]) in tokenizer.stop_token_ids:
        ids = ids[:-1]
    return tokenizer.decode(ids, skip_special=False)


def continued(
    tokenizer: Tokenizer,
    so_far: np.ndarray,
    versions: Iterable[Sequence[Message]],
    tools: Sequence[Any],
    images: Sequence[Any] = (),
) -> np.ndarray | None:
    """int32[C]: `so_far` and the ids of what a conversation adds to it, or None when no version of the conversation begins
    with the text of `so_far`. Versions differ in how answers are told: raw text, or parsed tool calls."""
    for messages in versions:
        try:
            ids = np.asarray(tokenizer.render(messages, tools, images).token_ids)
        except (ConfigError, DataError):  # some templates want parsed tool calls, some refuse them
            continue
        new = _new_ids(tokenizer, ids, so_far)
        if new is not None:
            return np.concatenate([so_far, new]).astype(np.int32)
    return None


def appended(tokenizer: Tokenizer, so_far: np.ndarray, new: Sequence[Message], tools: Sequence[Any]) -> np.ndarray:
    """int32[C]: `so_far` and `new` messages as the template renders them after a short stand-in conversation, whatever
    it would make of the real history. The end of the turn is not doubled where the model sampled it.

    Raises DataError when the template rewrites even the stand-in.
    """
    stand_in = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    opened = np.asarray(tokenizer.render(stand_in, tools).token_ids)
    ids = continued(tokenizer, opened, [[*stand_in, *new]], tools)
    if ids is None:
        raise DataError(
            "the chat template cannot append to a conversation: it rewrites what stands before",
            'choose history = "segment", which then opens a new segment',
        )
    rest = ids[len(opened) :]
    stop = int(so_far[-1]) if len(so_far) else -1
    if len(rest) and stop == int(rest[0]) and stop in tokenizer.stop_token_ids:
        rest = rest[1:]
    return np.concatenate([so_far, rest]).astype(np.int32)


def _new_ids(tokenizer: Tokenizer, ids: np.ndarray, so_far: np.ndarray) -> np.ndarray | None:
    """Ids of the text that `ids` add to that of `so_far`, or None when theirs does not begin with it.

    Texts are compared from shortly before the first id that differs: what stands before is the same, and long.
    """
    size = min(len(ids), len(so_far))
    differ = np.flatnonzero(ids[:size] != so_far[:size])
    at = max((int(differ[0]) if len(differ) else size) - LOOK_AHEAD, 0)
    ids, so_far = ids[at:], so_far[at:]
    said, whole = (tokenizer.decode(part, skip_special=False) for part in (so_far, ids))
    if len(whole) <= len(said) or not whole.startswith(said):
        return None
    if not len(differ):
        return ids[len(so_far) :]
    cut = _boundary(tokenizer, ids, said)
    if cut is not None:
        return ids[cut:]
    none, new = tokenizer.encode("").token_ids, tokenizer.encode(whole[len(said) :]).token_ids
    if len(none) and np.array_equal(new[: len(none)], none):
        new = new[len(none) :]  # the BOS that every text of its own gets
    together = tokenizer.decode(np.concatenate([so_far, new]), skip_special=False)
    return np.asarray(new) if together == whole else None


def _boundary(tokenizer: Tokenizer, ids: np.ndarray, text: str) -> int | None:
    """k such that `ids[:k]` stand for `text`, if there is one; found by bisection on the length of the text."""

    def text_of(k: int) -> str:
        return tokenizer.decode(ids[:k], skip_special=False)

    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(text_of(middle)) < len(text):
            low = middle + 1
        else:
            high = middle
    return next((k for k in range(low, min(low + LOOK_AHEAD, len(ids)) + 1) if text_of(k) == text), None)
