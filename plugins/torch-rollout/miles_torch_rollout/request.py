"""A request while the engine works on it: its tokens, where they stop, and under which weights each was sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from miles_core.types import GenerateRequest, Generation, Status, VersionSpan

Decode = Callable[[list[int]], str]

SLACK = 4
"""Tokens decoded before the longest stop string could have begun, so that a character in several tokens is whole."""


@dataclass(slots=True, eq=False)
class Running:
    """One request. The engine's thread owns everything but `future`, which belongs to `loop`."""

    request: GenerateRequest
    limit: int
    """Most tokens that it may sample: the smaller of max_new_tokens and what the context has room for."""
    stop_ids: frozenset[int]
    decode: Decode | None
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Generation]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    """[start, stop, version], in order."""
    cached_tokens: int = 0
    tail: int = 0
    """Last tokens to decode when looking for stop strings."""

    def __post_init__(self) -> None:
        longest = max((len(text.encode()) for text in self.request.params.stop), default=0)
        self.tail = longest + SLACK

    @property
    def context(self) -> np.ndarray:
        """int32: the prompt and what has been sampled."""
        prompt = np.asarray(self.request.token_ids, dtype=np.int32)
        return np.concatenate([prompt, np.array(self.tokens, dtype=np.int32)]) if self.tokens else prompt

    @property
    def need(self) -> int:
        """Tokens at its longest."""
        return len(self.request.token_ids) + self.limit

    def accept(self, token: int, logprob: float, version: int) -> Status | None:
        """Adds a token; says how the request ended, if it did."""
        at = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][2] == version:
            self.spans[-1][1] = at + 1
        else:
            self.spans.append([at, at + 1, version])
        if token in self.stop_ids or self._hits_stop_string():
            return "stop"
        return "length" if at + 1 >= self.limit else None

    def _hits_stop_string(self) -> bool:
        """One that is found ends in the last token: an earlier one would have ended the request. A token is at least one
        byte long, which bounds how far back it can begin."""
        stop = self.request.params.stop
        if not stop or self.decode is None:
            return False
        text = self.decode(self.tokens[-self.tail :])
        return any(string in text for string in stop)

    def result(self, finish: Status, incarnation: str, reason: str = "") -> Generation:
        return Generation(
            id=self.request.id,
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            finish=finish,
            versions=tuple(VersionSpan(start=a, stop=b, version=v) for a, b, v in self.spans),
            incarnation=incarnation,
            cached_tokens=self.cached_tokens,
            reason=reason,
        )

    def deliver(self, outcome: Generation | BaseException) -> None:
        """Hands the outcome to the event loop; a caller that is gone misses nothing."""

        def settle() -> None:
            if self.future.done():
                return
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(settle)
