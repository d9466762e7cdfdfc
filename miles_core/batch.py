"""From groups of samples to optimizer steps: masks, columns, minibatches. Pure numpy; nothing here knows a trainer.

Shape letter: T tokens of a sample. A *trajectory* is one vote: its segments share a `trajectory_id`, count once in every
mean, and have the reward of the last of them. Columns are float32[T] per sample and 0 outside the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from miles_core.batch_checks import check_sample, check_zero_outside, checked_mask, checked_rows, require_field
from miles_core.component import merge_metric
from miles_core.errors import ContractError
from miles_core.fields import FieldSpec
from miles_core.interfaces import Advantage, Correction
from miles_core.settings import RunConfig, TrainTable
from miles_core.stats import logprob_gap, rollout_metrics
from miles_core.types import AdvantageInputs, CorrectionInputs, Metric, Sample, SampleGroup, TrainBatch
from miles_core.votes import CUT, FAILED, sample_id, trajectory_rewards
from miles_core.weights import Rows, pair_tuples, token_weights, weigh

if TYPE_CHECKING:
    from miles_core.config import ResolvedRun
    from miles_core.wiring import Wiring

__all__ = [
    "Judges", "Needs", "StepBatch", "base_mask", "collate", "flatten", "forward_plan", "logprob_gap", "needs_old_forward",
    "pair_tuples", "plan_step", "rollout_metrics", "sample_id", "skip_reason", "split_minibatches", "token_lags",
    "token_weights", "trajectory_rewards",
]  # fmt: skip

FORWARD_COLUMNS = {
    "old_logprobs": ("policy", "logprobs"),
    "reference_logprobs": ("reference", "logprobs"),
    "teacher_logprobs": ("teacher", "logprobs"),
    "old_values": ("critic", "values"),
}
"""Column -> (role, output) of the trainer's forward pass that fills it."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Needs:
    """Columns that are read, by when: `driver` before any pass of the trainer (advantages, corrections), `loss` in it."""

    loss: frozenset[str] = frozenset()
    driver: frozenset[str] = frozenset()

    @classmethod
    def of(cls, run: ResolvedRun) -> Needs:
        def union(*kinds: str) -> frozenset[str]:
            chosen = [s for kind in kinds for s in run.all(kind)]
            return frozenset().union(*(s.component.needed(s.options) for s in chosen))

        return cls(loss=union("loss"), driver=union("advantage", "correction"))


@dataclass(slots=True, kw_only=True)
class Judges:
    """What decides a step's gradients on the driver. `corrections` are (name, correction, denominator): under "shrink" a
    masked token leaves the denominator, under "keep" it stays in it with weight 0."""

    advantages: Sequence[tuple[str, Advantage]]
    corrections: Sequence[tuple[str, Correction, str]] = ()
    needs: Needs = field(default_factory=Needs)
    scopes: frozenset[str] = frozenset({"policy"})
    """Scopes of the selected losses."""

    @classmethod
    def of(cls, run: ResolvedRun, wiring: Wiring) -> Judges:
        """Builds the selected advantages and corrections; the trait `denominator` is "shrink" where none is given."""
        rules = [s.component.traits.get("denominator", "shrink") for s in run.all("correction")]
        built = wiring.build_all("correction")
        return cls(
            advantages=wiring.build_all("advantage"),
            corrections=[(name, correction, rule) for (name, correction), rule in zip(built, rules, strict=True)],
            needs=Needs.of(run),
            scopes=frozenset(s.component.traits.get("scope", "policy") for s in run.all("loss")),
        )


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """Everything that one training step trains on, before it is split into optimizer steps."""

    train: TrainBatch
    """All samples, their columns and masks; without token weights, which belong to optimizer steps."""
    groups: list[tuple[int, ...]]
    """Indices into `train.samples`, one tuple per group."""
    rewards: list[float | None]
    """The verdict on each sample's trajectory."""
    baselines: list[float | None]
    metrics: dict[str, Metric] = field(default_factory=dict)

    def put(self, name: str, rows: Sequence[np.ndarray], where: str) -> None:
        """Adds a column. Values outside the mask are dropped, whatever they are: nothing may depend on them.

        Raises ContractError naming `where` and the sample for a wrong length or a value that is not finite.
        """
        self.train.columns[name] = checked_rows(where, name, self.train.samples, rows, self.train.mask)

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


def collate(
    groups: Sequence[SampleGroup],
    config: RunConfig,
    *,
    step: int = 0,
    version: int = 0,
    fields: Iterable[FieldSpec] = (),
) -> StepBatch:
    """Checks the samples of a step and lays them out, with the column "rollout_logprobs".

    `version` is that of the weights about to be trained. Tokens more than `rollout.max_lag` versions older are masked,
    leave the denominator and are counted. `fields` are the side channels that the run reads: checked, filled or masked
    as each declares. Raises ContractError naming the sample for anything malformed.
    """
    samples, indices = flatten(groups)
    rewards = trajectory_rewards(samples)
    cut = config.train.train_truncated
    mask = [base_mask(s, cut, verdict=r is not None) for s, r in zip(samples, rewards, strict=True)]
    stale = 0
    for sample, row in zip(samples, mask, strict=True):
        late = row & (token_lags(sample, version) > config.rollout.max_lag)
        stale += np.count_nonzero(late)
        row &= ~late
    for spec in fields:
        require_field(spec, samples, mask)
    batch = StepBatch(
        train=TrainBatch(samples=samples, mask=mask, step=step, version=version),
        groups=indices,
        rewards=rewards,
        baselines=[g.baseline.reward if g.baseline is not None else None for g in groups],
        metrics={"rollout/stale_tokens": (float(stale), 1.0, "sum")},
    )
    batch.put("rollout_logprobs", [s.logprobs for s in samples], "engine")
    return batch


def needs_old_forward(needs: Needs, train: TrainTable) -> bool:
    """Whether old log-probabilities cost a forward pass of their own: a loss that is used in a single optimizer step
    finds them in its own pass (`TrainBatch.old_is_current`), but advantages and corrections come before it."""
    if train.old_logprobs != "recompute":
        return False
    several_steps = train.minibatches * train.epochs > 1
    return "old_logprobs" in needs.driver or ("old_logprobs" in needs.loss and several_steps)


def forward_plan(needs: Needs, batch: StepBatch, config: RunConfig) -> dict[str, dict[str, str]]:
    """The trainer's forward passes of this step: {role: {output: column}}. Roles that an engine holds are not in it, nor
    are columns that the batch already has."""
    plan: dict[str, dict[str, str]] = {}
    for column, (role, output) in FORWARD_COLUMNS.items():
        wanted = needs_old_forward(needs, config.train) if column == "old_logprobs" else column in needs.loss | needs.driver
        by_engine = role in config.roles and config.roles[role].use == "engine"
        if wanted and not by_engine and column not in batch.train.columns:
            plan.setdefault(role, {})[output] = column
    return plan


# --- One batch to optimizer steps ------------------------------------------------------------------------------------


def split_minibatches(groups: Sequence[object], minibatches: int, rng: np.random.Generator) -> list[list[int]]:
    """Group indices of each minibatch: whole groups, numbers that differ by at most one, never an empty minibatch.

    One minibatch keeps the order; more are drawn at random, each then in the order of the groups.
    """
    count = min(minibatches, len(groups))
    if count <= 1:
        return [list(range(len(groups)))] if groups else []
    order = rng.permutation(len(groups))
    return [sorted(part.tolist()) for part in np.array_split(order, count)]


def plan_step(batch: StepBatch, judges: Judges, config: RunConfig, seed: int = 0) -> list[TrainBatch]:
    """The optimizer steps of one training step, in order: `train.epochs` passes over `train.minibatches`.

    Fills the batch's columns "advantages" and, where an advantage gives them, "returns". A batch may hold nothing
    trainable (`skip_reason`): the loop counts it and takes no step. Raises ContractError when a component or the
    trainer's forward pass gave something malformed.
    """
    table, train = config.train, batch.train
    for name in set(train.columns) - {"rollout_logprobs"}:
        batch.put(name, train.columns[name], "trainer")
    if table.old_logprobs == "rollout" and "old_logprobs" in judges.needs.loss | judges.needs.driver:
        train.columns["old_logprobs"] = train.columns["rollout_logprobs"]
    _advantages(batch, judges.advantages)
    length = table.constant_length or config.rollout.sampling.max_new_tokens
    batches: list[TrainBatch] = []
    for epoch in range(table.epochs):
        rng = np.random.default_rng([seed, train.step, epoch])
        for minibatch, members in enumerate(split_minibatches(batch.groups, table.minibatches, rng)):
            part = train.select([i for g in members for i in batch.groups[g]])
            part.minibatch, part.epoch = minibatch, epoch
            denominator = _correct(batch, part, judges.corrections)
            weigh(part, denominator, table.aggregation, length, judges.scopes)
            batches.append(part)
    if "old_logprobs" in judges.needs.loss and "old_logprobs" not in train.columns and batches:
        if len(batches) > 1:
            raise ContractError(f"{len(batches)} optimizer steps need old_logprobs, and the column was not computed")
        batches[0].old_is_current = True
    return batches


def skip_reason(batch: TrainBatch) -> str | None:
    """Why no optimizer step can be taken on `batch`, as a counter key, or None."""
    return None if batch.num_trainable else "nothing-trainable"


def _advantages(batch: StepBatch, chain: Sequence[tuple[str, Advantage]]) -> None:
    train = batch.train
    last: Rows | None = None
    returns: Rows | None = None
    for name, advantage in chain:
        where = f"advantage/{name}"
        inputs = AdvantageInputs(
            samples=train.samples,
            groups=batch.groups,
            rewards=batch.rewards,
            mask=train.mask,
            columns=train.columns,
            baselines=batch.baselines,
            advantages=last,
            returns=returns,
        )
        output = advantage(inputs)
        check_zero_outside(where, train, output.advantages)
        last = checked_rows(where, "advantages", train.samples, output.advantages, train.mask)
        if output.returns is not None:
            returns = checked_rows(where, "returns", train.samples, output.returns, train.mask)
        batch.add_metrics(where, output.metrics)
    if last is None:
        raise ContractError("a run needs at least one advantage")
    train.columns["advantages"] = last
    if returns is not None:
        train.columns["returns"] = returns


def _correct(batch: StepBatch, part: TrainBatch, corrections: Sequence[tuple[str, Correction, str]]) -> Rows:
    """Applies corrections to `part` in order; returns the mask that the denominators are counted from."""
    denominator = part.mask
    for name, correction, rule in corrections:
        where = f"correction/{name}"
        inputs = CorrectionInputs(
            samples=part.samples,
            mask=part.mask,
            advantages=part.columns["advantages"],
            columns=part.columns,
            version=part.version,
        )
        output = correction(inputs)
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
