"""Exact token weights: one number per token, once per optimizer step, over the whole minibatch on all ranks.

A trainer sums `weight * loss` and divides by nothing, so that no split into microbatches, ranks or padding can change the
loss or its gradient. Shape letter: T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from miles_core.errors import ContractError
from miles_core.types import Sample, TrainBatch
from miles_core.votes import trajectory_rewards

Rows = list[np.ndarray]
"""One array per sample."""


def token_weights(
    masks: Sequence[np.ndarray], trajectories: Sequence[Hashable], aggregation: str, constant_length: int = 0
) -> Rows:
    """float32[T] per sample, so that sum(weight * per-token loss) is the aggregated loss of the whole minibatch.

    With n trainable tokens in all, S sequences (trajectories) of which sequence s has n_s, a trainable token weighs
    token-mean 1/n; sequence-mean-token-mean 1/(S n_s); sequence-mean-token-sum 1/S; constant-length 1/(S L) with
    L = `constant_length` (Dr. GRPO, arXiv:2503.20783). A sequence with nothing trainable does not count in S. Nothing
    trainable at all gives zeros.
    """
    counts = np.array([np.count_nonzero(mask) for mask in masks], dtype=np.float64)
    index: dict[Hashable, int] = {}
    seq = np.array([index.setdefault(t, len(index)) for t in trajectories], dtype=np.int64)
    if len(counts) != len(seq):
        raise ContractError(f"token_weights got {len(counts)} masks and {len(seq)} trajectory ids")
    seq_counts = np.bincount(seq, weights=counts, minlength=len(index))
    num_sequences = max(np.count_nonzero(seq_counts), 1)
    if aggregation == "token-mean":
        scale = np.full(len(counts), 1.0 / max(counts.sum(), 1.0))
    elif aggregation == "sequence-mean-token-mean":
        scale = 1.0 / (num_sequences * np.maximum(seq_counts[seq], 1.0))
    elif aggregation == "sequence-mean-token-sum":
        scale = np.full(len(counts), 1.0 / num_sequences)
    elif aggregation == "constant-length":
        if constant_length <= 0:
            raise ContractError("constant-length aggregation needs a length above 0 (train.constant_length)")
        scale = np.full(len(counts), 1.0 / (num_sequences * constant_length))
    else:
        raise ContractError(f'unknown aggregation "{aggregation}"')
    return [mask * weight for mask, weight in zip(masks, scale.astype(np.float32), strict=True)]


def weigh(part: TrainBatch, denominator: Rows, aggregation: str, length: int, scopes: Sequence[str]) -> None:
    """Fills `token_weights`. Policy and value losses are aggregated alike; a pair is one sequence of token means."""
    if not {"policy", "value"}.isdisjoint(scopes):
        weights = token_weights(denominator, [s.trajectory_id for s in part.samples], aggregation, length)
        if denominator is not part.mask:
            weights = [w * m for w, m in zip(weights, part.mask, strict=True)]
        part.token_weights.update({scope: weights for scope in scopes if scope != "pair"})
    if "pair" in scopes:
        _weigh_pairs(part, alone=set(scopes) == {"pair"})


def _weigh_pairs(part: TrainBatch, alone: bool) -> None:
    """Token weights of scope "pair", and the columns by which a loss finds the two sides of each pair: "pair_ids" (1, 2,
    ...; 0 without a decided pair) and "pair_sign" (+1 chosen, -1 rejected, 0). When no other scope is trained (`alone`),
    samples without a decided pair leave the mask: nothing is computed for them, and no step is taken for them alone."""
    sides = pair_sides(part.samples, part.shared, part.mask)
    numbers = {i: n for n, members in enumerate(part.shared, 1) for i in members if sides[i]}
    masks = [m if side else np.zeros_like(m) for m, side in zip(part.mask, sides, strict=True)]
    part.columns["pair_ids"] = [m * np.float32(numbers.get(i, 0)) for i, m in enumerate(masks)]
    part.columns["pair_sign"] = [m * np.float32(side) for m, side in zip(masks, sides, strict=True)]
    ids = [("pair", numbers[i]) if i in numbers else i for i in range(len(masks))]
    part.token_weights["pair"] = token_weights(masks, ids, "sequence-mean-token-mean")
    if alone:
        part.mask = masks


def pair_tuples(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    """Samples of one group with the same `metadata["pair"]` belong together. Raises ContractError when none has one."""
    pairs: dict[tuple[str, Hashable], list[int]] = {}
    for i, sample in enumerate(samples):
        if "pair" in sample.metadata:
            pairs.setdefault((sample.group_id, sample.metadata["pair"]), []).append(i)
    if samples and not pairs:
        raise ContractError(
            'a loss has scope "pair", but no sample says in metadata["pair"] which pair it belongs to',
            "use a rollout that sets it, for example recorded (miles-recorded-rollout) on a data set of pairs",
        )
    return [tuple(members) for members in pairs.values()]


def pair_sides(samples: Sequence[Sample], shared: Sequence[tuple[int, ...]], masks: Sequence[np.ndarray]) -> list[int]:
    """Per sample +1 (chosen), -1 (rejected), or 0: in no pair, or in one that is not decided.

    `metadata["chosen"]` decides where a sample of the pair has it; else the higher reward is chosen. A pair is undecided
    when the rewards are equal or missing, or when one side has nothing to train. Raises ContractError when a pair has
    not exactly two trajectories, or `metadata["chosen"]` does not mark exactly one of them.
    """
    rewards = trajectory_rewards(samples)
    sides = [0] * len(samples)
    for members in shared:
        answers = list(dict.fromkeys(samples[i].trajectory_id for i in members))
        name = f"pair {samples[members[0]].metadata.get('pair')!r} of group {samples[members[0]].group_id}"
        if len(answers) != 2:
            raise ContractError(f"{name} has {len(answers)} answers ({', '.join(answers)}), not two")
        marks = {samples[i].trajectory_id: samples[i].metadata.get("chosen") for i in members}
        if any(mark is not None for mark in marks.values()):
            if sorted(map(bool, marks.values())) != [False, True]:
                raise ContractError(f'{name}: metadata["chosen"] is {list(marks.values())}; exactly one is to be true')
            better = next(t for t, mark in marks.items() if mark)
        else:
            better = _better(answers, {samples[i].trajectory_id: rewards[i] for i in members})
        alive = {samples[i].trajectory_id for i in members if masks[i].any()}
        if better is not None and len(alive) == 2:
            for i in members:
                sides[i] = 1 if samples[i].trajectory_id == better else -1
    return sides


def _better(answers: Sequence[str], rewards: dict[str, float | None]) -> str | None:
    """The one of two trajectories with the higher reward, or None."""
    first, second = (rewards[answer] for answer in answers)
    if first is None or second is None or first == second:
        return None
    return answers[0] if first > second else answers[1]
