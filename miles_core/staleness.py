"""How old tokens are, in pushes, when they are trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_core.batch import token_lags
from miles_core.types import Sample, SampleGroup


def mask_stale(sample: Sample, version: int, max_lag: int) -> np.ndarray:
    """bool[T]: `loss_mask` without the tokens that are more than `max_lag` versions older than `version`."""
    return sample.loss_mask & (token_lags(sample, version) <= max_lag)


def staleness(groups: Sequence[SampleGroup], version: int, max_lag: int) -> dict[str, float]:
    """Age in pushes of the tokens that may be trained at `version`: mean, max, share per lag, and the masked ones."""
    samples = [s for g in groups for s in g.samples]
    lags = np.concatenate([token_lags(s, version)[s.loss_mask] for s in samples] or [np.zeros(0, np.int32)])
    fresh = lags[lags <= max_lag]
    rows = {"staleness/masked_tokens": float(len(lags) - len(fresh))}
    if len(fresh):
        rows |= {"staleness/mean": float(fresh.mean()), "staleness/max": float(fresh.max())}
        rows |= {f"staleness/share_{lag}": float((fresh == lag).mean()) for lag in range(max_lag + 1)}
    return rows
