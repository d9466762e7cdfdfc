"""What the batch refuses: each error names the component and the sample. Shape letter: T tokens of a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import numpy as np

from miles_core.errors import ContractError, MilesError, RunFailed
from miles_core.fields import FieldSpec, check_field, fill_field
from miles_core.types import Reduce, Sample, TrainBatch
from miles_core.votes import sample_id
from miles_core.weights import Rows

Output = TypeVar("Output")


def called(where: str, function: Callable[[Any], Any], inputs: Any, kind: type[Output]) -> Output:
    """What `function` makes of `inputs`. Raises RunFailed with what it raised, and ContractError when that is no `kind` or
    its metrics are none; both name `where`."""
    try:
        output = function(inputs)
    except MilesError:
        raise
    except Exception as error:
        raise RunFailed(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(output, kind):
        raise ContractError(f"{where} returned {_short(output)}, not {kind.__name__}")
    check_metrics(where, output.metrics)  # type: ignore[attr-defined]
    return output


def check_metrics(where: str, metrics: Mapping[str, Any]) -> None:
    """Raises ContractError for a metric that is no (sum, count, reduce)."""
    for name, metric in metrics.items():
        if not isinstance(metric, tuple) or len(metric) != 3 or metric[2] not in get_args(Reduce):
            raise ContractError(
                f'{where} returned {_short(metric)} as its metric "{name}"; a metric is (sum, count, reduce), with reduce '
                f"one of {', '.join(get_args(Reduce))}"
            )


def _short(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}" if value is not None else "None"


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
    _check_count(where, f"rows of {name}", rows, len(samples))
    out: Rows = []
    for sample, row, mask in zip(samples, rows, masks, strict=True):
        try:
            array = np.asarray(row, dtype=np.float32)
        except (TypeError, ValueError):
            raise ContractError(
                f"{where} returned {name} for sample {sample_id(sample)} that are no numbers: {_short(row)}"
            ) from None
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


def _check_count(where: str, what: str, rows: Any, expected: int) -> None:
    if not isinstance(rows, Sequence | np.ndarray) or isinstance(rows, str):
        raise ContractError(f"{where} returned {_short(rows)} for the {what}; it is a list with one array per sample")
    if len(rows) != expected:
        raise ContractError(f"{where} returned {len(rows)} {what} for {expected} samples")


def checked_mask(where: str, part: TrainBatch, masks: Sequence[np.ndarray]) -> Rows:
    """The masks that a correction returned; it may mask, never unmask."""
    _check_count(where, "masks", masks, len(part.samples))
    for sample, old, new in zip(part.samples, part.mask, masks, strict=True):
        if not isinstance(new, np.ndarray):
            raise ContractError(f"{where} returned {_short(new)} as the mask of sample {sample_id(sample)}, not an array")
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
