"""Ready-made samples and groups for tests: give what matters, the rest is filled in consistently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles_core.types import Prompt, Sample, SampleGroup, VersionSpan


def make_sample(
    response: Sequence[int] | int = 2,
    *,
    prompt_len: int = 3,
    mask: Sequence[int] | None = None,
    reward: float | None = 0.0,
    group: str = "p@0",
    index: int = 0,
    segment: int = 0,
    version: int = 0,
    **fields: Any,
) -> Sample:
    """A sample with `response` tokens (or that many) after a prompt. `mask` says which response tokens the policy
    sampled, by default all; `fields` are further fields of `Sample`."""
    ids = list(range(10, 10 + response)) if isinstance(response, int) else list(response)
    num = prompt_len + len(ids)
    loss_mask = np.zeros(num, dtype=bool)
    loss_mask[prompt_len:] = True if mask is None else np.array(mask, dtype=bool)
    values: dict[str, Any] = {
        "group_id": group,
        "trajectory_id": f"{group}/{index}",
        "index": index,
        "segment": segment,
        "tokens": np.array([*range(1, prompt_len + 1), *ids], dtype=np.int32),
        "prompt_len": prompt_len,
        "loss_mask": loss_mask,
        "logprobs": np.where(loss_mask, -1.0, 0.0).astype(np.float32),
        "versions": (VersionSpan(start=prompt_len, stop=num, version=version),) if ids else (),
        "reward": reward,
    }
    return Sample(**(values | fields))


def make_group(rewards: Sequence[float | None], *, name: str = "p", draw: int = 0, **fields: Any) -> SampleGroup:
    """A group with one sample per reward; `fields` go to every `make_sample`."""
    group = f"{name}@{draw}"
    samples = [make_sample(reward=r, group=group, index=i, **fields) for i, r in enumerate(rewards)]
    return group_of(samples, name=name, draw=draw)


def group_of(samples: Sequence[Sample], *, name: str = "p", draw: int = 0) -> SampleGroup:
    """A group of given samples; its size is the number of their trajectories."""
    prompt = Prompt(id=name, draw=draw, text="?")
    num = len({s.trajectory_id for s in samples})
    return SampleGroup(id=f"{name}@{draw}", prompt=prompt, samples=list(samples), num_samples=num)
