"""The language-model head and log-softmax in one pass that never holds [tokens, vocabulary] for all tokens.

Letters: R rows (hidden states that predict something needed), P pairs (row, token) whose log-probability is asked,
V vocabulary, E hidden size. Several pairs may share a row: different continuations of one prefix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

CACHE_ROWS = 16
"""On a CPU, elementwise passes over logits go this many rows at a time, so that they stay in cache."""


class HeadOutput(NamedTuple):
    logprobs: torch.Tensor
    """fp32 [P]"""
    logsumexp: torch.Tensor
    """fp32 [R], of the logits divided by the temperature"""
    entropy: torch.Tensor
    """fp32 [R], nats; empty unless asked for"""


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """fp32 [r, V]: the product accumulates and ends in fp32 even when its operands are bf16, since a bf16 logit of
    12 is off by up to 0.03."""
    if hidden.dtype == torch.float32 and weight.dtype == torch.float32:
        logits = hidden @ weight.T
    elif hidden.is_cuda and hidden.dtype == weight.dtype:
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().T
    return logits if scale is None else logits.mul_(scale[:, None])


def _part(scale: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if scale is None else scale[part]


def pieces(count: int, device: torch.device) -> list[slice]:
    step = CACHE_ROWS if device.type == "cpu" else max(count, 1)
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


class _FusedHead(torch.autograd.Function):
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = hidden.shape[0]
        logsumexp = hidden.new_empty(count, dtype=torch.float32)
        entropy = hidden.new_empty(count if want_entropy else 0, dtype=torch.float32)
        chosen = hidden.new_empty(rows.shape[0], dtype=torch.float32)
        kept: torch.Tensor | None = None
        for start in range(0, count, chunk_rows):
            part = slice(start, min(start + chunk_rows, count))
            logits = logits_of(hidden[part], weight, _part(scale, part))
            for piece in pieces(logits.shape[0], logits.device):
                z = logits[piece]
                out = slice(start + piece.start, start + piece.stop)
                lse = torch.logsumexp(z, dim=-1)
                logsumexp[out] = lse
                if want_entropy:
                    entropy[out] = lse - (torch.softmax(z, dim=-1) * z).sum(-1)
            inside = ((rows >= part.start) & (rows < part.stop)).nonzero().squeeze(1)
            chosen[inside] = logits[rows[inside] - start, targets[inside]]
            kept = logits if count <= chunk_rows else None
        ctx.save_for_backward(hidden, weight, scale, rows, targets, logsumexp, entropy)
        ctx.chunk_rows, ctx.kept = chunk_rows, kept
        return chosen - logsumexp[rows], logsumexp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_logprobs: torch.Tensor, d_lse: torch.Tensor, d_entropy: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, scale, rows, targets, logsumexp, entropy = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        count = hidden.shape[0]
        # d logprob[p] / d z[r, v] = [v is the target] - softmax(z[r])[v]; d lse / d z = softmax(z).
        d_rows = d_lse.index_add(0, rows, d_logprobs, alpha=-1)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if count == 0 else None
        for start in range(0, count, ctx.chunk_rows):
            part = slice(start, min(start + ctx.chunk_rows, count))
            d_z = kept if kept is not None else logits_of(hidden[part], weight, _part(scale, part))
            for piece in pieces(d_z.shape[0], d_z.device):
                out = slice(start + piece.start, start + piece.stop)
                _logit_gradient(
                    d_z[piece], logsumexp[out], d_rows[out], (entropy[out], d_entropy[out]) if len(entropy) else None
                )
            inside = ((rows >= part.start) & (rows < part.stop)).nonzero().squeeze(1)
            d_z.index_put_((rows[inside] - start, targets[inside]), d_logprobs[inside], accumulate=True)
            if scale is not None:
                d_z.mul_(scale[part, None])
            d_z = d_z.to(weight.dtype)
            torch.mm(d_z, weight, out=d_hidden[part]) if hidden.dtype == weight.dtype else d_hidden[part].copy_(
                d_z @ weight
            )
            if ctx.needs_input_grad[1]:
                h = hidden[part].to(weight.dtype)
                d_weight = d_z.T @ h if d_weight is None else d_weight.addmm_(d_z.T, h)
        return d_hidden, d_weight, None, None, None, None, None


def _logit_gradient(
    z: torch.Tensor,
    lse: torch.Tensor,
    d_row: torch.Tensor,
    entropy: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Overwrites logits [r, V] with d_row * p + d_entropy * (-p (log p + H)), the part that is dense in V."""
    z.sub_(lse[:, None])
    if entropy is None:
        z.exp_().mul_(d_row[:, None])
        return
    value, d_entropy = entropy
    slope = (z + value[:, None]).mul_(-d_entropy[:, None]).add_(d_row[:, None])
    z.exp_().mul_(slope)


def fused_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk_rows: int,
    want_entropy: bool = False,
) -> HeadOutput:
    """log softmax(hidden @ weight.T * scale)[rows, targets] and what goes with it.

    hidden [R, E], weight [V, E], scale fp32 [R] > 0, 1 / temperature (None: 1), rows int64 [P] in [0, R), targets int64 [P]
    -> `HeadOutput`, differentiable once. At most `chunk_rows` rows of logits exist at a time, in the backward pass too.
    """
    return HeadOutput(*_FusedHead.apply(hidden, weight, scale, rows, targets, chunk_rows, want_entropy))


@torch.no_grad()
def top_tokens(hidden: torch.Tensor, weight: torch.Tensor, k: int, chunk_rows: int) -> torch.Tensor:
    """int64 [R, k]: the most likely tokens of each row; their log-probabilities are further pairs of `fused_head`."""
    parts = [
        logits_of(hidden[i : i + chunk_rows], weight, None).topk(k, dim=-1).indices
        for i in range(0, hidden.shape[0], chunk_rows)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, k, dtype=torch.long, device=hidden.device)
