"""Context parallelism: each rank holds a part of the packed row, and exchanges it for a part of the heads around attention.

Megatron's own ways of it need Transformer Engine, and know sequences rather than trees. Letters: C context ranks, L tokens
of each, H heads of a tensor rank, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from miles_fsdp_trainer.microbatch import ModelInputs


class _Exchange(torch.autograd.Function):
    """x[j] goes to rank j; what comes from rank j becomes y[j]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=mpu.get_context_parallel_group())
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _Exchange.apply(grad.contiguous())


def tokens_to_heads(x: torch.Tensor) -> torch.Tensor:
    """[L, 1, H, D] of this rank's tokens and all heads -> [C * L, 1, H / C, D] of all tokens and this rank's heads."""
    count = mpu.get_context_parallel_world_size()
    if count == 1:
        return x
    parts = x[:, 0].unflatten(1, (count, -1)).transpose(0, 1).contiguous()
    return _Exchange.apply(parts).flatten(0, 1)[:, None]


def heads_to_tokens(x: torch.Tensor) -> torch.Tensor:
    """The reverse of `tokens_to_heads`."""
    count = mpu.get_context_parallel_world_size()
    if count == 1:
        return x
    parts = x[:, 0].unflatten(0, (count, -1)).contiguous()
    return _Exchange.apply(parts).transpose(0, 1).flatten(1, 2)[:, None]


class _Sum(torch.autograd.Function):
    """The sum over context ranks. Each rank then computes the same loss, so that a rank's own addend has the gradient of
    the sum, and no further communication is due."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y, group=mpu.get_context_parallel_group())
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class OwnPairs:
    """The rows and pairs of a microbatch whose hidden states this rank holds: tokens [C_rank * L, C_rank * L + L)."""

    def __init__(self, inputs: ModelInputs, length: int) -> None:
        first = mpu.get_context_parallel_rank() * length
        mine = (inputs.rows >= first) & (inputs.rows < first + length)
        place = mine.cumsum(0) - 1
        self.total, self.kept = len(inputs.pair_rows), mine[inputs.pair_rows].nonzero().squeeze(1)
        self.rows = inputs.rows[mine] - first
        self.temperature = None if inputs.temperature is None else inputs.temperature[mine]
        self.pair_rows = place[inputs.pair_rows[self.kept]]
        self.pair_targets = inputs.pair_targets[self.kept]

    def everywhere(self, values: torch.Tensor) -> torch.Tensor:
        """[own pairs] -> [P], the same on all context ranks; differentiable."""
        if mpu.get_context_parallel_world_size() == 1:
            return values
        return _Sum.apply(values.new_zeros(self.total).index_copy(0, self.kept, values))
