"""Losses over one microbatch: what they are given, and how their terms become one exact number.

Letters: M tokens of all samples of the microbatch one after another, S samples, P tokens with a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from miles_core.batch_checks import check_metrics
from miles_core.component import merge_metric
from miles_core.errors import ContractError, MilesError, RunFailed
from miles_core.fields import FieldSpec, pack_field
from miles_core.types import LossInputs, LossOutput, Metric, TrainBatch
from miles_fsdp_trainer import OUTPUTS
from miles_fsdp_trainer.microbatch import Microbatch


class OtherRole(ContractError):
    """A loss asked for what only the model of another role gives: it does not train this one."""


class Term(NamedTuple):
    """One `[[loss]]` table."""

    name: str
    function: Callable[[LossInputs], LossOutput]
    weight: float


class TopK(NamedTuple):
    """What "topk:K" gives: the K most likely tokens at each place, and their differentiable log-probabilities."""

    ids: torch.Tensor
    """int64 [M, K]"""
    logprobs: torch.Tensor
    """fp32 [M, K]"""


class Sequences:
    """Reductions over the masked tokens of each sample; all differentiable."""

    def __init__(self, seq_ids: torch.Tensor, mask: torch.Tensor, count: int):
        self.seq_ids, self.mask, self.count = seq_ids, mask, count

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """[M] -> [S]"""
        kept = values.where(self.mask, values.new_zeros(()))
        return values.new_zeros(self.count).index_add(0, self.seq_ids, kept)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """[M] -> [S]; 0 for a sample without masked tokens."""
        return self.sum(values) / self.sum(torch.ones_like(values)).clamp(min=1)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """[S] -> [M]"""
        return values.index_select(0, self.seq_ids)


@dataclass(slots=True)
class Tally:
    """What a rank gathers over its microbatches."""

    loss: float = 0.0
    metrics: dict[str, Metric] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Losses that were not finite, with the samples concerned."""

    def add(self, name: str, metric: tuple[Any, Any, Any]) -> None:
        total, count, reduce = (v.detach() if isinstance(v, torch.Tensor) else v for v in metric)
        self.metrics[name] = merge_metric(self.metrics.get(name), (float(total), float(count), reduce))


def loss_inputs(
    batch: TrainBatch,
    micro: Microbatch,
    masks: Sequence[Any],
    outputs: dict[str, torch.Tensor],
    fields: Mapping[str, FieldSpec] | None = None,
) -> LossInputs:
    """The microbatch as a loss sees it. Everything is 0 outside the mask, so that what a tool or a prompt token carries
    in a column - NaN too - cannot reach the loss or its gradient. A side channel of `fields` comes as it was declared: one
    row per token (a transition-aligned one with a zero row after each sample), or one per sample."""
    mask = micro.flat(masks, torch.bool)
    lengths = torch.tensor(micro.lengths, device=micro.device)
    seq_ids = torch.repeat_interleave(torch.arange(len(micro.indices), device=micro.device), lengths)
    cache: dict[str, Any] = {}

    def column(name: str) -> torch.Tensor:
        values = micro.flat(batch.columns[name])
        shape = (-1,) + (1,) * (values.dim() - 1)
        return values.where(mask.view(shape), values.new_zeros(()))

    def compute(name: str) -> Any:
        if name.startswith("topk:") and "topk_ids" in outputs:
            k = int(name.removeprefix("topk:"))
            ids, logprobs = outputs["topk_ids"][:, :k], outputs["topk_logprobs"][:, :k]
            return TopK(micro.scatter(ids), micro.scatter(logprobs))
        if name in outputs:
            return micro.scatter(outputs[name])
        if name == "old_logprobs" and batch.old_is_current:
            return get("logprobs").detach()
        if name in batch.columns:
            return column(name)
        if fields and name in fields:
            return side_channel(fields[name], batch, micro)
        base, language = name.partition(":")[0], "logprobs" in outputs
        missing = OtherRole if base in OUTPUTS and (base == "values") == language else ContractError
        known = sorted({*batch.columns, *outputs} - {"topk_ids", "topk_logprobs"})
        raise missing(
            f'a loss asked for "{name}", which is not here: its `needs` did not announce it, or nothing makes it',
            f"here are: {', '.join(known)}",
        )

    def get(name: str) -> Any:
        if name not in cache:
            cache[name] = compute(name)
        return cache[name]

    def optional(name: str, default: float) -> torch.Tensor:
        return column(name) if name in batch.columns else torch.full(mask.shape, default, device=micro.device)

    return LossInputs(
        tokens=micro.flat([sample.tokens for sample in batch.samples], torch.long),
        mask=mask,
        seq_ids=seq_ids,
        advantages=optional("advantages", 0.0),
        multiplier=optional("multiplier", 1.0),
        seq=Sequences(seq_ids, mask, len(micro.indices)),
        get=get,
    )


def side_channel(spec: FieldSpec, batch: TrainBatch, micro: Microbatch) -> torch.Tensor:
    """[M, *axes] of a token- or transition-aligned field, [S, ...] of a sample-aligned one, in its declared dtype.

    Raises ContractError naming the field and the sample where it is missing or only a handle."""
    values = []
    for i in micro.indices:
        value = batch.samples[i].extras.get(spec.name)
        if not isinstance(value, np.ndarray):
            held = "is missing" if value is None else f"is a {type(value).__name__}, which this trainer cannot resolve"
            raise ContractError(f'field "{spec.name}" of sample {batch.samples[i].trajectory_id} {held}')
        values.append(value)
    return torch.as_tensor(pack_field(spec, values, list(micro.lengths))).to(micro.device)


def total_loss(
    terms: Sequence[Term], scopes: frozenset[str], batch: TrainBatch, micro: Microbatch, x: LossInputs, tally: Tally
) -> torch.Tensor | None:
    """Sum over terms and tokens of weight of the table * token weight of the scope * multiplier * per-token loss.

    Only terms whose output has one of `scopes` count, and that ask for nothing of another role; None without any.
    Multipliers correct the policy's importance weights and apply to scope "policy". A term that is not finite is
    recorded in `tally.failures`.
    """
    total: torch.Tensor | None = None
    for term in terms:
        try:
            out = _evaluated(term, x)
        except OtherRole:
            continue
        if out.scope not in batch.token_weights:
            raise ContractError(
                f'loss "{term.name}" has scope "{out.scope}", but the batch has no token weights for it',
                "the trait `scope` of a loss says what its outputs have; the default is policy",
            )
        if out.scope not in scopes:
            continue
        weights = micro.flat(batch.token_weights[out.scope]) * term.weight
        if out.scope == "policy":
            weights = weights * x.multiplier
        weighted = out.per_token.where(x.mask, out.per_token.new_zeros(())) * weights
        value = weighted.sum()
        _record(term, out, value, weighted, batch, micro, x, tally)
        total = value if total is None else total + value
    return total


def _evaluated(term: Term, x: LossInputs) -> LossOutput:
    """What the loss gives. Raises RunFailed with what it raised, ContractError for anything but one float32 per token; both
    name it."""
    try:
        out = term.function(x)
    except (MilesError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RunFailed(f'loss "{term.name}" raised {type(error).__name__}: {error}') from error
    if not isinstance(out, LossOutput):
        raise ContractError(f'loss "{term.name}" returned {type(out).__name__}, not LossOutput')
    value = out.per_token
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float64):
        what = f"tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ContractError(
            f'loss "{term.name}" returned a {what} as per_token; it is a tensor of float32, as what `get` gives'
        )
    if value.shape != x.mask.shape:
        raise ContractError(
            f'loss "{term.name}" returned shape {tuple(value.shape)} for {len(x.mask)} tokens; one number per token is due'
        )
    check_metrics(f'loss "{term.name}"', out.metrics)
    return out


def _record(
    term: Term,
    out: LossOutput,
    value: torch.Tensor,
    weighted: torch.Tensor,
    batch: TrainBatch,
    micro: Microbatch,
    x: LossInputs,
    tally: Tally,
) -> None:
    number = value.item()
    tally.loss += number
    prefix = f"loss/{term.name}"
    if out.scope == "value":
        prefix = f"critic/{prefix}"
        tally.add("critic/loss", (number, 1.0, "sum"))
    tally.add(f"{prefix}/value", (number, 1.0, "sum"))
    for name, metric in out.metrics.items():
        if name == "value":
            raise ContractError(f'loss "{term.name}" has a metric "value", which is the name of the weighted loss itself')
        tally.add(f"{prefix}/{name}", metric)
    if not math.isfinite(number):
        bad = x.seq_ids[~torch.isfinite(weighted.detach())].unique().tolist() or range(len(micro.indices))
        tally.failures.append(f'loss "{term.name}" is {number} in samples {sample_names(batch, micro, bad)}')


def check_outputs(
    role: str, batch: TrainBatch, micro: Microbatch, outputs: Mapping[str, torch.Tensor], tally: Tally
) -> None:
    """Records log-probabilities or values of the model that are not finite: then no loss is to blame."""
    for name, words in (("logprobs", "log-probabilities"), ("values", "values")):
        if name not in outputs or bool(torch.isfinite(outputs[name]).all()):
            continue
        flat = micro.scatter(outputs[name].detach())
        ends = np.cumsum(micro.lengths)
        places = torch.nonzero(~torch.isfinite(flat)).flatten().cpu().numpy()
        bad = np.unique(np.searchsorted(ends, places, side="right")).tolist()
        tally.failures.append(f"{words} of the {role} are not finite in samples {sample_names(batch, micro, bad)}")


def sample_names(batch: TrainBatch, micro: Microbatch, sequences: Sequence[int]) -> str:
    ids = [batch.samples[micro.indices[s]].trajectory_id for s in sequences]
    return ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
