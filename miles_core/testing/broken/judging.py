"""Broken rewards and filters."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from miles_core.testing import suites
from miles_core.testing.broken import Shelf
from miles_core.types import Sample, SampleGroup, Verdict

COUNTER = itertools.count()

REWARD = Shelf(suites.ExactMatch)


class Equal:
    """A good reward."""

    def score(self, sample: Sample) -> Any:
        return float(sample.response.strip() == sample.prompt.label)


@REWARD.breaks("test_verdicts_are_numbers")
class SaysItInWords(Equal):
    def score(self, sample: Sample) -> Any:
        return "right" if super().score(sample) else "wrong"


@REWARD.breaks("test_right_beats_wrong")
class LikesEverything(Equal):
    def score(self, sample: Sample) -> Any:
        return 1.0


@REWARD.breaks("test_junk_is_judged")
class WantsANumber(Equal):
    def score(self, sample: Sample) -> Any:
        return float(int(sample.response) == int(sample.prompt.label))


@REWARD.breaks("test_junk_is_judged")
class DividesByLength(Equal):
    def score(self, sample: Sample) -> Any:
        return super().score(sample) / len(sample.response) if sample.response else float("nan")


@REWARD.breaks("test_junk_is_judged", verdict_s=0.3)
class NeverComesBack(Equal):
    def score(self, sample: Sample) -> Any:
        time.sleep(3600 if len(sample.response) > 1000 else 0)
        return super().score(sample)


@REWARD.breaks("test_junk_is_judged", verdict_s=0.3)
class WaitsForAJudge(Equal):
    async def score(self, sample: Sample) -> Any:
        await asyncio.sleep(3600 if len(sample.response) > 1000 else 0)
        return super().score(sample)


@REWARD.breaks("test_the_same_sample_gets_the_same_verdict")
class GrowsTired(Equal):
    def score(self, sample: Sample) -> Any:
        return super().score(sample) - 0.01 * next(COUNTER)


@REWARD.breaks("test_the_sample_is_not_changed")
class TidiesUp(Equal):
    def score(self, sample: Sample) -> Any:
        sample.metadata["seen"] = True
        return super().score(sample)


@REWARD.breaks("test_every_sample_of_a_group_gets_a_verdict")
class JudgesTheBest:
    def score_group(self, group: SampleGroup) -> list[float]:
        return [max(Equal().score(sample) for sample in group.samples)]


FILTER = Shelf(suites.NonzeroStd)


class Mixed:
    """A good filter."""

    def check(self, group: SampleGroup) -> Verdict:
        differ = len({s.reward for s in group.samples}) > 1
        return Verdict(keep=differ, reason="" if differ else "all-equal")


@FILTER.breaks("test_verdicts_say_why")
class GivesNoReason(Mixed):
    def check(self, group: SampleGroup) -> Verdict:
        return Verdict(keep=super().check(group).keep)


@FILTER.breaks("test_verdicts_say_why")
class ComparesWithNone(Mixed):
    def check(self, group: SampleGroup) -> Verdict:
        return Verdict(keep=max(s.reward for s in group.samples) > 0, reason="all-zero")


@FILTER.breaks("test_it_is_pure")
class KeepsEveryOther(Mixed):
    def check(self, group: SampleGroup) -> Verdict:
        return Verdict(keep=next(COUNTER) % 2 == 0, reason="not-its-turn")


@FILTER.breaks("test_the_group_is_not_changed")
class Sorts(Mixed):
    def check(self, group: SampleGroup) -> Verdict:
        group.samples.reverse()
        return super().check(group)
