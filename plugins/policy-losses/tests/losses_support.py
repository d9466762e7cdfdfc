"""What the tests of losses share: inputs of chosen numbers, and the weighted sum over any split into microbatches.

Letters: N tokens of a microbatch, S sequences. A *sequence* here is a dict of columns: equally long lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import miles_policy_losses
from miles_core import LossInputs
from miles_core.testing.contracts.loss import DIFFERENTIABLE, DIVERGENCES, Sequences

COMPONENTS = {c.name: c for c in miles_policy_losses.miles_losses()}


def built(name, **options):
    component = COMPONENTS[name]
    return component.build(component.config(**options), None)


def is_leaf(name):
    return name in DIFFERENTIABLE or name.startswith(DIVERGENCES)


@dataclass
class Micro:
    """A microbatch: what a loss gets, and the leaves whose gradient is looked at."""

    inputs: LossInputs
    leaves: dict


def micro(columns, *, mask=None, advantages=None, seq_ids=None, dtype=torch.float32):
    """`columns` of `dtype`; by default one sequence, all trained, advantages 0."""
    tensors = {k: torch.tensor(v, dtype=torch.float32).to(dtype) for k, v in columns.items()}
    leaves = {k: t.requires_grad_() for k, t in tensors.items() if is_leaf(k)}
    n = len(next(iter(tensors.values())))
    mask = torch.ones(n, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    seq_ids = torch.zeros(n, dtype=torch.long) if seq_ids is None else torch.tensor(seq_ids, dtype=torch.long)
    x = LossInputs(
        tokens=torch.zeros(n, dtype=torch.long),
        mask=mask,
        seq_ids=seq_ids,
        advantages=torch.zeros(n) if advantages is None else torch.tensor(advantages, dtype=torch.float32).to(dtype),
        multiplier=torch.ones(n),
        seq=Sequences(torch, seq_ids, mask),
        get=tensors.__getitem__,
    )
    return Micro(x, leaves)


def evaluate(name, columns, *, weights=None, **kwargs):
    """(per_token, gradients of sum(weights * per_token) by leaf, output) as lists; options of the loss in `options`."""
    options = kwargs.pop("options", {})
    made = micro(columns, **kwargs)
    out = built(name, **options)(made.inputs)
    weights = torch.ones(len(out.per_token)) if weights is None else torch.tensor(weights, dtype=torch.float32)
    (out.per_token * weights).sum().backward()
    grads = {k: (v.grad if v.grad is not None else torch.zeros_like(v)).float().tolist() for k, v in made.leaves.items()}
    return out.per_token.tolist(), grads, out


def numbers(out):
    """Metrics as plain numbers."""
    return {k: (float(s), float(n), r) for k, (s, n, r) in out.metrics.items()}


def over_split(loss, sequences, weights, split, dtype=torch.float32):
    """(loss, [gradient rows per sequence by leaf]) of sum(weight * per_token) when `split` (tuples of sequence indices)
    says which sequences share a microbatch."""
    value, rows = 0.0, [None] * len(sequences)
    for part in split:
        columns = {k: [v for i in part for v in sequences[i][k]] for k in sequences[0]}
        mask, advantages = columns.pop("mask"), columns.pop("advantages")
        seq_ids = [s for s, i in enumerate(part) for _ in sequences[i]["mask"]]
        made = micro(columns, mask=mask, advantages=advantages, seq_ids=seq_ids, dtype=dtype)
        out = loss(made.inputs)
        flat = torch.tensor([w for i in part for w in weights[i]], dtype=torch.float32)
        total = (out.per_token * flat).sum()
        if total.requires_grad:
            total.backward()
        value += float(total.detach())
        start = 0
        for i in part:
            stop = start + len(sequences[i]["mask"])
            rows[i] = {
                k: (v.grad[start:stop].float() if v.grad is not None else torch.zeros(stop - start)).tolist()
                for k, v in made.leaves.items()
            }
            start = stop
    return value, rows


def partitions(items):
    """Every way to put `items` into groups; the order of groups and within them is that of `items`."""
    if not items:
        yield []
        return
    first, *rest = items
    for part in partitions(rest):
        yield [(first,), *part]
        for i, group in enumerate(part):
            yield [*part[:i], (first, *group), *part[i + 1 :]]
