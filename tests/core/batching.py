"""What the tests of batches share."""

import numpy as np

from miles_core.batch import apply_advantages, make_batches, prepare
from miles_core.settings import TrainTable
from miles_core.types import AdvantageOutput


def ones(inputs):
    """An advantage of 1 for every trainable token."""
    return AdvantageOutput(advantages=[m.astype(np.float32) for m in inputs.mask])


def batches_of(groups, *, train=None, advantage=ones, prepared=None, **options):
    batch = prepare(groups, **(prepared or {}))
    apply_advantages(batch, [("ones", advantage)])
    return make_batches(batch, train or TrainTable(), **options)


def total(weights, losses):
    return sum(float((w.astype(np.float64) * loss).sum()) for w, loss in zip(weights, losses, strict=True))
