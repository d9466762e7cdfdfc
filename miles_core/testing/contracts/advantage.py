"""Suite of the kind advantage."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.testing.contracts.base import ComponentContract, no_error
from miles_core.testing.samples import make_sample
from miles_core.types import AdvantageInputs, AdvantageOutput, Sample

Rows = Sequence[np.ndarray]


class AdvantageContract(ComponentContract):
    """An `Advantage`. Columns that it needs are filled with random numbers."""

    relative: bool = True
    """Whether rewards are compared inside each group, and nothing else counts (GRPO, RLOO). False for GAE, for a global
    baseline, or for one that changes the advantages of the previous one."""
    follows: bool = False
    """Whether it works on the advantages of the one before it in the chain."""

    # --- Inputs ---

    def samples(self, rewards: Sequence[float | None], group: str = "g@0") -> list[Sample]:
        """One sample per reward, of different lengths, with a gap in the mask (a tool's answer) in every second one."""
        made = []
        for i, reward in enumerate(rewards):
            mask = [1, 0, 1, 1] if i % 2 else [1] * (2 + i)
            made.append(make_sample(len(mask), mask=mask, reward=reward, group=group, index=i))
        return made

    def inputs(self, *groups: Sequence[Sample]) -> AdvantageInputs:
        samples = [sample for group in groups for sample in group]
        starts = np.cumsum([0, *map(len, groups)])
        made = AdvantageInputs(
            samples=samples,
            groups=[tuple(range(a, b)) for a, b in pairwise(starts)],
            rewards=[s.reward for s in samples],
            mask=[s.loss_mask.copy() for s in samples],
            columns={name: [column(s, name) for s in samples] for name in self.component.needed(self.config)},
            baselines=[0.25 for _ in groups],
        )
        if self.follows:
            made.advantages = [column(s, "advantages") * s.loss_mask for s in samples]
        return made

    def compute(self, folder: Path, inputs: AdvantageInputs) -> AdvantageOutput:
        with no_error("the advantage"):
            return self.build(folder)(inputs)

    def advantages(self, folder: Path, *groups: Sequence[Sample]) -> list[np.ndarray]:
        return self.compute(folder, self.inputs(*groups)).advantages

    # --- Rules ---

    def test_rows_fit_the_samples(self, tmp_path: Path) -> None:
        """float32[T] per sample, for `advantages` and, where given, `returns`."""
        inputs = self.inputs(self.samples([0, 1, 1]), self.samples([0.5, 0.5], "h@0"))
        output = self.compute(tmp_path, inputs)
        for rows in filter(lambda rows: rows is not None, (output.advantages, output.returns)):
            assert len(rows) == len(inputs.samples), f"{len(rows)} rows for {len(inputs.samples)} samples"
            for row, sample in zip(rows, inputs.samples, strict=True):
                assert row.shape == sample.tokens.shape, f"{row.shape} for {sample.num_tokens} tokens"
                assert row.dtype == np.float32, row.dtype

    def test_masked_tokens_get_exactly_zero(self, tmp_path: Path) -> None:
        """Nothing is written outside the mask."""
        inputs = self.inputs(self.samples([0, 1, 1]), self.samples([2, 0.5], "h@0"))
        for row, mask in zip(self.compute(tmp_path, inputs).advantages, inputs.mask, strict=True):
            assert not row[~mask].any(), f"{row} where the mask is {mask}"

    def test_masked_values_do_not_matter(self, tmp_path: Path) -> None:
        """What stands outside the mask in a column (NaN too) changes nothing."""
        clean, dirty = (self.inputs(self.samples([0, 1, 1])) for _ in range(2))
        for rows in dirty.columns.values():
            for row, mask in zip(rows, dirty.mask, strict=True):
                row[~mask] = np.nan
        same(self.compute(tmp_path, clean).advantages, self.compute(tmp_path, dirty).advantages)

    def test_values_are_finite(self, tmp_path: Path) -> None:
        """For tiny, huge and single rewards, and for samples without a trainable token."""
        untrainable = self.samples([0, 1])
        untrainable[1].loss_mask[:] = False
        for group in (self.samples([0, 1e-12]), self.samples([0, 1e12]), self.samples([1]), untrainable):
            for row in self.advantages(tmp_path, group):
                assert np.isfinite(row).all(), f"{row} for rewards {[s.reward for s in group]}"

    def test_equal_rewards_give_exactly_zero(self, tmp_path: Path) -> None:
        """(relative) Also where a mean of equal numbers does not equal them, and for a single sample."""
        self._only_if_relative()
        for rewards in ([0.1] * 3, [0.0] * 4, [1 / 3] * 7, [0.7], [-1e9] * 3):
            for row in self.advantages(tmp_path, self.samples(rewards)):
                assert not row.any(), f"{row} for rewards {rewards}"

    def test_the_better_sample_gets_more(self, tmp_path: Path) -> None:
        """In a group, a higher reward gives a higher advantage."""
        low, high = self.advantages(tmp_path, self.samples([0.0, 1.0]))
        self._only_if_relative()
        assert high[-1] > 0 > low[-1], f"rewards 0 and 1 got {low[-1]} and {high[-1]}"

    def test_no_verdict_is_no_vote(self, tmp_path: Path) -> None:
        """(relative) A sample without verdict gets zeros, and its siblings what they would get without it."""
        self._only_if_relative()
        with_none = self.advantages(tmp_path, self.samples([0, 1, 0.5, None]))
        same(with_none[:3], self.advantages(tmp_path, self.samples([0, 1, 0.5])))
        assert not with_none[3].any(), f"no verdict, and an advantage of {with_none[3]}"

    def test_order_does_not_matter(self, tmp_path: Path) -> None:
        """Permuting the samples of a group permutes their advantages."""
        inputs = self.inputs(self.samples([0, 1, 0.5, 0.25]))
        order = [2, 0, 3, 1]
        moved = replace(inputs, **{n: [getattr(inputs, n)[i] for i in order] for n in ("samples", "rewards", "mask")})
        moved.columns = {n: [rows[i] for i in order] for n, rows in inputs.columns.items()}
        moved.advantages = inputs.advantages and [inputs.advantages[i] for i in order]
        rows = self.compute(tmp_path, inputs).advantages
        same(self.compute(tmp_path, moved).advantages, [rows[i] for i in order])

    def test_one_trajectory_is_one_vote(self, tmp_path: Path) -> None:
        """A trajectory that fans out into segments counts once: its siblings get what they would get without the fan."""
        self._only_if_relative()
        plain = self.samples([0, 1, 1])
        fan = [replace(plain[2], segment=n, loss_mask=plain[2].loss_mask.copy()) for n in (1, 2, 3)]
        same(self.advantages(tmp_path, [*plain, *fan])[:2], self.advantages(tmp_path, plain)[:2])

    def test_groups_do_not_mix(self, tmp_path: Path) -> None:
        """(relative) The advantages of a group do not depend on the other groups of the batch."""
        self._only_if_relative()
        alone = self.advantages(tmp_path, self.samples([0, 1]))
        same(self.advantages(tmp_path, self.samples([0, 1]), self.samples([5, 9, 7], "h@0"))[:2], alone)

    def test_the_inputs_are_not_changed(self, tmp_path: Path) -> None:
        """Masks, rewards and columns belong to the batch."""
        inputs = self.inputs(self.samples([0, 1, None]))
        before = copy.deepcopy(inputs)
        self.compute(tmp_path, inputs)
        assert inputs.rewards == before.rewards and inputs.groups == before.groups
        for name in ("mask", *inputs.columns):
            new, old = (x.mask if name == "mask" else x.columns[name] for x in (inputs, before))
            assert all(map(np.array_equal, new, old)), f"the advantage changed {name}"

    def _only_if_relative(self) -> None:
        if not self.relative:
            pytest.skip("relative = False: it does not compare the samples of a group")


def column(sample: Sample, name: str) -> np.ndarray:
    """A row of random numbers that belongs to this sample, wherever it stands in a batch."""
    seed = [len(name), sample.index, sample.segment, sample.num_tokens]
    return np.random.default_rng(seed).normal(size=sample.num_tokens).astype(np.float32)


def same(got: Rows, wanted: Rows) -> None:
    """Equal up to the rounding of another order of summation."""
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def changed_nothing(before: Any, after: Any) -> bool:
    return all(map(np.array_equal, before, after))
