"""How far the trainer is from the engine, per token and per sequence, for a whole minibatch at once.

Shape letters: B samples, N trainable tokens of all of them in order, S sequences. A sequence is a trajectory: its
segments count together, as they do in the token weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from miles_core import CorrectionInputs
from miles_core.errors import ContractError
from miles_core.votes import sample_id

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True)
class Ratios:
    """Log-ratios of a minibatch. `log_ratio` float64[N] is log(trainer / engine) of each trainable token."""

    lengths: np.ndarray
    """int64[B]: tokens of each sample, trainable or not."""
    mask: np.ndarray
    """bool: the masks of all samples, joined."""
    tokens: np.ndarray
    """int64[B]: trainable tokens of each sample."""
    sequence: np.ndarray
    """int64[B]: the sequence that a sample belongs to, 0..S-1."""
    log_ratio: np.ndarray

    @property
    def num_sequences(self) -> int:
        return int(self.sequence.max()) + 1 if len(self.sequence) else 0

    def counts(self) -> np.ndarray:
        """float64[S]: trainable tokens of each sequence; 0 for one that has none."""
        return np.bincount(self.sequence, weights=self.tokens, minlength=self.num_sequences)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """float64[S]: sum of [N] values over each sequence."""
        per_sample = self._per_sample(np.add, values, 0.0)
        return np.bincount(self.sequence, weights=per_sample, minlength=self.num_sequences)

    def minima(self, values: np.ndarray) -> np.ndarray:
        """float64[S]: smallest of [N] values in each sequence; infinity for one that has none."""
        found = np.full(self.num_sequences, np.inf)
        np.minimum.at(found, self.sequence, self._per_sample(np.minimum, values, np.inf))
        return found

    def at(self, level: Level) -> np.ndarray:
        """The log-ratio that a level judges by: float64[N] of tokens, or float64[S] of sequences, their sum ("sequence": of
        the product of the ratios) or mean ("geometric": of their geometric mean)."""
        if level == "token":
            return self.log_ratio
        sums = self.sums(self.log_ratio)
        return sums if level == "sequence" else sums / np.maximum(self.counts(), 1.0)

    def spread(self, values: np.ndarray, level: Level) -> np.ndarray:
        """[N]: what `at(level)` led to, on every token that it concerns."""
        return values if level == "token" else np.repeat(values[self.sequence], self.tokens)

    def living(self, level: Level) -> np.ndarray | slice:
        """Which units of a level have a trainable token at all: the others are not counted in any metric."""
        return slice(None) if level == "token" else self.counts() > 0

    def rows(self, values: np.ndarray) -> list[np.ndarray]:
        """One array per sample from [N] values, 0 (False) outside the mask."""
        flat = np.zeros(len(self.mask), dtype=values.dtype)
        flat[self.mask] = values
        ends = [0, *np.cumsum(self.lengths).tolist()]
        return [flat[a:b] for a, b in pairwise(ends)]

    def _per_sample(self, ufunc: np.ufunc, values: np.ndarray, empty: float) -> np.ndarray:
        """float64[B]. `reduceat` answers an empty stretch with its neighbour: only samples that have tokens ask."""
        found = np.full(len(self.tokens), empty)
        some = self.tokens > 0
        if some.any():
            starts = np.cumsum(self.tokens) - self.tokens
            found[some] = ufunc.reduceat(values, starts[some])
        return found


def ratios_of(inputs: CorrectionInputs, name: str) -> Ratios:
    """The log-ratios of a minibatch. Masked tokens are not read, whatever stands there.

    Raises ContractError naming the correction, the column, the sample and the token when a trainable token has a
    log-probability that is not finite: a ratio of it means nothing, and hiding it would hide a broken model.
    """
    mask = _joined(inputs.mask, bool)
    lengths = np.array([len(m) for m in inputs.mask], dtype=np.int64)
    chosen = {column: _joined(inputs.columns[column], np.float32)[mask] for column in ("old_logprobs", "rollout_logprobs")}
    tokens = np.array([np.count_nonzero(m) for m in inputs.mask], dtype=np.int64)
    log_ratio = chosen["old_logprobs"].astype(np.float64) - chosen["rollout_logprobs"]
    if not np.isfinite(log_ratio).all():
        _refuse(inputs, name, chosen, tokens)
    index: dict[str, int] = {}
    sequence = np.array([index.setdefault(s.trajectory_id, len(index)) for s in inputs.samples], dtype=np.int64)
    return Ratios(lengths, mask, tokens, sequence, log_ratio)


def _joined(rows: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(rows) if len(rows) else np.zeros(0, dtype=dtype)


def _refuse(inputs: CorrectionInputs, name: str, chosen: Mapping[str, np.ndarray], tokens: np.ndarray) -> None:
    for column, values in chosen.items():
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            owner = int(np.searchsorted(np.cumsum(tokens), bad[0], side="right"))
            place = int(bad[0] - (np.cumsum(tokens) - tokens)[owner])
            token = int(np.flatnonzero(inputs.mask[owner])[place])
            raise ContractError(
                f"correction/{name}: {column} of sample {sample_id(inputs.samples[owner])} is {values[bad[0]]} at token "
                f"{token}; {len(bad)} of {len(values)} trainable tokens are not finite",
                "old_logprobs come from the trainer, rollout_logprobs from the engine: look there for the cause",
            )
