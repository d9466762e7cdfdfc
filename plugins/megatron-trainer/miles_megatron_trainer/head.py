"""Log-probabilities, log-sum-exp and entropy of a head whose vocabulary is spread over tensor-parallel ranks, chunked over
rows, so that [tokens, vocabulary] never exists and no rank ever holds another's logits.

Letters: R rows, P pairs (row, token), W the rank's own rows of the padded vocabulary, E hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from miles_fsdp_trainer.head import HeadOutput, _logit_gradient, logits_of


class VocabPart(NamedTuple):
    """Which token ids this rank holds: [first, first + size). Rows of the weight beyond `size` are padding, which takes no
    part in any sum (case C6)."""

    first: int
    size: int
    group: Any
    """Process group of the tensor-parallel ranks."""

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        if self.group.size() > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


class _ParallelHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        rows: torch.Tensor,
        targets: torch.Tensor,
        chunk_rows: int,
        want_entropy: bool,
        vocab: VocabPart,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count, own = hidden.shape[0], weight[: vocab.size]
        logsumexp = hidden.new_empty(count, dtype=torch.float32)
        entropy = hidden.new_empty(count if want_entropy else 0, dtype=torch.float32)
        chosen = hidden.new_zeros(rows.shape[0], dtype=torch.float32)
        for start in range(0, count, chunk_rows):
            part = slice(start, min(start + chunk_rows, count))
            z = logits_of(hidden[part], own, None if scale is None else scale[part])
            pairs, columns = _own_targets(rows, targets, part, vocab)
            chosen[pairs] = z[rows[pairs] - start, columns]
            top = z.amax(-1) if vocab.size else z.new_full((len(z),), -torch.inf)
            vocab.reduce(top, dist.ReduceOp.MAX)
            mass = torch.exp(z - top[:, None])
            sums = [mass.sum(-1), (mass * z).sum(-1)] if want_entropy else [mass.sum(-1)]
            total = vocab.reduce(torch.stack(sums))
            logsumexp[part] = top + total[0].log()
            if want_entropy:
                entropy[part] = logsumexp[part] - total[1] / total[0]
        vocab.reduce(chosen)
        ctx.save_for_backward(hidden, weight, scale, rows, targets, logsumexp, entropy)
        ctx.chunk_rows, ctx.vocab = chunk_rows, vocab
        return chosen - logsumexp[rows], logsumexp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_logprobs: torch.Tensor, d_lse: torch.Tensor, d_entropy: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, scale, rows, targets, logsumexp, entropy = ctx.saved_tensors
        vocab, own = ctx.vocab, weight[: ctx.vocab.size]
        d_rows = d_lse.index_add(0, rows, d_logprobs, alpha=-1)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, hidden.shape[0], ctx.chunk_rows):
            part = slice(start, min(start + ctx.chunk_rows, hidden.shape[0]))
            d_z = logits_of(hidden[part], own, None if scale is None else scale[part])
            both = (entropy[part], d_entropy[part]) if len(entropy) else None
            _logit_gradient(d_z, logsumexp[part], d_rows[part], both)
            pairs, columns = _own_targets(rows, targets, part, vocab)
            d_z.index_put_((rows[pairs] - start, columns), d_logprobs[pairs], accumulate=True)
            if scale is not None:
                d_z.mul_(scale[part, None])
            d_z = d_z.to(weight.dtype)
            d_hidden[part] = d_z @ own
            d_weight[: vocab.size].addmm_(d_z.T, hidden[part].to(weight.dtype))
        return d_hidden, d_weight, None, None, None, None, None, None


def _own_targets(
    rows: torch.Tensor, targets: torch.Tensor, part: slice, vocab: VocabPart
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which pairs lie in these rows and ask for a token of this rank, and the columns of those tokens."""
    inside = (rows >= part.start) & (rows < part.stop)
    mine = (targets >= vocab.first) & (targets < vocab.first + vocab.size)
    pairs = (inside & mine).nonzero().squeeze(1)
    return pairs, targets[pairs] - vocab.first


def parallel_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk_rows: int,
    want_entropy: bool,
    vocab: VocabPart,
) -> HeadOutput:
    """log softmax(hidden @ whole weight.T * scale)[rows, targets] and what goes with it, the same on every tensor rank.

    hidden [R, E], weight [W, E] of this rank, scale fp32 [R] > 0, rows int64 [P] in [0, R), targets int64 [P], ids of the
    whole vocabulary. The gradient of `hidden` is this rank's share: the caller sums it over the tensor ranks.
    """
    return HeadOutput(*_ParallelHead.apply(hidden, weight, scale, rows, targets, chunk_rows, want_entropy, vocab))
