"""What the batch refuses: each error names the component and the sample. Shape letter: T tokens of a sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_core.errors import ContractError
from miles_core.fields import FieldSpec, check_field, fill_field
from miles_core.types import Sample, TrainBatch
from miles_core.votes import sample_id
from miles_core.weights import Rows


def check_sample(sample: Sample) -> None:
    """Raises ContractError unless `sample` is complete and its arrays fit together."""
    num = sample.num_tokens
    if sample.status == "running":
        raise ContractError(f"sample {sample_id(sample)} is still running and cannot be trained")
    if not (len(sample.loss_mask) == len(sample.logprobs) == num):
        raise ContractError(
            f"sample {sample_id(sample)} has {num} tokens, {len(sample.loss_mask)} loss_mask entries and "
            f"{len(sample.logprobs)} logprobs; the three must be equal"
        )
    if sample.loss_mask.dtype != bool:
        raise ContractError(f"loss_mask of sample {sample_id(sample)} is {sample.loss_mask.dtype}, not bool")
    if num and sample.loss_mask[0]:
        raise ContractError(f"loss_mask[0] of sample {sample_id(sample)} is True, but nothing predicts the first token")


def checked_rows(where: str, name: str, samples: Sequence[Sample], rows: Sequence[np.ndarray], masks: Rows) -> Rows:
    """`rows` as float32[T], zeroed outside the mask. `where`, not a sum with the mask: NaN times 0 is NaN."""
    if len(rows) != len(samples):
        raise ContractError(f"{where} returned {len(rows)} rows of {name} for {len(samples)} samples")
    out: Rows = []
    for sample, row, mask in zip(samples, rows, masks, strict=True):
        array = np.asarray(row, dtype=np.float32)
        if array.shape != mask.shape:
            raise ContractError(
                f"{where} returned {name} of shape {array.shape} for sample {sample_id(sample)} of {len(mask)} tokens"
            )
        array = np.where(mask, array, np.float32(0))
        if not np.isfinite(array).all():
            bad = int(np.flatnonzero(~np.isfinite(array))[0])
            raise ContractError(f"{where} returned {name} {array[bad]} for sample {sample_id(sample)} at token {bad}")
        out.append(array)
    return out


def checked_mask(where: str, part: TrainBatch, masks: Sequence[np.ndarray]) -> Rows:
    """The masks that a correction returned; it may mask, never unmask."""
    if len(masks) != len(part.samples):
        raise ContractError(f"{where} returned {len(masks)} masks for {len(part.samples)} samples")
    for sample, old, new in zip(part.samples, part.mask, masks, strict=True):
        if new.shape != old.shape or new.dtype != bool:
            raise ContractError(
                f"{where} returned a mask {new.dtype}{new.shape} for sample {sample_id(sample)} of {len(old)} tokens"
            )
        if (new & ~old).any():
            raise ContractError(f"{where} unmasked a token of sample {sample_id(sample)}; corrections may only mask")
    return list(masks)


def check_zero_outside(where: str, samples: Sequence[Sample], rows: Sequence[np.ndarray], masks: Rows) -> None:
    """Raises ContractError when an advantage wrote outside the mask."""
    for sample, row, mask in zip(samples, rows, masks, strict=True):
        if np.any(np.asarray(row)[~mask]):
            raise ContractError(f"{where} gave an advantage to a masked token of sample {sample_id(sample)}")


def require_field(spec: FieldSpec, samples: Sequence[Sample], masks: Rows) -> None:
    """Checks a side channel on all samples; a missing one is filled, masked, or an error, as its declaration says."""
    present = next((s.extras[spec.name] for s in samples if isinstance(s.extras.get(spec.name), np.ndarray)), None)
    rows = 0 if spec.align == "sample" else 1
    tail = present.shape[rows:] if present is not None else ()
    for sample, mask in zip(samples, masks, strict=True):
        value = sample.extras.get(spec.name)
        if value is not None:
            sample.extras[spec.name] = check_field(spec, value, sample.num_tokens, sample_id(sample))
        elif not mask.any():
            continue
        elif (filled := fill_field(spec, sample.num_tokens, tail)) is None:
            mask[:] = False
        elif len(tail) != len(spec.axes):
            raise ContractError(f'no sample of the step carries field "{spec.name}", so its shape is unknown')
        else:
            sample.extras[spec.name] = filled
