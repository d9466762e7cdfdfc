"""Trainers that break a rule."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.testing import suites, toy_model
from miles_core.testing.broken import Shelf
from miles_core.testing.toy_trainer import ToyTrainer
from miles_core.types import Bucket, RankInfo, StepReport, TrainBatch

COUNTER = itertools.count()

TRAINER = Shelf(suites.ToyTrainer, lambda cls: cls)


@TRAINER.breaks("test_start_tells_where_it_stands")
class CountsFromOne(ToyTrainer):
    def start(self) -> RankInfo:
        return replace(super().start(), rank=1)


@TRAINER.breaks("test_the_same_seed_starts_with_the_same_weights")
class UnseededStart(ToyTrainer):
    def start(self) -> RankInfo:
        info = super().start()
        self.params["bias"] += np.float32(0.01 * next(COUNTER))
        return info


class Forward(ToyTrainer):
    """`row(values, sample index)` changes what forward returns."""

    def row(self, values: np.ndarray, index: int) -> np.ndarray:
        return values

    def forward(self, batch: TrainBatch, role: str, outputs: frozenset[str]) -> dict[str, list[np.ndarray]]:
        rows = super().forward(batch, role, outputs)
        return {name: [self.row(r, i) for i, r in enumerate(values)] for name, values in rows.items()}


@TRAINER.breaks("test_forward_is_aligned_with_the_tokens")
class ShiftedByOne(Forward):
    def row(self, values: np.ndarray, index: int) -> np.ndarray:
        return np.roll(values, -1)


@TRAINER.breaks("test_forward_knows_no_neighbours")
class LeaksOfNeighbours(Forward):
    def row(self, values: np.ndarray, index: int) -> np.ndarray:
        return np.where(values != 0, values - np.float32(0.01 * index), values)


@TRAINER.breaks("test_forward_is_at_the_samples_temperature")
class TemperatureOne(ToyTrainer):
    def forward(self, batch: TrainBatch, role: str, outputs: frozenset[str]) -> dict[str, list[np.ndarray]]:
        samples = [replace(s, temperature=1.0) for s in batch.samples]
        return super().forward(replace(batch, samples=samples), role, outputs)


@TRAINER.breaks("test_forward_changes_nothing")
class ForwardDrifts(Forward):
    def row(self, values: np.ndarray, index: int) -> np.ndarray:
        self.params["bias"] += np.float32(1e-3)
        return values


@TRAINER.breaks("test_an_empty_shard_takes_part")
class NeedsSamples(ToyTrainer):
    def step(self, batch: TrainBatch, role: str = "policy") -> StepReport:
        report = super().step(batch, role)
        report.metrics["length"] = (report.tokens / len(batch.samples), 1.0, "mean")
        return report


class Objective(ToyTrainer):
    """`change(loss, gradients, batch)` changes what a step computes."""

    def change(self, loss: float, grads: Any, batch: TrainBatch) -> tuple[float, Any]:
        return loss, grads

    def loss_and_gradients(self, batch: TrainBatch) -> Any:
        loss, grads, metrics, logprobs = super().loss_and_gradients(batch)
        return (*self.change(loss, grads, batch), metrics, logprobs)


@TRAINER.breaks("test_the_loss_is_the_weighted_sum")
class MeanOverSamples(Objective):
    def change(self, loss: float, grads: Any, batch: TrainBatch) -> tuple[float, Any]:
        return loss / len(batch.samples), grads


@TRAINER.breaks("test_the_report_is_complete")
class ReportsNoLogprobs(ToyTrainer):
    def step(self, batch: TrainBatch, role: str = "policy") -> StepReport:
        report = super().step(batch, role)
        report.columns["logprobs"] = [np.zeros_like(row) for row in report.columns["logprobs"]]
        return report


@TRAINER.breaks("test_a_step_goes_in_the_right_direction")
class ClimbsTheLoss(Objective):
    def change(self, loss: float, grads: Any, batch: TrainBatch) -> tuple[float, Any]:
        return loss, {name: -grad for name, grad in grads.items()}


@TRAINER.breaks("test_microbatches_do_not_matter")
class MeanOfMicrobatches(Objective):
    def change(self, loss: float, grads: Any, batch: TrainBatch) -> tuple[float, Any]:
        count = -(-batch.num_trainable // self.config.microbatch_tokens) if self.config.microbatch_tokens else 1
        return loss / count, {name: grad / count for name, grad in grads.items()}


@TRAINER.breaks("test_order_does_not_matter")
class FirstCountsDouble(ToyTrainer):
    def loss_and_gradients(self, batch: TrainBatch) -> Any:
        first, *rest = batch.token_weights["policy"]
        return super().loss_and_gradients(replace(batch, token_weights={"policy": [first * 2, *rest]}))


@TRAINER.breaks("test_masked_tokens_are_not_trained")
class TrainsTheWholeAnswer(ToyTrainer):
    def loss_and_gradients(self, batch: TrainBatch) -> Any:
        whole = [np.arange(s.num_tokens) >= s.prompt_len for s in batch.samples]
        return super().loss_and_gradients(replace(batch, mask=whole))


@TRAINER.breaks("test_nothing_trainable_moves_nothing")
class CountsSkippedSteps(ToyTrainer):
    def step(self, batch: TrainBatch, role: str = "policy") -> StepReport:
        report = super().step(batch, role)
        self.num_steps += report.skipped is not None
        return report


@TRAINER.breaks("test_nothing_trainable_moves_nothing")
class StepsOnZeros(ToyTrainer):
    def step(self, batch: TrainBatch, role: str = "policy") -> StepReport:
        report = super().step(batch, role)
        if report.skipped:
            self._adam({name: np.zeros(shape) for name, shape in toy_model.SHAPES.items()}, 1.0)
        return report


@TRAINER.breaks("test_a_loss_that_is_not_finite_stops_the_run")
class TrainsOnNan(Objective):
    def change(self, loss: float, grads: Any, batch: TrainBatch) -> tuple[float, Any]:
        return float(np.nan_to_num(loss)), {name: np.nan_to_num(grad) for name, grad in grads.items()}


@TRAINER.breaks("test_a_loss_that_is_not_finite_stops_the_run")
class NoticesTooLate(ToyTrainer):
    def loss_and_gradients(self, batch: TrainBatch) -> Any:
        self.params["bias"] += np.float32(1e-3)
        return super().loss_and_gradients(batch)


@TRAINER.breaks("test_sleep_keeps_everything")
class ForgetsMomentsAsleep(ToyTrainer):
    def sleep(self, tags: Any = ("optimizer", "weights")) -> None:
        for moment in self.moments.values():
            moment[:] = 0


# --- Weights ---------------------------------------------------------------------------------------------------------


class Export(ToyTrainer):
    """`bucket(bucket)` changes what is exported."""

    def bucket(self, bucket: Bucket) -> Bucket:
        return bucket

    def export(self, layout: str, bucket_bytes: int) -> Iterator[Bucket]:
        yield from map(self.bucket, super().export(layout, bucket_bytes))


@TRAINER.breaks("test_export_is_well_formed")
class WrongHash(Export):
    def bucket(self, bucket: Bucket) -> Bucket:
        return replace(bucket, sha="0" * 64)


@TRAINER.breaks("test_export_is_well_formed")
class OneBigBucket(ToyTrainer):
    def export(self, layout: str, bucket_bytes: int) -> Iterator[Bucket]:
        return super().export(layout, 1 << 40)


@TRAINER.breaks("test_export_has_the_same_names_each_time")
class NamesOfTheStep(Export):
    def bucket(self, bucket: Bucket) -> Bucket:
        named = tuple(replace(s, name=f"{s.name}.{self.num_steps}") for s in bucket.tensors)
        return replace(bucket, tensors=named)


@TRAINER.breaks("test_export_has_the_same_names_each_time")
class ExportsTheReference(ToyTrainer):
    def export(self, layout: str, bucket_bytes: int) -> Iterator[Bucket]:
        self.params, own = self.reference, self.params
        try:
            yield from super().export(layout, bucket_bytes)
        finally:
            self.params = own


@TRAINER.breaks("test_export_changes_nothing")
class LeavesItHalfDone(Export):
    def bucket(self, bucket: Bucket) -> Bucket:
        self.moments["m.bias"][:] = 1.0
        return bucket


@TRAINER.breaks("test_export_is_what_save_model_writes")
class RoundsOnDisk(ToyTrainer):
    def save_model(self, folder: Path) -> None:
        rounded = {n: v.astype(np.float16).astype(np.float32) for n, v in self.params.items()}
        toy_model.write_model(folder, rounded)


@TRAINER.breaks("test_a_saved_model_is_the_same_policy")
class IgnoresTheModel(ToyTrainer):
    def start(self) -> RankInfo:
        self.context.model_path = None
        return super().start()


@TRAINER.breaks("test_save_and_load_continue_bit_for_bit")
class ForgetsTheOptimizer(ToyTrainer):
    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        super().load(folder, weights_only=True)


@TRAINER.breaks("test_weights_alone_can_be_loaded")
class LoadsAllOrNothing(ToyTrainer):
    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        if not weights_only:
            super().load(folder)


@TRAINER.breaks("test_files_are_no_pickles")
class SavesAPickle(ToyTrainer):
    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / "rng.pt").write_bytes(pickle.dumps({"rng": 1}))


@TRAINER.breaks("test_an_incomplete_save_is_refused")
class LoadsWhatThereIs(ToyTrainer):
    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        with contextlib.suppress(Exception):
            super().load(folder, weights_only=weights_only)


@TRAINER.breaks("test_the_hash_changes_with_the_weights")
class HashOfTheNames(ToyTrainer):
    def state_hash(self) -> str:
        return ",".join(self.params)
