"""Which token comes next. The randomness of a request is a pure function of (its seed, the token's position), never of its
neighbours in the batch: one uniform number per token, put through the inverse of the cumulative distribution.

Legend: N rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles_core.types import SamplingParams

NUCLEUS_FIRST = 1024
"""Tokens looked at first for top-p; only rows whose nucleus is larger pay for a full sort."""


@dataclass(slots=True)
class SamplingPlan:
    """The parameters of N rows as tensors, rebuilt only when the rows change."""

    seeds: np.ndarray  # uint64[N]
    scale: torch.Tensor | None  # float32[N, 1]: 1 / temperature, 1 for greedy rows; None when all are 1
    greedy: torch.Tensor | None  # bool[N]; None when no row is
    limited: torch.Tensor | None  # int64[M]: rows with top-k or top-p
    top_k: torch.Tensor  # int64[M, 1]
    top_p: torch.Tensor  # float32[M, 1]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], vocab: int, device: torch.device) -> SamplingPlan:
        greedy = [p.temperature == 0 for p in params]
        scales = [1.0 if p.temperature == 0 else 1.0 / p.temperature for p in params]
        limited = [i for i, p in enumerate(params) if not greedy[i] and (p.top_p < 1 or 0 < p.top_k < vocab)]
        return cls(
            seeds=np.array([s % 2**64 for s in seeds], dtype=np.uint64),
            scale=torch.tensor(scales, device=device)[:, None] if any(s != 1 for s in scales) else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            limited=torch.tensor(limited, device=device) if limited else None,
            top_k=torch.tensor([params[i].top_k or vocab for i in limited], dtype=torch.int64, device=device)[:, None],
            top_p=torch.tensor([params[i].top_p for i in limited], dtype=torch.float32, device=device)[:, None],
        )


def sample(logits: torch.Tensor, plan: SamplingPlan, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row of float32[N, V] logits, which are overwritten; `positions` int[N] counts the sampled tokens of
    each request. Returns int64[N] tokens and float32[N] log-probabilities in nats: after temperature, before top-k and
    top-p, and at temperature 1 for greedy rows."""
    if plan.scale is not None:
        logits.mul_(plan.scale)
    best = logits.argmax(-1) if plan.greedy is not None else None
    probs = torch.softmax(logits, dim=-1)
    drawn_from = probs
    if plan.limited is not None:
        drawn_from = probs.clone()
        drawn_from[plan.limited] = limit(probs[plan.limited], plan.top_k, plan.top_p)
    tokens = invert(drawn_from, torch.from_numpy(uniforms(plan.seeds, positions)).to(probs.device))
    if best is not None:
        tokens = torch.where(plan.greedy, best, tokens)
    return tokens, probs.gather(1, tokens[:, None]).squeeze(1).log()


def invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative (unnormalised) probability exceeds uniform * total; never one of probability 0."""
    cumulative = torch.cumsum(probs, dim=-1)
    total = cumulative[:, -1:]
    # A uniform number just below 1 can round up to the total, which no token exceeds.
    threshold = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # The clamp matters for NaN alone, which `sample` hands on as the log-probability for its caller to refuse.
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_(max=probs.shape[1] - 1)


def limit(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """float32[M, V] with 0 outside the k likeliest tokens and outside the smallest set whose mass reaches top_p."""
    vocab = probs.shape[1]
    first = min(vocab, NUCLEUS_FIRST)
    values, index = probs.topk(first, dim=-1)
    covered = (values.sum(-1, keepdim=True) >= top_p) | (top_k <= first)
    if not bool(covered.all()):
        values, index = probs.sort(dim=-1, descending=True)
    rank = torch.arange(values.shape[1], device=probs.device)
    before = torch.cumsum(values, dim=-1) - values
    values = values.masked_fill((rank >= top_k) | (before >= top_p), 0.0)
    return torch.zeros_like(probs).scatter_(1, index, values)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float32[N] in [0, 1): counter-based, SplitMix64's output function over seed and position (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return ((_mix(state) >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
