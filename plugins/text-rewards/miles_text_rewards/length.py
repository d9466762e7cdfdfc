"""The reward `length`."""

from __future__ import annotations

import math

from miles_core.answers import before_end
from miles_core.types import Sample, Score
from miles_text_rewards import LengthConfig


class LengthReward:
    """A value of the length L alone, so that it is combined with a reward for being right.

    budget: 0, (limit - ramp - L) / ramp, -1: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).
    target: max(0, 1 - |L - target| / limit): the length term of LCPO (arXiv 2503.04697), with slope 1 / limit and a floor.
    cosine: end + (start - end) (1 + cos(pi L / limit)) / 2, `over` beyond: one branch of arXiv 2502.03373, eq. 1.
    """

    def __init__(self, config: LengthConfig) -> None:
        self.config = config

    def score(self, sample: Sample) -> Score:
        """Raises ValueError where the prompt's metadata lacks the target, or holds no number."""
        length = self.length(sample)
        return Score(value=self.value(length, self.target(sample)), parts={"length": float(length)})

    def length(self, sample: Sample) -> int:
        if self.config.unit == "tokens":
            return int(sample.loss_mask.sum())
        text = before_end(sample.response)
        return len(text.split()) if self.config.unit == "words" else len(text)

    def target(self, sample: Sample) -> float | None:
        key = self.config.target_key
        metadata = sample.prompt.metadata if sample.prompt is not None else {}
        if key is None or (key not in metadata and self.config.target is not None):
            return self.config.target
        wanted = metadata.get(key)
        if isinstance(wanted, bool) or not isinstance(wanted, (int, float)) or not math.isfinite(wanted) or wanted < 0:
            raise ValueError(f'length reads the target from prompt.metadata["{key}"], which is {wanted!r:.60}')
        return float(wanted)

    def value(self, length: int, target: float | None) -> float:
        c = self.config
        if c.shape == "target":
            assert target is not None
            return max(0.0, 1.0 - abs(length - target) / c.limit)
        if c.shape == "cosine":
            if length > c.limit:
                return c.end if c.over is None else c.over
            return c.end + (c.start - c.end) * (1 + math.cos(math.pi * length / c.limit)) / 2
        if length <= c.limit - c.ramp:
            return 0.0
        return (c.limit - c.ramp - length) / c.ramp if length < c.limit else -1.0
