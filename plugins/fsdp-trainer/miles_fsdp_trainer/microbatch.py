"""From a `TrainBatch` to what one forward pass needs: token budget, packed row, rows for the head, flat loss arrays.

Letters: N packed tokens, M tokens of all samples of the microbatch one after another (what a loss sees), R head rows,
P pairs = tokens whose prediction is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles_core.errors import ConfigError, ContractError
from miles_core.types import Sample, TrainBatch
from miles_fsdp_trainer.attention import AttentionPlan
from miles_fsdp_trainer.tree import build_tree, common_prefix


@dataclass(slots=True)
class ModelInputs:
    """What the model computes. `rows` index the hidden states [rows of the batch * length] after flattening."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    plan: AttentionPlan | None
    rows: torch.Tensor
    """int64 [R]"""
    temperature: torch.Tensor | None
    """fp32 [R], None when all are 1"""
    pair_rows: torch.Tensor
    """int64 [P], index into `rows`"""
    pair_targets: torch.Tensor
    """int64 [P]"""


@dataclass(slots=True)
class Microbatch:
    inputs: ModelInputs
    indices: list[int]
    """Samples of the batch, in the order of the flat arrays."""
    lengths: list[int]
    pair_flat: torch.Tensor
    """int64 [P]: where each pair's token stands in the flat arrays."""
    num_computed: int
    """N: tokens that the model computes."""
    device: torch.device

    @property
    def num_flat(self) -> int:
        return sum(self.lengths)

    def flat(self, arrays: Sequence[np.ndarray], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[M, ...]: the arrays (one per sample of the whole batch) of this microbatch's samples, concatenated."""
        chosen = [np.asarray(arrays[i]) for i in self.indices]
        joined = np.concatenate(chosen) if chosen else np.zeros(0)
        return torch.as_tensor(joined).to(self.device, dtype)

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """[P, ...] -> [M, ...], 0 where nothing was asked; differentiable."""
        empty = values.new_zeros((self.num_flat, *values.shape[1:]))
        return empty.index_copy(0, self.pair_flat, values)

    def split(self, flat: torch.Tensor) -> list[np.ndarray]:
        """The flat array [M] as one float32 array per sample of `indices`."""
        ends = np.cumsum(self.lengths)[:-1]
        return np.split(flat.detach().float().cpu().numpy(), ends) if self.lengths else []


def masks_of(batch: TrainBatch) -> list[np.ndarray]:
    """bool[T] per sample: the batch's mask, or each sample's own `loss_mask` before corrections have made one.

    Raises ContractError where token 0 is masked in: nothing comes before it that could predict it.
    """
    masks = batch.mask or [sample.loss_mask for sample in batch.samples]
    for sample, mask in zip(batch.samples, masks, strict=True):
        if len(mask) != len(sample.tokens) or (len(mask) and mask[0]):
            raise ContractError(
                f"mask of {sample.trajectory_id} has {len(mask)} entries for {len(sample.tokens)} tokens"
                if len(mask) != len(sample.tokens)
                else f"mask of {sample.trajectory_id} is True at its first token, which nothing predicts"
            )
    return masks


def used_lengths(masks: Sequence[np.ndarray]) -> list[int]:
    """How many leading tokens of each sample have to be computed: all before the last needed one; 0 if none is."""
    return [int(np.flatnonzero(mask)[-1]) if mask.any() else 0 for mask in masks]


def split_by_tokens(batch: TrainBatch, used: Sequence[int], max_tokens: int, share: bool) -> list[list[int]]:
    """Sample indices per microbatch, in order. Samples with nothing to compute are left out; tuples of `batch.shared`
    stay together. A microbatch holds at most `max_tokens` computed tokens unless one such unit alone has more."""
    unit_of = {i: unit for unit in batch.shared for i in unit}
    result: list[list[int]] = []
    current: list[int] = []
    total, done = 0, set()
    for i in range(len(batch.samples)):
        unit = [j for j in unit_of.get(i, (i,)) if used[j] > 0]
        if i in done or not unit:
            continue
        done.update(unit)
        cost = _added_tokens(batch.samples, used, current, unit, share)
        if current and total + cost > max_tokens:
            result.append(current)
            current, total = [], 0
            cost = _added_tokens(batch.samples, used, current, unit, share)
        current = current + unit
        total += cost
    return [*result, current] if current else result


def _added_tokens(samples: Sequence[Sample], used: Sequence[int], current: list[int], unit: list[int], share: bool) -> int:
    """Upper bound of the tokens that `unit` adds: sharing is looked for with the sample before and with the first."""
    total, members = 0, list(current)
    for i in unit:
        tokens = samples[i].tokens[: used[i]]
        others = {members[0], members[-1]} if share and members else set()
        total += len(tokens) - max((common_prefix(tokens, samples[j].tokens[: used[j]]) for j in others), default=0)
        members.append(i)
    return total


def make_microbatch(
    batch: TrainBatch,
    indices: list[int],
    masks: Sequence[np.ndarray],
    used: Sequence[int],
    *,
    device: torch.device,
    packing: bool,
    share: bool,
) -> Microbatch:
    """Packs the samples `indices`. An empty list gives the one-token pass of a rank that has run out of samples."""
    sequences = [batch.samples[i].tokens[: used[i]] for i in indices] or [np.zeros(1, dtype=np.int64)]
    if packing:
        tree = build_tree(sequences, share=share)
        ids, positions, paths = tree.tokens[None], tree.positions[None], tree.paths
        plan = AttentionPlan.of(tree, device)
    else:
        ids, positions, paths = _padded(sequences)
        plan = None
    needed = [np.flatnonzero(masks[i]) for i in indices]
    lengths = [len(batch.samples[i].tokens) for i in indices]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    targets = [batch.samples[i].tokens[t] for i, t in zip(indices, needed, strict=True)]
    temperatures = [np.full(len(t), _temperature(batch.samples[i])) for i, t in zip(indices, needed, strict=True)]
    flat = [offsets[k] + t for k, t in enumerate(needed)]
    if not indices:
        needed, targets, temperatures, flat = [np.ones(1, dtype=int)], [np.zeros(1)], [np.ones(1)], []
    hidden = np.concatenate([path[t - 1] for path, t in zip(paths, needed, strict=True)])
    kinds, kind = np.unique(np.concatenate(temperatures), return_inverse=True)
    unique, pair_rows = np.unique(hidden * len(kinds) + kind, return_inverse=True)

    def put(array: np.ndarray, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.as_tensor(array).to(device, dtype)

    return Microbatch(
        inputs=ModelInputs(
            input_ids=put(ids),
            position_ids=put(positions),
            plan=plan,
            rows=put(unique // len(kinds)),
            temperature=put(kinds[unique % len(kinds)], torch.float32) if (kinds != 1).any() else None,
            pair_rows=put(pair_rows),
            pair_targets=put(np.concatenate(targets)),
        ),
        indices=indices,
        lengths=lengths,
        pair_flat=put(np.concatenate(flat) if flat else np.zeros(0)),
        num_computed=ids.size,
        device=device,
    )


def _padded(sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Rows padded on the right: under causal attention no real token sees the padding, so no mask is needed."""
    width = max(len(s) for s in sequences)
    ids = np.zeros((len(sequences), width), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    paths = [row * width + np.arange(len(s)) for row, s in enumerate(sequences)]
    return ids, np.tile(np.arange(width), (len(sequences), 1)), paths


def _temperature(sample: Sample) -> float:
    if sample.temperature <= 0:
        raise ConfigError(
            f"sample {sample.trajectory_id} was sampled at temperature {sample.temperature:g}: a greedy choice has no "
            "log-probability to train",
            "set rollout.sampling.temperature above 0",
        )
    return float(sample.temperature)


def microbatches(
    batch: TrainBatch, masks: Sequence[np.ndarray], *, device: torch.device, max_tokens: int, packing: bool, share: bool
) -> tuple[int, Iterator[Microbatch]]:
    """How many microbatches this rank has, and an endless iterator: real ones first, then one-token passes, with which a
    rank that has fewer follows the collectives of the others."""
    used = used_lengths(masks)
    parts = split_by_tokens(batch, used, max_tokens, share and packing)

    def make() -> Iterator[Microbatch]:
        for part in parts:
            yield make_microbatch(batch, part, masks, used, device=device, packing=packing, share=share)
        while True:
            yield make_microbatch(batch, [], masks, used, device=device, packing=packing, share=share)

    return len(parts), make()
