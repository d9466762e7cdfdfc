"""Suite of the kind trainer: passes and steps. Files and exports are in `trainer_state`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.errors import RunFailed
from miles_core.testing.contracts.base import no_error, refused
from miles_core.testing.contracts.trainer_state import TrainerState
from miles_core.types import TrainBatch


class TrainerContract(TrainerState):
    """A `TrainerRank`, alone (world size 1). Set `vocab_size`, `model_path` where it loads a model, and
    `microbatch_options`. The loss is the built-in policy-gradient, whose value is known: the sum of -weight * advantage.
    """

    # --- Passes ---

    def test_start_tells_where_it_stands(self, tmp_path: Path) -> None:
        """Alone, a rank is rank 0 of 1 in every respect, and returns results."""
        info = self.build(tmp_path).start()
        place = (info.rank, info.world_size, info.dp_rank, info.dp_size, info.output)
        assert place == (0, 1, 0, 1, True), str(info)

    def test_the_same_seed_starts_with_the_same_weights(self, tmp_path: Path) -> None:
        """Two ranks with one seed and model start alike."""
        assert self.hash(self.started(tmp_path)) == self.hash(self.started(tmp_path))

    def test_forward_is_aligned_with_the_tokens(self, tmp_path: Path) -> None:
        """float32[T] per sample and output, 0 at index 0; log-probabilities are <= 0 and not all 0."""
        batch = self.batch()
        rows = self.logprobs(self.started(tmp_path), batch)
        assert len(rows) == len(batch.samples)
        for row, sample in zip(rows, batch.samples, strict=True):
            assert row.shape == sample.tokens.shape and row.dtype == np.float32, f"{row.dtype}{row.shape}"
            assert row[0] == 0, f"index 0 holds {row[0]}"
            answer = row[sample.prompt_len :]
            assert np.isfinite(row).all() and (answer <= 0).all() and answer.any(), row

    def test_forward_knows_no_neighbours(self, tmp_path: Path) -> None:
        """A sample has the same log-probabilities alone and among others, in any order."""
        rank, batch = self.started(tmp_path), self.batch()
        rows = self.logprobs(rank, batch)
        order = list(range(len(rows)))[::-1]
        close(self.logprobs(rank, batch.select(order)), [rows[i] for i in order])
        close(self.logprobs(rank, batch.select([2])), [rows[2]])

    def test_forward_is_at_the_samples_temperature(self, tmp_path: Path) -> None:
        """Each sample's own temperature counts: the same tokens at 0.5 have other log-probabilities, at 1.0 the same."""
        rank, batch = self.started(tmp_path), self.batch()
        samples = [replace(s, temperature=0.5 if i % 2 else 1.0) for i, s in enumerate(batch.samples)]
        mixed = replace(batch, samples=samples)
        plain, warm = self.logprobs(rank, batch), self.logprobs(rank, mixed)
        close(warm[0::2], plain[0::2])
        assert not np.allclose(warm[1], plain[1], atol=1e-3), "a temperature of 0.5 changed nothing"

    def test_forward_changes_nothing(self, tmp_path: Path) -> None:
        """No weight moves in a forward pass."""
        rank = self.started(tmp_path)
        before = self.hash(rank)
        self.logprobs(rank, self.batch())
        assert self.hash(rank) == before

    def test_an_empty_shard_takes_part(self, tmp_path: Path) -> None:
        """A batch without samples is no error: `forward` gives empty lists, `step` is skipped."""
        rank, empty = self.started(tmp_path), self.batch().select([])
        with no_error("forward of an empty batch"):
            assert rank.forward(empty, "policy", frozenset({"logprobs"})) == {"logprobs": []}
        with no_error("step of an empty batch"):
            assert rank.step(empty).skipped

    # --- Steps ---

    def test_the_loss_is_the_weighted_sum(self, tmp_path: Path) -> None:
        """`loss` is the sum of weight * multiplier * per-token loss over trainable tokens: no mean, no padding."""
        batch = self.batch()
        batch.columns["multiplier"] = [np.full(s.num_tokens, 0.5, np.float32) for s in batch.samples]
        report = self.started(tmp_path).step(batch)
        rows = zip(batch.token_weights["policy"], batch.columns["advantages"], batch.mask, strict=True)
        wanted = sum(float(-(0.5 * w * a)[m].sum()) for w, a, m in rows)
        np.testing.assert_allclose(report.loss, wanted, rtol=1e-4, atol=1e-6)

    def test_the_report_is_complete(self, tmp_path: Path) -> None:
        """`trainable`, `tokens`, a positive `grad_norm`, `lr`, and the log-probabilities from before the step."""
        rank, batch = self.started(tmp_path), self.batch()
        before = self.logprobs(rank, batch)
        report = rank.step(batch)
        counts = (report.step, report.trainable, report.tokens, report.skipped)
        assert counts == (batch.step, batch.num_trainable, sum(s.num_tokens for s in batch.samples), None)
        assert report.grad_norm > 0 and report.lr > 0
        got = [row[m] for row, m in zip(report.columns["logprobs"], batch.mask, strict=True)]
        close(got, [row[m] for row, m in zip(before, batch.mask, strict=True)])

    def test_a_step_goes_in_the_right_direction(self, tmp_path: Path) -> None:
        """With one advantage of 1 for all, a step makes what was sampled likelier."""
        rank, batch = self.started(tmp_path), self.batch()
        batch.columns["advantages"] = [m.astype(np.float32) for m in batch.mask]
        before = trained_sum(self.logprobs(rank, batch), batch)
        rank.step(batch)
        after = trained_sum(self.logprobs(rank, batch), batch)
        assert after > before, f"log-probability of the samples went from {before} to {after}"

    def test_microbatches_do_not_matter(self, tmp_path: Path) -> None:
        """`microbatch_options` change memory and speed: loss, gradient norm and the new policy stay the same."""
        if self.microbatch_options is None:
            pytest.skip("no `microbatch_options` were given")
        whole = self._after_a_step(tmp_path, self.batch())
        self.options = {**self.options, **self.microbatch_options}
        same_step(self._after_a_step(tmp_path, self.batch()), whole)

    def test_order_does_not_matter(self, tmp_path: Path) -> None:
        """The samples in another order: loss, gradient norm and the new policy stay the same."""
        batch = self.batch()
        order = list(range(len(batch.samples)))[::-1]
        same_step(self._after_a_step(tmp_path, batch.select(order)), self._after_a_step(tmp_path, batch))

    def _after_a_step(self, folder: Path, batch: TrainBatch) -> tuple[float, float, Any]:
        """Loss, gradient norm, and the log-probabilities that the new policy gives to a batch of its own."""
        rank = self.started(folder)
        report = rank.step(batch)
        return report.loss, report.grad_norm, self.logprobs(rank, self.batch(seed=9))

    def test_masked_tokens_are_not_trained(self, tmp_path: Path) -> None:
        """What advantages and weights say of a masked token changes neither loss nor gradient."""
        batch, other = self.batch(), self.batch()
        for rows in (other.columns["advantages"], other.token_weights["policy"]):
            for row, mask in zip(rows, other.mask, strict=True):
                row[~mask] = 7.0
        same_step(self._after_a_step(tmp_path, other), self._after_a_step(tmp_path, batch))

    def test_nothing_trainable_moves_nothing(self, tmp_path: Path) -> None:
        """The step is skipped and says why; no weight, moment or schedule moves: the next step is as if it had not been."""
        plain, rank, empty = self.started(tmp_path), self.started(tmp_path), self.batch()
        empty.mask = [np.zeros_like(m) for m in empty.mask]
        for one in (plain, rank):
            one.step(self.batch())
        before = self.hash(rank)
        with no_error("a step with nothing trainable"):
            report = rank.step(empty)
        assert report.skipped and report.loss == 0, f"skipped = {report.skipped!r}, loss = {report.loss}"
        assert self.hash(rank) == before, "a skipped step moved the weights"
        reports = [one.step(self.batch(seed=1)) for one in (plain, rank)]
        assert reports[0].lr == reports[1].lr, "a skipped step moved the schedule"
        assert self.hash(plain) == self.hash(rank), "a skipped step moved the optimizer"

    def test_a_loss_that_is_not_finite_stops_the_run(self, tmp_path: Path) -> None:
        """RunFailed, before any weight has moved."""
        rank, batch = self.started(tmp_path), self.batch()
        row = batch.columns["advantages"][1]
        row[np.flatnonzero(batch.mask[1])[0]] = np.nan
        before = self.hash(rank)
        with refused(RunFailed, "a step whose loss is NaN"):
            rank.step(batch)
        assert self.hash(rank) == before, "the weights moved before it was noticed"

    def test_sleep_keeps_everything(self, tmp_path: Path) -> None:
        """After `sleep` and `wake` training goes on as if it had not slept."""
        plain, rank = self.started(tmp_path), self.started(tmp_path)
        for one in (plain, rank):
            one.step(self.batch())
        rank.sleep()
        rank.wake()
        for one in (plain, rank):
            one.step(self.batch(seed=1))
        assert self.hash(plain) == self.hash(rank)


def close(got: Any, wanted: Any) -> None:
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def same_step(got: tuple[float, float, Any], wanted: tuple[float, float, Any]) -> None:
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4, atol=1e-7, err_msg="loss")
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-3, err_msg="gradient norm")
    for a, b in zip(got[2], wanted[2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3, err_msg="the policy after the step")


def trained_sum(rows: Any, batch: TrainBatch) -> float:
    return sum(float(row[m].sum()) for row, m in zip(rows, batch.mask, strict=True))
