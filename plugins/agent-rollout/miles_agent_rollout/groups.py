"""What the rollouts of this package share: all trajectories of a group, and the requests that they have in flight."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from miles_core.builtin.rollouts import BASELINE, add_fields, group_id, room
from miles_core.types import GenerateRequest, Generation, RolloutContext, Sample, SampleGroup, SamplingParams

NO_TOKENS = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Requests:
    """A group's way to the engines. Once the group was cancelled, running requests are aborted and further ones are
    answered "aborted" at once."""

    context: RolloutContext
    running: set[str] = field(default_factory=set)
    start: np.ndarray | None = None
    """int32[P]: the prompt, rendered by the first trajectory that needed it."""

    @property
    def cancelled(self) -> bool:
        return self.context.cancelled is not None and self.context.cancelled.is_set()

    async def generate(self, request: GenerateRequest) -> Generation:
        if self.cancelled:
            return Generation(
                id=request.id, token_ids=NO_TOKENS, logprobs=NO_TOKENS.astype(np.float32), finish="aborted", versions=(),
                reason="the group was cancelled",
            )  # fmt: skip
        self.running.add(request.id)
        try:
            return await self.context.pool.generate(request)
        finally:
            self.running.discard(request.id)

    async def abort(self) -> None:
        await self.context.pool.abort(sorted(self.running))

    async def unless_cancelled(self, work: asyncio.Future[Any]) -> bool:
        """Whether `work` ended before the group was cancelled; where it did not, it has been cancelled too."""
        cancelled = self.context.cancelled
        watch = asyncio.ensure_future(cancelled.wait()) if cancelled is not None else None
        try:
            await asyncio.wait({work, watch} if watch else {work}, return_when=asyncio.FIRST_COMPLETED)
            return work.done()
        finally:
            if watch is not None:
                watch.cancel()
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)


class GroupRollout:
    """A `Rollout` that makes one trajectory after the other's pattern; subclasses say how."""

    async def trajectory(
        self, context: RolloutContext, requests: Requests, index: int, partial: Sequence[Sample]
    ) -> list[Sample]:
        """The segments of trajectory `index`; `partial` are those of an aborted one that may go on. A failure is data;
        raises only when no engine is left."""
        raise NotImplementedError

    async def run_group(self, context: RolloutContext) -> SampleGroup:
        """All trajectories of one prompt; those of `context.partial` that ended are kept as they are."""
        born = context.pool.version
        known = _by_index(context.partial)
        todo = [i for i in range(context.num_samples) if i not in known or known[i][-1].status == "aborted"]
        extra = [BASELINE] if context.baseline and not (context.partial and context.partial.baseline) else []
        requests = Requests(context)
        work = [self.trajectory(context, requests, index, known.get(index, ())) for index in (*todo, *extra)]
        made = dict(zip((*todo, *extra), await _all_or_cancel(work, requests), strict=True))
        greedy = made.pop(BASELINE, None)
        samples = [s for i in range(context.num_samples) for s in (made.get(i) or known[i])]
        add_fields(context, samples)
        oldest = [s.oldest_version for s in samples if s.oldest_version is not None]
        return SampleGroup(
            id=group_id(context.prompt),
            prompt=context.prompt,
            samples=samples,
            num_samples=context.num_samples,
            born_version=min([born, *oldest]),
            baseline=greedy[-1] if greedy else (context.partial.baseline if context.partial else None),
            order=context.order,
        )


def sampling_of(context: RolloutContext, index: int) -> SamplingParams:
    """The run's sampling; greedy for the baseline."""
    if index != BASELINE:
        return context.sampling
    return replace(context.sampling, temperature=0.0, top_p=1.0, top_k=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How many tokens may be sampled next, and what bounds them when it is not the wish: "context" or "budget"."""

    limit: int
    by: str = ""
    text: str = ""

    def truncates(self, first: bool) -> bool:
        """Whether an answer that reached the limit cuts a trajectory: the context does so only after the first turn, as
        the prompt alone is the business of `max_new_tokens`."""
        return self.by == "budget" or (self.by == "context" and not first)


def allowance(context: RolloutContext, context_len: int, spent: int, budget: int, asked: int) -> Allowance:
    """`asked` tokens, or what the context leaves, or what a budget (0: none) leaves of which `spent` tokens are gone."""
    found = Allowance(limit=asked)
    if (fits := room(context_len, context.max_context, asked)) < found.limit:
        found = Allowance(limit=fits, by="context", text=f"{context_len} tokens in a context of {context.max_context}")
    if budget and (rest := max(budget - spent, 0)) < found.limit:
        found = Allowance(limit=rest, by="budget", text=f"{spent} tokens sampled of at most {budget}")
    return found


def request_id(context: RolloutContext, trajectory: str, turn: str) -> str:
    return f"{'eval/' if context.evaluation else ''}{trajectory}/{turn}"


def _by_index(partial: SampleGroup | None) -> dict[int, list[Sample]]:
    known: dict[int, list[Sample]] = {}
    for sample in sorted(partial.samples if partial else (), key=lambda s: s.segment):
        known.setdefault(sample.index, []).append(sample)
    return known


async def _all_or_cancel(work: Sequence[Any], requests: Requests) -> list[list[Sample]]:
    """All results. One that raises cancels the others; cancelling the group aborts the requests that run."""
    tasks = [asyncio.ensure_future(w) for w in work]
    watch = asyncio.ensure_future(_abort_when_cancelled(requests)) if requests.context.cancelled else None
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    finally:
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch


async def _abort_when_cancelled(requests: Requests) -> None:
    assert requests.context.cancelled is not None
    await requests.context.cancelled.wait()
    await requests.abort()
