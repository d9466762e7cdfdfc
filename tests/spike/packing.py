"""Samples as one packed row, and the row as a loss sees it.

M tokens of the samples of a microbatch, one after another; N >= M with the padding; S samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from miles_core.errors import ConfigError, ContractError
from miles_core.fields import FieldRef, FieldSpec, pack_field
from miles_core.types import LossInputs, TrainBatch


@dataclass(slots=True)
class Microbatch:
    indices: list[int]
    lengths: list[int]
    tokens: torch.Tensor
    """int64 [N]; padding is one more sequence of zeros."""
    positions: torch.Tensor
    bounds: list[int]
    """Where each sequence starts, and N."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def flat(self, rows: Sequence[np.ndarray]) -> torch.Tensor:
        """[M] of the rows of all samples of the batch."""
        return torch.cat([torch.as_tensor(rows[i]) for i in self.indices])

    def split(self, values: torch.Tensor) -> list[np.ndarray]:
        return [part.float().numpy().copy() for part in values.detach().split(self.lengths)]

    def shift(self, following: torch.Tensor) -> torch.Tensor:
        """[N] at the token before, as a model gives it -> [M] at the token itself; 0 for the first of each sample."""
        shifted = torch.cat([following.new_zeros(1), following[:-1]])[: self.num_tokens]
        first = torch.zeros(self.num_tokens, dtype=torch.bool)
        first[torch.tensor(self.bounds[: len(self.lengths)])] = True
        return shifted.masked_fill(first, 0.0)


def microbatches(batch: TrainBatch, max_tokens: int) -> list[Microbatch]:
    """Samples in order, at most `max_tokens` each unless a single one is longer; all padded to the same N, since
    pipeline stages agree on one shape beforehand. At least one, however empty."""
    if batch.shared:
        raise ConfigError("the spike's trainer does not keep pairs in one microbatch")
    parts: list[list[int]] = [[]]
    for i, sample in enumerate(batch.samples):
        if parts[-1] and sum(batch.samples[j].num_tokens for j in parts[-1]) + sample.num_tokens > max_tokens:
            parts.append([])
        parts[-1].append(i)
    widest = max(sum(batch.samples[i].num_tokens for i in part) for part in parts)
    width = -(-max(widest, 1) // 8) * 8
    return [_pack(batch, part, width) for part in parts]


def _pack(batch: TrainBatch, indices: list[int], width: int) -> Microbatch:
    lengths = [batch.samples[i].num_tokens for i in indices]
    rows = [torch.as_tensor(batch.samples[i].tokens, dtype=torch.long) for i in indices]
    rest = width - sum(lengths)
    sizes = [*lengths, rest] if rest else lengths
    return Microbatch(
        indices=indices,
        lengths=lengths,
        tokens=torch.cat([*rows, torch.zeros(rest, dtype=torch.long)]),
        positions=torch.cat([torch.arange(size) for size in sizes]),
        bounds=[0, *np.cumsum(sizes).tolist()],
    )


class Sequences:
    """`LossInputs.seq`: reductions over the masked tokens of each sample, all differentiable."""

    def __init__(self, seq_ids: torch.Tensor, mask: torch.Tensor, count: int) -> None:
        self.seq_ids, self.mask, self.count = seq_ids, mask, count

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.count).index_add(0, self.seq_ids, values.where(self.mask, values.new_zeros(())))

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        return self.sum(values) / self.sum(torch.ones_like(values)).clamp(min=1)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        return values.index_select(0, self.seq_ids)


def loss_inputs(
    batch: TrainBatch, micro: Microbatch, outputs: Mapping[str, torch.Tensor], fields: Mapping[str, FieldSpec]
) -> LossInputs:
    """`outputs` are what the model computed, [M]; `fields` the side channels that a loss may ask for."""
    mask = micro.flat(batch.mask)
    seq_ids = torch.repeat_interleave(torch.arange(len(micro.lengths)), torch.tensor(micro.lengths))

    def column(name: str) -> torch.Tensor:
        values = micro.flat(batch.columns[name])
        return values.where(mask, values.new_zeros(()))

    def get(name: str) -> torch.Tensor:
        if name in outputs:
            return outputs[name]
        if name == "old_logprobs" and batch.old_is_current:
            return outputs["logprobs"].detach()
        if name in batch.columns:
            return column(name)
        if name in fields:
            return field(fields[name])
        raise ContractError(f'a loss asked for "{name}"; here are {sorted({*outputs, *batch.columns, *fields})}')

    def field(spec: FieldSpec) -> torch.Tensor:
        values = [batch.samples[i].extras[spec.name] for i in micro.indices]
        if any(isinstance(value, FieldRef) for value in values):
            raise ConfigError(f'the spike\'s trainer has no store for field "{spec.name}"')
        return torch.as_tensor(pack_field(spec, values, micro.lengths), dtype=torch.float32)

    ones = torch.ones(micro.num_tokens)
    return LossInputs(
        tokens=micro.tokens[: micro.num_tokens],
        mask=mask,
        seq_ids=seq_ids,
        advantages=column("advantages") if "advantages" in batch.columns else 0 * ones,
        multiplier=column("multiplier") if "multiplier" in batch.columns else ones,
        seq=Sequences(seq_ids, mask, len(micro.lengths)),
        get=get,
    )


def sum_loss(out: Any, x: LossInputs, weights: torch.Tensor) -> torch.Tensor:
    """sum(token weight * per-token loss) over the mask; corrections multiply the policy's terms."""
    if out.per_token.shape != x.mask.shape:
        raise ContractError(f"a loss returned shape {tuple(out.per_token.shape)} for {len(x.mask)} tokens")
    if out.scope == "policy":
        weights = weights * x.multiplier
    return (out.per_token.where(x.mask, out.per_token.new_zeros(())) * weights).sum()
