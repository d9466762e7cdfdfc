"""Suite of the kind correction."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from miles_core.testing.contracts.advantage import changed_nothing, column, same
from miles_core.testing.contracts.base import ComponentContract, no_error
from miles_core.testing.samples import make_sample
from miles_core.types import CorrectionInputs, CorrectionOutput


class CorrectionContract(ComponentContract):
    """A `Correction`."""

    neutral: bool = True
    """Whether it changes nothing where engine and trainer agree, no token is old and no sample was cut."""

    def inputs(self, gap: float = 0.0, *, untrainable: bool = False) -> CorrectionInputs:
        """Four samples; the trainer's log-probabilities are the engine's plus `gap` times a random number."""
        samples = [make_sample(3 + i, mask=[1, 0, *[1] * (1 + i)], index=i, reward=float(i % 2)) for i in range(4)]
        masks = [s.loss_mask & (not untrainable) for s in samples]
        rollout = [s.logprobs.copy() for s in samples]
        columns = {name: [column(s, name) for s in samples] for name in self.component.needed(self.config)}
        columns["rollout_logprobs"] = rollout
        for name in ("old_logprobs", "reference_logprobs", "teacher_logprobs"):
            rows = zip(rollout, samples, masks, strict=True)
            columns[name] = [r + np.float32(gap) * column(s, "gap") * m for r, s, m in rows]
        advantages = [column(s, "advantages") * m for s, m in zip(samples, masks, strict=True)]
        return CorrectionInputs(samples=samples, mask=masks, advantages=advantages, columns=columns, version=0)

    def compute(self, folder: Path, inputs: CorrectionInputs) -> CorrectionOutput:
        with no_error("the correction"):
            return self.build(folder)(inputs)

    def test_it_says_what_becomes_of_the_denominator(self) -> None:
        """The trait `denominator` is "keep" or "shrink": whether a token that it masks still counts in the mean."""
        assert self.component.traits.get("denominator") in ("keep", "shrink"), f"traits: {dict(self.component.traits)}"

    def test_rows_fit_the_samples(self, tmp_path: Path) -> None:
        """bool[T] per sample for `mask`, float32[T] for `multiplier`."""
        inputs = self.inputs(0.5)
        output = self.compute(tmp_path, inputs)
        for rows, dtype in ((output.mask, np.bool_), (output.multiplier, np.float32)):
            if rows is not None:
                assert [r.shape for r in rows] == [m.shape for m in inputs.mask]
                assert {r.dtype for r in rows} == {np.dtype(dtype)}, f"not {dtype.__name__}: {[r.dtype for r in rows]}"

    def test_it_never_unmasks(self, tmp_path: Path) -> None:
        """A token outside the mask stays outside."""
        for gap in (0.0, 0.5, 50.0):
            inputs = self.inputs(gap)
            for old, new in zip(self.inputs(gap).mask, self.compute(tmp_path, inputs).mask, strict=True):
                assert not (new & ~old).any(), f"mask {old} became {new}"

    def test_multipliers_are_finite(self, tmp_path: Path) -> None:
        """A multiplier is finite and not negative, also where engine and trainer are far apart."""
        for gap in (0.0, 0.5, 50.0, 1000.0):
            for row in self.compute(tmp_path, self.inputs(gap)).multiplier or ():
                assert np.isfinite(row).all() and (row >= 0).all(), f"{row} at a gap of {gap} nats"

    def test_agreement_changes_nothing(self, tmp_path: Path) -> None:
        """(neutral) Where engine and trainer agree, the mask stays and the multiplier is 1 inside it."""
        if not self.neutral:
            pytest.skip("neutral = False: it changes something even where engine and trainer agree")
        inputs = self.inputs(0.0)
        output = self.compute(tmp_path, inputs)
        assert all(map(np.array_equal, output.mask, inputs.mask)), "a token was masked"
        for row, mask in zip(output.multiplier or (), inputs.mask, strict=False):
            same([row[mask]], [np.ones(mask.sum(), np.float32)])

    def test_nothing_trainable_is_fine(self, tmp_path: Path) -> None:
        """A minibatch without a trainable token is not an error, and no division by zero."""
        with np.errstate(divide="raise", invalid="raise"):
            output = self.compute(tmp_path, self.inputs(0.5, untrainable=True))
        assert not any(row.any() for row in output.mask)

    def test_the_inputs_are_not_changed(self, tmp_path: Path) -> None:
        """Masks, advantages and columns belong to the batch."""
        inputs = self.inputs(50.0)
        before = copy.deepcopy(inputs)
        self.compute(tmp_path, inputs)
        assert changed_nothing(before.mask, inputs.mask), "the correction changed the mask in place"
        assert changed_nothing(before.advantages, inputs.advantages), "the correction changed the advantages"
        for name in inputs.columns:
            assert changed_nothing(before.columns[name], inputs.columns[name]), f"the correction changed {name}"
