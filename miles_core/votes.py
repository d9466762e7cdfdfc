"""One trajectory, one vote: the verdict on each trajectory, however many segments it fanned out into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from miles_core.types import Sample

FAILED = frozenset({"error", "timeout", "aborted"})
"""Statuses of samples that are never trained and have no verdict, whatever score was written on them."""
CUT = frozenset({"length", "truncated"})


def sample_id(sample: Sample) -> str:
    """How messages name a sample: its trajectory and, after the first one, the segment."""
    return sample.trajectory_id if sample.segment == 0 else f"{sample.trajectory_id}#{sample.segment}"


def last_segments(samples: Iterable[Sample]) -> dict[str, Sample]:
    """The last segment of each trajectory, in order of first appearance."""
    last: dict[str, Sample] = {}
    for sample in samples:
        known = last.get(sample.trajectory_id)
        if known is None or sample.segment >= known.segment:
            last[sample.trajectory_id] = sample
    return last


def trajectory_rewards(samples: Sequence[Sample]) -> list[float | None]:
    """Per sample, the verdict on its trajectory: the reward of the last segment, where the outcome is known; None
    when that has no verdict or failed."""
    verdicts = {
        key: None if last.reward is None or last.status in FAILED else float(last.reward)
        for key, last in last_segments(samples).items()
    }
    return [verdicts[s.trajectory_id] for s in samples]


def votes(samples: Sequence[Sample], rewards: Sequence[float | None]) -> dict[str, float]:
    """float64 verdict by trajectory id, without those that have none."""
    return {s.trajectory_id: float(r) for s, r in zip(samples, rewards, strict=True) if r is not None}


def all_equal(values: Sequence[float]) -> bool:
    """Whether no difference can be learned from. Tested by equality: a mean of equal numbers need not equal them."""
    return len(values) == 0 or bool(np.max(values) == np.min(values))
