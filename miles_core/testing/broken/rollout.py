"""Rollouts that break a rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from miles_core.builtin.rollouts import SingleTurn
from miles_core.testing import suites
from miles_core.testing.broken import Shelf
from miles_core.types import GenerateRequest, Generation, RolloutContext, SampleGroup

ROLLOUT = Shelf(suites.SingleTurn)


@ROLLOUT.breaks("test_a_group_is_complete")
class LosesTheOrder(SingleTurn):
    async def run_group(self, context: RolloutContext) -> SampleGroup:
        return replace(await super().run_group(context), order=0)


@ROLLOUT.breaks("test_a_group_is_complete")
class DropsTheLast(SingleTurn):
    async def run_group(self, context: RolloutContext) -> SampleGroup:
        group = await super().run_group(context)
        return replace(group, samples=group.samples[:-1])


@ROLLOUT.breaks("test_arrays_have_full_length")
class ResponseLength(SingleTurn):
    async def run_group(self, context: RolloutContext) -> SampleGroup:
        group = await super().run_group(context)
        for sample in group.samples:
            sample.logprobs = sample.logprobs[sample.prompt_len :]
        return group


@ROLLOUT.breaks("test_sampled_tokens_are_the_engines")
class EncodesAgain(SingleTurn):
    async def run_group(self, context: RolloutContext) -> SampleGroup:
        group = await super().run_group(context)
        for sample in group.samples:
            ids = context.tokenizer.encode(sample.response).token_ids
            size = sample.num_response_tokens
            sample.tokens[sample.prompt_len :] = np.resize(ids, size)
        return group


@ROLLOUT.breaks("test_spans_cover_what_was_sampled")
class SpansOfTheAnswer(SingleTurn):
    async def run_group(self, context: RolloutContext) -> SampleGroup:
        group = await super().run_group(context)
        for s in group.samples:
            moved = (replace(v, start=v.start - s.prompt_len, stop=v.stop - s.prompt_len) for v in s.versions)
            s.versions = tuple(moved)
        return group


class OneSeedPool:
    """A pool that gives every request the same seed."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self.pool.generate(replace(request, seed=1))


@ROLLOUT.breaks("test_siblings_differ_and_a_rerun_agrees")
class OneSeed(SingleTurn):
    async def run_group(self, context: RolloutContext) -> SampleGroup:
        return await super().run_group(replace(context, pool=OneSeedPool(context.pool)))


@ROLLOUT.breaks("test_a_failure_is_data")
class RaisesOnFailure(SingleTurn):
    async def run_group(self, context: RolloutContext) -> SampleGroup:
        group = await super().run_group(context)
        if any(s.status == "error" for s in group.samples):
            raise RuntimeError("a sample failed")
        return group


@ROLLOUT.breaks("test_a_failure_is_data")
class HidesFailures(SingleTurn):
    async def run_group(self, context: RolloutContext) -> SampleGroup:
        group = await super().run_group(context)
        return replace(group, samples=[replace(s, status="stop") for s in group.samples])


@ROLLOUT.breaks("test_a_prompt_without_room_is_data")
class RaisesWithoutRoom(SingleTurn):
    async def run_group(self, context: RolloutContext) -> SampleGroup:
        group = await super().run_group(context)
        if any("no room" in s.reason for s in group.samples):
            raise ValueError(f"the prompt is longer than {context.max_context}")
        return group


@ROLLOUT.breaks("test_the_context_is_respected")
class EndlessContext(SingleTurn):
    async def run_group(self, context: RolloutContext) -> SampleGroup:
        return await super().run_group(replace(context, max_context=10**6))


@ROLLOUT.breaks("test_cancelling_ends_it", cancel_s=0.5)
class CannotBeCancelled(SingleTurn):
    async def run_group(self, context: RolloutContext) -> SampleGroup:
        return await super().run_group(replace(context, cancelled=None))


@ROLLOUT.breaks("test_a_partial_group_goes_on")
class StartsAgain(SingleTurn):
    async def run_group(self, context: RolloutContext) -> SampleGroup:
        return await super().run_group(replace(context, partial=None))
