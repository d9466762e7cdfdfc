"""Fixed prompts on which an engine must agree with the trainer after every push."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from miles_core.prompts import PromptFeed
from miles_core.types import Sample, TrainBatch

PROBE_TOKENS = 32
"""Enough to notice any wrong tensor, and short beside a training step."""


class Probes:
    """The last tokens of the run's first prompt, scored by the trainer before each push."""

    def __init__(self, trainer: Any, feed: PromptFeed, tolerance: float) -> None:
        self.trainer, self.feed, self.tolerance = trainer, feed, tolerance
        self._batch: TrainBatch | None = None

    async def measure(self) -> list[tuple[np.ndarray, np.ndarray, float]]:
        """(token ids int32[T], the trainer's present logprobs float32[T], tolerance in nats) of each probe."""
        if self._batch is None:
            self._batch = probe_batch(self.feed.peek_tokens()[-PROBE_TOKENS:])
        rows = await self.trainer.forward(self._batch, "policy", frozenset({"logprobs"}))
        return [(self._batch.samples[0].tokens, rows["logprobs"][0], self.tolerance)]


def probe_batch(token_ids: np.ndarray) -> TrainBatch:
    """One sample of given tokens, all of which but the first are asked for."""
    mask = np.ones(len(token_ids), bool)
    mask[0] = False
    name = f"probe-{hashlib.sha256(token_ids.tobytes()).hexdigest()[:8]}"
    sample = Sample(
        group_id=name,
        trajectory_id=name,
        index=0,
        tokens=token_ids,
        prompt_len=1,
        loss_mask=mask,
        logprobs=np.zeros(len(token_ids), np.float32),
    )
    return TrainBatch(samples=[sample], mask=[mask])
