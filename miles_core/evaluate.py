"""Evaluation: prompts of another seed, sampled as the `[[eval]]` table says, judged by the run's own rewards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from miles_core.settings import EvalTable
from miles_core.types import SampleGroup

if TYPE_CHECKING:
    from miles_core.session import Session

MAX_RUNNING = 256
"""Groups of an evaluation that are in flight at once."""

EVAL_SEED = 1_000_003
"""Added to the run's seed for evaluation prompts, unless the table names a seed."""


async def evaluate(session: Session, table: EvalTable) -> tuple[Mapping[str, float], list[SampleGroup]]:
    """Metrics and groups of one evaluation under the engines' present weights.

    `accuracy` is the share of samples whose reward is at least 1, `reward` the mean over samples with a verdict.
    """
    began = time.perf_counter()
    prompts = session.evaluation_prompts(table)
    room = asyncio.Semaphore(MAX_RUNNING)
    done = 0

    async def one(order: int) -> SampleGroup:
        nonlocal done
        async with room:
            group = await session.evaluate_prompt(prompts[order], order, table)
        done += 1
        session.view.phase("evaluate", done, len(prompts), "prompts")
        return group

    session.view.phase("evaluate", 0, len(prompts), "prompts")
    tasks = [asyncio.ensure_future(one(i)) for i in range(len(prompts))]
    try:
        groups = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    session.scorer.check_step(groups)
    return _summary(groups, time.perf_counter() - began), groups


def _summary(groups: list[SampleGroup], seconds: float) -> dict[str, float]:
    samples = [s for g in groups for s in g.samples]
    rewards = [s.reward for s in samples if s.reward is not None]
    return {
        "accuracy": sum(r >= 1 for r in rewards) / len(samples) if samples else 0.0,
        "reward": float(np.mean(rewards)) if rewards else 0.0,
        "samples": float(len(samples)),
        "no_verdict": float(len(samples) - len(rewards)),
        "truncated": sum(s.status in ("length", "truncated") for s in samples) / max(len(samples), 1),
        "response_length": float(np.mean([s.num_response_tokens for s in samples])) if samples else 0.0,
        "seconds": seconds,
    }
