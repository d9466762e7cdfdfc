"""Tools of the tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

from miles_agent_rollout import tool
from miles_agent_rollout.parsers import Call, Parsed


@tool
def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


async def shout(text: str) -> str:
    return text.upper()


def boom() -> str:
    raise ValueError("no luck")


def spin() -> str:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


def die() -> str:
    os._exit(7)


def remember(word: str, context) -> str:
    """Remembers words."""
    words = context.state.setdefault("words", [])
    words.append(word)
    return " ".join(words)


def rows() -> dict:
    return {"b": [1, 2]}


def always(text: str):
    """A parser: whatever is said, it is a call."""
    return Parsed(content=text, calls=[Call(name="add", arguments={"a": 1})])


def first_is_call(text: str):
    """A parser: "he" calls, everything else does not."""
    return Parsed(content=text, calls=[Call(name="add", arguments={"a": 1})] if text == "he" else [])


async def nap() -> str:
    await asyncio.sleep(10)
    return "slept"


def anything(*words: str) -> str:
    return " ".join(words)
