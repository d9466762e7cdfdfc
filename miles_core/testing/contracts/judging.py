"""Suites of the kinds reward and filter."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.testing.contracts.base import ComponentContract, no_error
from miles_core.testing.samples import group_of, make_group, make_sample
from miles_core.types import Prompt, Sample, SampleGroup, Score, Verdict

JUNK = (
    "", " ", "\n" * 50, "x" * 100_000, "9" * 5_000, "\x00\x07\x1b[2J", "\u202e7\u200b", "\U0001f600" * 300, "((((" * 500,
)  # fmt: skip
"""Responses that a model in training does write: nothing, endless repetition, control characters, emoji."""


class RewardContract(ComponentContract):
    """A `Reward` or a `GroupReward`. Set `label`, `right` and `wrong`, or override `sample`."""

    label: Any = "4"
    """The label of the prompt."""
    right: str = "4"
    """A response that must score more than `wrong`."""
    wrong: str = "5"
    junk: tuple[str, ...] = JUNK
    """Responses that must not bring it down."""
    deterministic: bool = True
    """False for a judge that may think otherwise the second time."""
    verdict_s: float = 10.0
    """Limit of one verdict, as `timeout_s` of a [[reward]] table."""

    def sample(self, response: str, index: int = 0) -> Sample:
        """A sample with this response. Override it where the prompt needs more than a label."""
        prompt = Prompt(id="p", text="2 + 2 =", label=self.label)
        made = make_sample(min(len(response), 9), index=index, reward=None, prompt=prompt)
        return replace(made, response=response)

    def verdicts(self, made: Any, samples: list[Sample]) -> list[Any]:
        """What the reward says of each sample; a group reward sees them together."""
        if hasattr(made, "score_group"):
            return list(self._now(made.score_group, group_of(samples)))
        return [self._now(made.score, sample) for sample in samples]

    def _now(self, method: Callable[..., Any], argument: Any) -> Any:
        async def awaited() -> Any:
            value = method(argument)
            return await value if inspect.isawaitable(value) else value

        return in_thread(lambda: asyncio.run(awaited()), self.timeout_s)

    def test_verdicts_are_numbers(self, tmp_path: Path) -> None:
        """A verdict is a float, a `Score`, or None."""
        for value in self.verdicts(self.build(tmp_path), [self.sample(self.right), self.sample(self.wrong, 1)]):
            number = value.value if isinstance(value, Score) else value
            assert number is None or isinstance(number, (bool, int, float, np.number)), f"a verdict is {value!r}"

    def test_right_beats_wrong(self, tmp_path: Path) -> None:
        """The right response scores more than the wrong one."""
        right, wrong = self.verdicts(self.build(tmp_path), [self.sample(self.right), self.sample(self.wrong, 1)])
        assert number_of(right) > number_of(wrong), f"{self.right!r} got {right}, {self.wrong!r} got {wrong}"

    def test_junk_is_judged(self, tmp_path: Path) -> None:
        """Empty, endless and strange responses get a finite verdict or None in time: no exception, no NaN."""
        made = self.build(tmp_path)
        self.timeout_s = self.verdict_s
        for response in self.junk:
            with no_error(f"scoring {response!r:.40}"):
                verdicts = self.verdicts(made, [self.sample(response)])
            for value in verdicts:
                parts = [value.value, *value.parts.values()] if isinstance(value, Score) else [value]
                odd = [x for x in parts if x is not None and not math.isfinite(x)]
                assert not odd, f"{response!r:.40} got {value}"

    def test_the_same_sample_gets_the_same_verdict(self, tmp_path: Path) -> None:
        """Unless `deterministic` is False, a verdict depends on the sample alone: not on what was judged before."""
        made = self.build(tmp_path)
        texts = (self.right, self.wrong, self.junk[0])
        first = [self.verdicts(made, [self.sample(text)]) for text in texts]
        again = [self.verdicts(made, [self.sample(text)]) for text in reversed(texts)][::-1]
        if self.deterministic:
            assert [[key(v) for v in row] for row in first] == [[key(v) for v in row] for row in again]

    def test_the_sample_is_not_changed(self, tmp_path: Path) -> None:
        """A reward reads. What it writes into a sample is lost, or worse, trained."""
        sample = self.sample(self.right)
        before = snapshot(sample)
        self.verdicts(self.build(tmp_path), [sample])
        assert snapshot(sample) == before, "the reward changed the sample"

    def test_every_sample_of_a_group_gets_a_verdict(self, tmp_path: Path) -> None:
        """`score_group` gives one verdict per sample, in order, for groups of any size."""
        made = self.build(tmp_path)
        for size in (1, 2, 5):
            samples = [self.sample(self.right if i % 2 else self.wrong, i) for i in range(size)]
            got = self.verdicts(made, samples)
            assert len(got) == size, f"{len(got)} verdicts for {size} samples"


def in_thread(function: Callable[[], Any], limit_s: float) -> Any:
    """The result of a function that may never come back: it is then left behind in its thread."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return future.result(limit_s)
    except TimeoutError:
        if future.done():
            raise
        raise AssertionError(f"it did not finish within {limit_s:g} s") from None


def number_of(value: Any) -> float:
    number = value.value if isinstance(value, Score) else value
    assert number is not None, "no verdict"
    return float(number)


def key(value: Any) -> Any:
    """A verdict without the time that it took."""
    return (value.value, value.parts, value.reason) if isinstance(value, Score) else value


def snapshot(sample: Sample) -> dict[str, Any]:
    """All fields of a sample, comparable."""
    fields = {name: copy.deepcopy(getattr(sample, name)) for name in Sample.__dataclass_fields__}
    return {n: (v.dtype, v.tolist()) if isinstance(v, np.ndarray) else v for n, v in fields.items()}


def snapshots(group: SampleGroup) -> list[Any]:
    return [group.id, copy.deepcopy(group.prompt), group.num_samples, *map(snapshot, group.samples)]


class FilterContract(ComponentContract):
    """A `Filter`."""

    def groups(self) -> list[SampleGroup]:
        """Groups of every sort: alike, different, without verdicts, failed, of one sample, longer and shorter."""
        long = group_of([make_sample(n, index=i, reward=float(i)) for i, n in enumerate((1, 40))], name="long")
        return [
            make_group([0.0, 1.0, 1.0], name="mixed"),
            make_group([1.0, 1.0], name="solved"),
            make_group([0.0, 0.0], name="unsolved"),
            make_group([None, None], name="unjudged"),
            make_group([0.0, None, 1.0], name="partly"),
            make_group([0.5], name="single"),
            make_group([None, None], name="failed", status="error", reason="x", response=0),
            make_group([0.0, 1.0], name="cut", status="length"),
            long,
        ]

    def verdict(self, made: Any, group: SampleGroup) -> Verdict:
        with no_error(f'check of group "{group.prompt.id}"'):
            return made.check(group)

    def test_verdicts_say_why(self, tmp_path: Path) -> None:
        """Every group, however odd, gets a `Verdict`; one that drops it has a kebab-case reason, which names a counter."""
        made = self.build(tmp_path)
        for group in self.groups():
            verdict = self.verdict(made, group)
            assert isinstance(verdict, Verdict) and isinstance(verdict.keep, bool), f"check gave {verdict!r}"
            reason = re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", verdict.reason)
            assert verdict.keep or reason, f'reason "{verdict.reason}" is not kebab-case'

    def test_it_is_pure(self, tmp_path: Path) -> None:
        """The same group gets the same verdict, whatever was checked before it."""
        made = self.build(tmp_path)
        first = [self.verdict(made, group) for group in self.groups()]
        again = [self.verdict(made, group) for group in reversed(self.groups())][::-1]
        assert first == again

    def test_the_group_is_not_changed(self, tmp_path: Path) -> None:
        """A filter reads."""
        made = self.build(tmp_path)
        for group in self.groups():
            before = snapshots(group)
            self.verdict(made, group)
            assert snapshots(group) == before, "the filter changed the group"
