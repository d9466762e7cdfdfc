"""Side channels: what a plugin may add to a sample, declared once and carried by the core everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from miles_core.errors import ContractError


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """Shape and fate of one side channel.

    `align`: "token" has T rows; "transition" has T - 1 rows (row t belongs to input token t, which predicts t + 1);
    "sample" has no token axis; "ragged" is opaque. `axes` names the axes after the first, for slicing by stage ("layer").
    `missing`: "error", "mask" (the sample is not trained), or "fill:<number>". `merge` says how turns are joined.
    """

    name: str
    dtype: str
    axes: tuple[str, ...] = ()
    align: Literal["token", "transition", "sample", "ragged"] = "token"
    missing: str = "error"
    merge: Literal["concat", "last"] = "concat"
    consumer: Literal["driver", "trainer"] = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRef:
    """A handle for data that only the trainer reads; resolved inside ranks, so the driver packs no bytes of it."""

    store: str
    key: str
    nbytes: int = 0


def num_rows(spec: FieldSpec, num_tokens: int) -> int | None:
    """Rows that `spec` must have for a sample of `num_tokens`; None when it has no token axis."""
    return {"token": num_tokens, "transition": max(num_tokens - 1, 0)}.get(spec.align)


def check_field(spec: FieldSpec, value: Any, num_tokens: int, owner: str) -> np.ndarray | Any:
    """`value` as an array of the declared dtype.

    Raises ContractError naming `owner` (a sample id) and both lengths when the row count is wrong: a side channel is
    never shifted or trimmed silently.
    """
    if isinstance(value, FieldRef) or spec.align == "ragged":
        return value
    array = np.asarray(value, dtype=spec.dtype)
    if spec.align == "sample":
        return array
    want = num_rows(spec, num_tokens)
    if array.ndim != 1 + len(spec.axes) or array.shape[0] != want:
        raise ContractError(
            f'field "{spec.name}" of {owner} has shape {array.shape}, but {num_tokens} tokens need {want} rows '
            f"({spec.align}-aligned) and axes {('row', *spec.axes)}"
        )
    return array


def fill_field(spec: FieldSpec, num_tokens: int, tail_shape: tuple[int, ...]) -> np.ndarray | None:
    """What stands in for a missing field, or None when the sample is to be masked instead.

    Raises ContractError when the spec says `missing="error"`.
    """
    if spec.missing == "error":
        raise ContractError(f'field "{spec.name}" is missing, and its declaration says missing="error"')
    if spec.missing == "mask":
        return None
    rows = num_rows(spec, num_tokens)
    shape = tail_shape if rows is None else (rows, *tail_shape)
    return np.full(shape, float(spec.missing.removeprefix("fill:")), dtype=spec.dtype)


def trim_field(spec: FieldSpec, value: np.ndarray, num_tokens: int) -> np.ndarray:
    """The leading part of `value` that belongs to the first `num_tokens` tokens."""
    rows = num_rows(spec, num_tokens)
    return value if rows is None else value[:rows]


def slice_axis(spec: FieldSpec, value: np.ndarray, axis: str, start: int, stop: int) -> np.ndarray:
    """Part [start, stop) of a named axis, for example the layers of one pipeline stage."""
    index = 1 + spec.axes.index(axis) if spec.align in ("token", "transition") else spec.axes.index(axis)
    return value[(slice(None),) * index + (slice(start, stop),)]


def pack_field(spec: FieldSpec, values: list[np.ndarray], num_tokens: list[int]) -> np.ndarray:
    """Rows of all samples of a microbatch in one array, [N, *axes] with one row per token.

    Row t of a transition-aligned field was produced while token t was the input, and the last token of a sample is
    never an input: such a field gets a zero row after each sample, so that row n belongs to input token n.
    """
    if spec.align == "sample":
        return np.stack(values)
    rows: list[np.ndarray] = []
    for value, count in zip(values, num_tokens, strict=True):
        rows.append(value)
        if spec.align == "transition" and count:
            rows.append(np.zeros((1, *value.shape[1:]), dtype=value.dtype))
    return np.concatenate(rows) if rows else np.zeros(0, dtype=spec.dtype)
