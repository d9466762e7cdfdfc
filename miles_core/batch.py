"""From groups of samples to optimizer steps: masks, columns, minibatches. Pure numpy; nothing here knows a trainer.

Shape letter: T tokens of a sample. A *trajectory* is one vote: its segments share a `trajectory_id`, count once in every
mean, and have the reward of the last of them. Columns are float32[T] per sample and 0 outside the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from miles_core.batch_checks import called, check_sample, check_zero_outside, checked_mask, checked_rows, require_field
from miles_core.component import merge_metric
from miles_core.errors import ContractError
from miles_core.fields import FieldSpec
from miles_core.interfaces import Advantage, Correction
from miles_core.settings import TrainTable
from miles_core.stats import logprob_gap, rollout_metrics
from miles_core.types import (
    AdvantageInputs,
    AdvantageOutput,
    CorrectionInputs,
    CorrectionOutput,
    Metric,
    Sample,
    SampleGroup,
    TrainBatch,
)
from miles_core.votes import CUT, FAILED, sample_id, trajectory_rewards
from miles_core.weights import Rows, pair_tuples, token_weights, weigh

__all__ = [
    "RolloutBatch", "apply_advantages", "base_mask", "flatten", "logprob_gap", "make_batches", "needs_old_forward",
    "pair_tuples", "prepare", "rollout_metrics", "sample_id", "skip_reason", "split_minibatches", "token_lags",
    "token_weights", "trajectory_rewards",
]  # fmt: skip


@dataclass(slots=True, kw_only=True)
class RolloutBatch:
    """Everything that one training step trains on, before it is split into optimizer steps."""

    samples: list[Sample]
    groups: list[tuple[int, ...]]
    """Indices into `samples`, one tuple per group."""
    rewards: list[float | None]
    """The verdict on each sample's trajectory."""
    mask: Rows
    """bool[T] per sample, before corrections."""
    baselines: list[float | None]
    columns: dict[str, Rows] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)

    @property
    def trainable(self) -> bool:
        return any(bool(row.any()) for row in self.mask)

    def put(self, name: str, rows: Sequence[np.ndarray], where: str) -> None:
        """Adds a column. Values outside the mask are dropped, whatever they are: nothing may depend on them.

        Raises ContractError naming `where` and the sample for a wrong length or a value that is not finite.
        """
        self.columns[name] = checked_rows(where, name, self.samples, rows, self.mask)

    def add_metrics(self, where: str, metrics: Mapping[str, Metric]) -> None:
        for name, metric in metrics.items():
            key = f"{where}/{name}"
            self.metrics[key] = merge_metric(self.metrics.get(key), metric)


# --- Groups to one batch ---------------------------------------------------------------------------------------------


def flatten(groups: Sequence[SampleGroup]) -> tuple[list[Sample], list[tuple[int, ...]]]:
    """All samples, those of a group next to each other, and the indices of each group."""
    samples: list[Sample] = []
    indices: list[tuple[int, ...]] = []
    for group in groups:
        indices.append(tuple(range(len(samples), len(samples) + len(group.samples))))
        samples.extend(group.samples)
    return samples, indices


def base_mask(sample: Sample, train_truncated: bool = True, *, verdict: bool | None = None) -> np.ndarray:
    """bool[T]: what may be trained of `sample`. It is `loss_mask`, which came from lengths; token values play no part.

    Empty when the sample failed (error, timeout, aborted), has no verdict, or was cut by length while
    `train_truncated` is False. `verdict` overrides `sample.reward is not None` (the verdict of a whole trajectory).
    """
    check_sample(sample)
    has_verdict = sample.reward is not None if verdict is None else verdict
    if not has_verdict or sample.status in FAILED or (sample.status in CUT and not train_truncated):
        return np.zeros(sample.num_tokens, dtype=bool)
    return sample.loss_mask.copy()


def token_lags(sample: Sample, version: int) -> np.ndarray:
    """int32[T]: how many weight versions before `version` each token was sampled; 0 where it was not sampled."""
    lags = np.zeros(sample.num_tokens, dtype=np.int32)
    for span in sample.versions:
        lags[span.start : span.stop] = version - span.version
    return lags


def prepare(
    groups: Sequence[SampleGroup],
    *,
    train_truncated: bool = True,
    version: int = 0,
    max_lag: int | None = None,
    old_logprobs: str = "recompute",
    fields: Iterable[FieldSpec] = (),
) -> RolloutBatch:
    """Checks the samples of a step and lays them out, with the column "rollout_logprobs".

    `version` is that of the weights about to be trained. Tokens more than `max_lag` versions older are masked, leave the
    denominator and are counted in "stale_tokens". With `old_logprobs="rollout"` advantages too find the engine's
    log-probabilities under that name. `fields` are the side channels that the run reads: checked, filled or masked as
    each declares. Raises ContractError naming the sample for anything malformed.
    """
    samples, indices = flatten(groups)
    rewards = trajectory_rewards(samples)
    mask = [base_mask(s, train_truncated, verdict=r is not None) for s, r in zip(samples, rewards, strict=True)]
    metrics: dict[str, Metric] = {}
    if max_lag is not None:
        late = [m & (token_lags(s, version) > max_lag) for m, s in zip(mask, samples, strict=True)]
        mask = [m & ~old for m, old in zip(mask, late, strict=True)]
        metrics["stale_tokens"] = (float(sum(np.count_nonzero(old) for old in late)), 1.0, "sum")
    for spec in fields:
        require_field(spec, samples, mask)
    baselines = [g.baseline.reward if g.baseline is not None else None for g in groups]
    batch = RolloutBatch(samples=samples, groups=indices, rewards=rewards, mask=mask, baselines=baselines, metrics=metrics)
    batch.put("rollout_logprobs", [s.logprobs for s in samples], "engine")
    if old_logprobs == "rollout":
        batch.columns["old_logprobs"] = batch.columns["rollout_logprobs"]
    return batch


def apply_advantages(batch: RolloutBatch, advantages: Sequence[tuple[str, Advantage]]) -> None:
    """Runs a chain of (name, advantage) and puts the columns "advantages" and, where there are any, "returns".

    With nothing trainable no advantage is asked, since no column was computed for it; the columns are zeros. Errors name
    the advantage and its place; metrics go by "advantage/<name>/", and by "advantage/<name>#2/" for one used again.
    """
    if not batch.trainable:
        batch.columns["advantages"] = [np.zeros(len(m), dtype=np.float32) for m in batch.mask]
        return
    last: Rows | None = None
    returns: Rows | None = None
    chain = [name for name, _ in advantages]
    for place, (name, advantage) in enumerate(advantages):
        where = f"advantage/{name}" + (f" (place {place + 1} of {' -> '.join(chain)})" if len(chain) > 1 else "")
        inputs = AdvantageInputs(
            samples=batch.samples,
            groups=batch.groups,
            rewards=batch.rewards,
            mask=batch.mask,
            columns=batch.columns,
            baselines=batch.baselines,
            advantages=last,
            returns=returns,
        )
        output = called(where, advantage, inputs, AdvantageOutput)
        last = checked_rows(where, "advantages", batch.samples, output.advantages, batch.mask)
        check_zero_outside(where, batch.samples, output.advantages, batch.mask)
        if output.returns is not None:
            returns = checked_rows(where, "returns", batch.samples, output.returns, batch.mask)
        again = chain[:place].count(name)
        batch.add_metrics(f"advantage/{name}" + (f"#{again + 1}" if again else ""), output.metrics)
    if last is None:
        raise ContractError("a run needs at least one advantage")
    batch.columns["advantages"] = last
    if returns is not None:
        batch.columns["returns"] = returns


# --- One batch to optimizer steps ------------------------------------------------------------------------------------


def needs_old_forward(train: TrainTable, *, loss_needs: frozenset[str], driver_needs: frozenset[str] = frozenset()) -> bool:
    """Whether old log-probabilities cost a forward pass of their own.

    `driver_needs` are those of advantages and corrections, which run before any pass of the trainer. A loss that is
    used in a single optimizer step finds them in its own pass (`TrainBatch.old_is_current`).
    """
    if train.old_logprobs != "recompute":
        return False
    several_steps = train.minibatches * train.epochs > 1
    return "old_logprobs" in driver_needs or ("old_logprobs" in loss_needs and several_steps)


def split_minibatches(groups: Sequence[object], minibatches: int, rng: np.random.Generator) -> list[list[int]]:
    """Group indices of each minibatch: whole groups, numbers that differ by at most one, never an empty minibatch.

    One minibatch keeps the order; more are drawn at random, each then in the order of the groups.
    """
    count = min(minibatches, len(groups))
    if count <= 1:
        return [list(range(len(groups)))] if groups else []
    order = rng.permutation(len(groups))
    return [sorted(part.tolist()) for part in np.array_split(order, count)]


def make_batches(
    batch: RolloutBatch,
    train: TrainTable,
    *,
    constant_length: int = 0,
    corrections: Sequence[tuple[str, Correction, str]] = (),
    needs: frozenset[str] = frozenset(),
    scopes: Sequence[str] = ("policy", "value"),
    seed: int = 0,
    step: int = 0,
    version: int = 0,
) -> list[TrainBatch]:
    """The optimizer steps of one training step, in order: `train.epochs` passes over `train.minibatches`.

    `corrections` are (name, correction, denominator): under "shrink" a masked token leaves the denominator, under
    "keep" it stays in it with weight 0. `needs` are the columns that losses read, `scopes` those of the losses. A batch
    may hold nothing trainable (`skip_reason`): the loop counts it and takes no step. Raises ContractError when a
    component gave something malformed.
    """
    if train.old_logprobs == "rollout":
        batch.columns["old_logprobs"] = batch.columns["rollout_logprobs"]
    whole = TrainBatch(samples=batch.samples, columns=batch.columns, mask=batch.mask, step=step, version=version)
    length = train.constant_length or constant_length
    batches: list[TrainBatch] = []
    for epoch in range(train.epochs):
        rng = np.random.default_rng([seed, step, epoch])
        for minibatch, members in enumerate(split_minibatches(batch.groups, train.minibatches, rng)):
            part = whole.select([i for g in members for i in batch.groups[g]])
            part.minibatch, part.epoch = minibatch, epoch
            if "pair" in scopes:
                part.shared = pair_tuples(part.samples)
            denominator = _correct(batch, part, corrections)
            weigh(part, denominator, train.aggregation, length, scopes)
            if "pair" in scopes:
                trained = sum(bool(part.token_weights["pair"][members[0]].any()) for members in part.shared)
                counts = {"trained": trained, "undecided": len(part.shared) - trained}
                batch.add_metrics("pairs", {name: (float(n), 1.0, "sum") for name, n in counts.items()})
            batches.append(part)
    if "old_logprobs" in needs and "old_logprobs" not in batch.columns and batch.trainable:
        if len(batches) > 1:
            raise ContractError(f"{len(batches)} optimizer steps need old_logprobs, and the column was not computed")
        batches[0].old_is_current = True
    return batches


def live_part(batch: TrainBatch) -> TrainBatch:
    """`batch` without the samples whose advantages are zero throughout, for losses whose gradient is then exactly zero
    (trait `zero_advantage = "no-gradient"`). Weights stay as they are, so loss and gradient change by rounding at most.
    A batch in which nothing is left is returned whole: whether to step is not decided here."""
    advantages = batch.columns.get("advantages")
    if advantages is None or batch.shared:
        return batch
    live = [i for i, row in enumerate(advantages) if row.any()]
    return batch.select(live) if 0 < len(live) < len(advantages) else batch


def skip_reason(batch: TrainBatch) -> str | None:
    """Why no optimizer step can be taken on `batch`, as a counter key, or None."""
    return None if batch.num_trainable else "nothing-trainable"


def _correct(batch: RolloutBatch, part: TrainBatch, corrections: Sequence[tuple[str, Correction, str]]) -> Rows:
    """Applies corrections to `part` in order; returns the mask that the denominators are counted from. Metrics go by
    "correction/<name>/", and by "correction/<name>#2/" for one used again."""
    denominator = part.mask
    if not part.num_trainable:
        return denominator
    names = [name for name, _, _ in corrections]
    for place, (name, correction, rule) in enumerate(corrections):
        again = names[:place].count(name)
        where = f"correction/{name}" + (f"#{again + 1}" if again else "")
        inputs = CorrectionInputs(
            samples=part.samples,
            mask=part.mask,
            advantages=part.columns["advantages"],
            columns=part.columns,
            version=part.version,
        )
        output = called(where, correction, inputs, CorrectionOutput)
        new = checked_mask(where, part, output.mask)
        if rule == "shrink":
            removed = (old & ~now for old, now in zip(part.mask, new, strict=True))
            denominator = [d & ~r for d, r in zip(denominator, removed, strict=True)]
        elif rule != "keep":
            raise ContractError(f'{where} has the trait denominator="{rule}"; it must be "keep" or "shrink"')
        part.mask = new
        if output.multiplier is not None:
            factors = checked_rows(where, "multiplier", part.samples, output.multiplier, new)
            before = part.columns.get("multiplier")
            merged = factors if before is None else [a * b for a, b in zip(before, factors, strict=True)]
            part.columns["multiplier"] = merged
        batch.add_metrics(where, output.metrics)
    return denominator
