"""KL between the whole next-token distributions of two models, without holding [tokens, vocabulary] for either.

Letters: R rows (hidden states), V vocabulary, E hidden size (may differ between the models), K tokens of a top-k.
Below, z are the policy's logits and p = softmax(z); y are the other model's and q = softmax(y).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from miles_fsdp_trainer.head import logits_of, pieces


@dataclass(slots=True)
class HeadInputs:
    """All that a language-model head needs. Not differentiable for the other model, which is frozen."""

    hidden: torch.Tensor
    """[R, E]"""
    weight: torch.Tensor
    """[V, E]"""
    scale: torch.Tensor | None
    """fp32 [R], what logits are multiplied with: 1 / temperature; None: 1"""

    def logits(self, part: slice) -> torch.Tensor:
        return logits_of(self.hidden[part], self.weight, None if self.scale is None else self.scale[part])

    def first_ids(self, count: int) -> HeadInputs:
        """The same head over its first `count` token ids."""
        return self if len(self.weight) == count else HeadInputs(self.hidden, self.weight[:count], self.scale)


class Buckets:
    """A distribution [r, V] as K single tokens and one bucket for all others: log-probabilities of both."""

    def __init__(self, logprobs: torch.Tensor, ids: torch.Tensor):
        self.single = logprobs.gather(-1, ids)
        self.rest = logprobs.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
        """[r, 1]; summed up, not 1 minus the others: that loses everything when they are near 1."""

    @property
    def all(self) -> torch.Tensor:
        """[r, K + 1]"""
        return torch.cat([self.single, self.rest], dim=-1)


def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sum of exp(a) (a - b) over the last axis, of log-probabilities."""
    return (a.exp() * (a - b)).sum(-1)


def _value(z: torch.Tensor, y: torch.Tensor, reverse: bool, k: int) -> torch.Tensor:
    """fp32 [r] of logits [r, V]."""
    logp, logq = z.log_softmax(-1), y.log_softmax(-1)
    if k:
        ids = y.topk(k, dim=-1).indices
        logp, logq = Buckets(logp, ids).all, Buckets(logq, ids).all
    return kl(logp, logq) if reverse else kl(logq, logp)


def _gradient(z: torch.Tensor, y: torch.Tensor, value: torch.Tensor, reverse: bool, k: int) -> torch.Tensor:
    """d value / d z, [r, V].

    With c_b = log P_b - log Q_b of the bucket b that a token v is in: reverse p_v (c_b - value), forward
    p_v (1 - Q_b / P_b). Every token is a bucket of its own for K = 0, and then the latter is p_v - q_v.
    """
    logp, logq = z.log_softmax(-1), y.log_softmax(-1)
    if not k:
        p = logp.exp()
        return p.mul_(logp.sub_(logq).sub_(value[:, None])) if reverse else p.sub_(logq.exp_())
    ids = y.topk(k, dim=-1).indices
    ours, other = Buckets(logp, ids), Buckets(logq, ids)
    if reverse:
        of_rest = logp.exp().mul_(ours.rest - other.rest - value[:, None])
        return of_rest.scatter_(-1, ids, ours.single.exp() * (ours.single - other.single - value[:, None]))
    # p_v Q_b / P_b as one exponential: Q_b / P_b alone may overflow where the policy gives the rest next to nothing.
    of_rest = logp.exp().sub_(logp.add(other.rest - ours.rest).exp_())
    return of_rest.scatter_(-1, ids, ours.single.exp() - other.single.exp())


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        other: HeadInputs,
        chunk_rows: int,
        reverse: bool,
        k: int,
    ) -> torch.Tensor:
        ours, count = HeadInputs(hidden, weight, scale), hidden.shape[0]
        value = hidden.new_empty(count, dtype=torch.float32)
        for start in range(0, count, chunk_rows):
            part = slice(start, min(start + chunk_rows, count))
            z, y = ours.logits(part), other.logits(part)
            for piece in pieces(z.shape[0], z.device):
                value[part][piece] = _value(z[piece], y[piece], reverse, k)
        ctx.save_for_backward(hidden, weight, scale, value)
        ctx.other, ctx.chunk_rows, ctx.reverse, ctx.k = other, chunk_rows, reverse, k
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_value: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, scale, value = ctx.saved_tensors
        ours, other, count = HeadInputs(hidden, weight, scale), ctx.other, hidden.shape[0]
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, count, ctx.chunk_rows):
            part = slice(start, min(start + ctx.chunk_rows, count))
            z, y = ours.logits(part), other.logits(part)
            for piece in pieces(z.shape[0], z.device):
                slope = _gradient(z[piece], y[piece], value[part][piece], ctx.reverse, ctx.k)
                z[piece] = slope.mul_(d_value[part][piece, None])
            if scale is not None:
                z.mul_(scale[part, None])
            d_z = z.to(weight.dtype)
            d_hidden[part] = d_z @ weight
            if ctx.needs_input_grad[1]:
                d_weight.addmm_(d_z.T, hidden[part].to(weight.dtype))
        return d_hidden, d_weight, None, None, None, None, None


def divergence(policy: HeadInputs, other: HeadInputs, *, reverse: bool, k: int, chunk_rows: int) -> torch.Tensor:
    """fp32 [R], nats: KL(policy || other) if `reverse`, else KL(other || policy), each at its own scale; differentiable
    once with respect to the policy's hidden states and weight. At most `chunk_rows` rows of logits of each model exist at a
    time, in the backward pass too, where they are computed again.

    With k > 0, the other model's k most likely tokens count one by one and all others together as one: a true divergence
    between coarser distributions, never negative, at most the full one, and equal to it for k >= V.
    """
    size = len(other.weight)
    assert len(policy.weight) == size, "both heads must speak of the same token ids"
    k = 0 if k >= size else k
    return _Divergence.apply(policy.hidden, policy.weight, policy.scale, other, chunk_rows, reverse, k)
