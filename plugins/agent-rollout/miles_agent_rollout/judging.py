"""What the metadata of multi-turn samples says: the reward that an agent reported, and numbers for a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from miles_core.types import Sample, SampleGroup, Score, StepReport, TrainBatch

COUNTS = (
    "num_turns",
    "tool_calls",
    "tool_errors",
    "tool_timeouts",
    "rewrites",
    "requests",
    "refused",
    "ignored_parameters",
)


class ReportedReward:
    """The number that the agent returned, or wrote to its result file; no verdict where it gave none."""

    def score(self, sample: Sample) -> Score:
        reward = sample.metadata.get("agent_reward")
        if reward is None:
            return Score(value=None, reason="the agent reported no reward")
        return Score(value=float(reward))


def turn_metrics(groups: list[SampleGroup], batch: TrainBatch, reports: list[StepReport]) -> Mapping[str, float]:
    """Means over trajectories of what their metadata counts, and of their segments; `reaped` is a sum."""
    trajectories: dict[str, list[Sample]] = {}
    for sample in (s for group in groups for s in group.samples):
        trajectories.setdefault(sample.trajectory_id, []).append(sample)
    if not trajectories:
        return {}
    first = [samples[0].metadata for samples in trajectories.values()]
    rows = {name: [float(m[name]) for m in first if name in m] for name in COUNTS}
    rows["segments"] = [float(len(samples)) for samples in trajectories.values()]
    means = {name: float(np.mean(values)) for name, values in rows.items() if values}
    return means | {"reaped": float(sum(bool(m.get("reaped")) for m in first))}
