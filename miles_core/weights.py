"""Exact token weights: one number per token, once per optimizer step, over the whole minibatch on all ranks.

A trainer sums `weight * loss` and divides by nothing, so that no split into microbatches, ranks or padding can change the
loss or its gradient. Shape letter: T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from miles_core.errors import ContractError
from miles_core.types import Sample, TrainBatch

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
        pair_of = {i: ("pair", n) for n, members in enumerate(part.shared) for i in members}
        ids = [pair_of.get(i, i) for i in range(len(part.samples))]
        masks = [m if i in pair_of else np.zeros_like(m) for i, m in enumerate(part.mask)]
        part.token_weights["pair"] = token_weights(masks, ids, "sequence-mean-token-mean")


def pair_tuples(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    """Samples of one group with the same `metadata["pair"]` belong together. Raises ContractError when none has one."""
    pairs: dict[tuple[str, Hashable], list[int]] = {}
    for i, sample in enumerate(samples):
        if "pair" in sample.metadata:
            pairs.setdefault((sample.group_id, sample.metadata["pair"]), []).append(i)
    if samples and not pairs:
        raise ContractError('a loss has scope "pair", but no sample says in metadata["pair"] which pair it belongs to')
    return [tuple(members) for members in pairs.values()]
