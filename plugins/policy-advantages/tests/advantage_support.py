"""What the tests of this plugin share: one advantage, or a chain, on groups of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import miles_policy_advantages
from miles_core.batch import RolloutBatch, apply_advantages, prepare
from miles_core.builtin import advantages as builtin
from miles_core.testing.samples import group_of, make_sample
from miles_core.types import SampleGroup

ADVANTAGES = {c.name: c for c in (*builtin.COMPONENTS["miles_advantages"], *miles_policy_advantages.miles_advantages())}


def build(name: str, **options: Any) -> Any:
    return ADVANTAGES[name].build(ADVANTAGES[name].config(**options), None)


def run(
    chain: str | Sequence[tuple[str, Mapping[str, Any]]],
    groups: Sequence[SampleGroup],
    *,
    columns: Mapping[str, Sequence[np.ndarray]] | None = None,
    train_truncated: bool = True,
    **options: Any,
) -> RolloutBatch:
    """The rollout batch after one advantage with `options`, or after a chain of (name, options)."""
    steps = [(chain, options)] if isinstance(chain, str) else chain
    batch = prepare(groups, train_truncated=train_truncated)
    for key, rows in (columns or {}).items():
        batch.put(key, rows, "test")
    apply_advantages(batch, [(name, build(name, **chosen)) for name, chosen in steps])
    return batch


def answers(
    *rewards: float | None, lengths: Sequence[int] = (), name: str = "p", baseline: float | None = None
) -> SampleGroup:
    """A group with one answer per reward, of 2 tokens each or of `lengths`, after a prompt of one token."""
    tokens = lengths or [2] * len(rewards)
    made = [
        make_sample(n, prompt_len=1, reward=r, group=f"{name}@0", index=i)
        for i, (r, n) in enumerate(zip(rewards, tokens, strict=True))
    ]
    group = group_of(made, name=name)
    if baseline is not None:
        group.baseline = make_sample(2, prompt_len=1, reward=baseline, group=f"{name}@0", index=99)
    return group


def last(batch: RolloutBatch) -> list[float]:
    """The advantage of each sample at its last token."""
    return [float(row[-1]) for row in batch.columns["advantages"]]


def response(batch: RolloutBatch, i: int = 0) -> list[float]:
    """The advantages of sample `i` after its prompt of one token."""
    return batch.columns["advantages"][i][1:].tolist()


def metric(batch: RolloutBatch, name: str) -> float:
    total, count, reduce = batch.metrics[f"advantage/{name}"]
    return total / count if reduce == "mean" else total


def differences(
    *rows: Sequence[float], first: str = "old_logprobs", second: str = "reference_logprobs"
) -> dict[str, list[np.ndarray]]:
    """Two columns whose difference over each answer is as given; what stands at the prompt must not matter."""
    full = [np.array([7.0, *row]) for row in rows]
    return {first: [row - 1 for row in full], second: [np.full(len(row), -1.0) for row in full]}
