"""Calling one reward and turning whatever comes of it into an `Outcome`. Runs in reward workers, and in the driver for
built-in rewards that are trusted to be quick."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import traceback
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from miles_core.errors import ContractError
from miles_core.reward_wire import Outcome
from miles_core.types import Sample, SampleGroup, Score

_MAX_TRACEBACK = 8000
_MAX_LINE = 500
_MAX_SCORE = float(np.finfo(np.float32).max)


@dataclass(slots=True, kw_only=True)
class Judge:
    """A built reward. `function` is what error messages call it; `grouped`: it has `score_group` instead of `score`."""

    name: str
    function: str
    method: Any
    grouped: bool
    asynchronous: bool
    context: Any = None

    @classmethod
    def of(cls, name: str, reward: Any, context: Any = None) -> Judge:
        """Raises ContractError when `reward` has neither `score` nor `score_group`."""
        grouped = callable(getattr(reward, "score_group", None))
        method = getattr(reward, "score_group" if grouped else "score", None)
        if not callable(method):
            raise ContractError(
                f'reward "{name}" built a {type(reward).__qualname__}, which has neither score nor score_group'
            )
        function = inspect.unwrap(method)
        where = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(reward).__qualname__)}"
        asynchronous = inspect.iscoroutinefunction(function)
        return cls(name=name, function=where, method=method, grouped=grouped, asynchronous=asynchronous, context=context)


def failed(error: BaseException) -> Outcome:
    """The outcome of a reward that raised; innermost frames are kept when a traceback is very long."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    text = "\n".join(line if len(line) <= _MAX_LINE else line[:_MAX_LINE] + "..." for line in lines) + "\n"
    if len(text) > _MAX_TRACEBACK:
        text = "...\n" + text[-_MAX_TRACEBACK:]
    return Outcome(kind="error", reason=f"error: {type(error).__name__}", traceback=text)


def timed_out(limit_s: float) -> Outcome:
    return Outcome(kind="timeout", reason=f"timeout after {limit_s:g} s", seconds=limit_s)


def outcome_of(value: Any, function: str) -> Outcome:
    """The outcome for a returned `value`: None is no verdict; NaN, infinities and other types are errors."""
    number, parts, reason = (value.value, value.parts, value.reason) if isinstance(value, Score) else (value, {}, "")
    try:
        checked = {key: _number(part, f'part "{key}" of the score', function) for key, part in parts.items()}
        if number is None:
            return Outcome(kind="none", parts=checked, reason=reason or "no verdict")
        return Outcome(kind="ok", value=_number(number, "a score", function), parts=checked, reason=reason)
    except (TypeError, ValueError, OverflowError) as error:
        return Outcome(kind="error", reason=f"error: {error}")


def _number(value: Any, what: str, function: str) -> float:
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        raise TypeError(f"{function} returned {_short(value)} as {what}; it returns float, int, bool, Score or None")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{function} returned {number} as {what}; None says that there is no verdict")
    if abs(number) > _MAX_SCORE:
        raise ValueError(f"{function} returned {number} as {what}, which advantages cannot hold: they are float32")
    return number


def _short(value: Any) -> str:
    return f"{type(value).__qualname__} {value!r:.60}"


def group_outcomes(values: Any, judge: Judge, expected: int) -> list[Outcome]:
    """One outcome per sample. Raises ContractError naming the function, the expected and the given number of scores: a
    short answer is never broadcast, a long one never cut."""

    def wrong(got: str) -> ContractError:
        return ContractError(
            f'reward "{judge.name}": {judge.function} returned {got} for a group of {expected} samples',
            f"score_group returns one verdict per sample, in order: expected {expected}, got {got}",
        )

    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping, set, frozenset, AsyncIterator)):
        raise wrong(f"1 value ({type(values).__qualname__})")
    scores = list(islice(values, expected + 1))
    if len(scores) != expected:
        more = len(values) if hasattr(values, "__len__") else f"more than {expected}"
        raise wrong(f"{more if len(scores) > expected else len(scores)} scores")
    return [outcome_of(score, judge.function) for score in scores]


def judge_sample(judge: Judge, sample: Sample, loop: asyncio.AbstractEventLoop | None = None) -> Outcome:
    """Scores one sample, whatever the reward raises."""
    start = time.perf_counter()
    try:
        value = judge.method(sample)
        if inspect.isawaitable(value):
            value = _wait(value, loop)
        outcome = outcome_of(value, judge.function)
    except BaseException as error:  # SystemExit and its kin end the sample, not the worker
        outcome = failed(error)
    outcome.seconds = time.perf_counter() - start
    return outcome


def judge_group(judge: Judge, group: SampleGroup, loop: asyncio.AbstractEventLoop | None = None) -> list[Outcome]:
    """Scores a whole group; if the reward raises, no sample has a verdict. Raises ContractError for a wrong number."""
    start = time.perf_counter()
    expected = len(group.samples)
    try:
        values = judge.method(group)
        if inspect.isawaitable(values):
            values = _wait(values, loop)
        outcomes = group_outcomes(values, judge, expected)
    except ContractError:
        raise
    except BaseException as error:
        outcomes = [failed(error) for _ in range(expected)]
    seconds = (time.perf_counter() - start) / max(expected, 1)
    for outcome in outcomes:
        outcome.seconds = seconds
    return outcomes


async def judge_overlapped(judge: Judge, samples: Mapping[int, Sample], limit_s: float, done: Any) -> None:
    """Awaits an asynchronous reward on all `samples` at once; `done(index, outcome)` is called as each one settles.

    A sample over its limit is cancelled. One that blocks the event loop is the parent's to kill.
    """

    async def one(index: int, sample: Sample) -> None:
        start = time.perf_counter()
        task = asyncio.ensure_future(_guarded(judge, sample))
        finished, _ = await asyncio.wait({task}, timeout=limit_s)
        outcome = task.result() if finished else timed_out(limit_s)
        if not finished:
            task.cancel()
        outcome.seconds = time.perf_counter() - start
        done(index, outcome)

    await asyncio.gather(*(one(index, sample) for index, sample in samples.items()))


async def _guarded(judge: Judge, sample: Sample) -> Outcome:
    try:
        return outcome_of(await judge.method(sample), judge.function)
    except BaseException as error:  # inside the task: SystemExit must not reach the event loop
        return failed(error)


def _wait(awaitable: Any, loop: asyncio.AbstractEventLoop | None) -> Any:
    async def guarded() -> tuple[Any, BaseException | None]:
        try:
            return await awaitable, None
        except BaseException as error:
            return None, error

    assert loop is not None, "an asynchronous reward is never scored inline"
    value, error = loop.run_until_complete(guarded())
    if error is not None:
        raise error
    return value
