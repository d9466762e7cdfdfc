"""The contract suite of samplers."""

from __future__ import annotations

import miles_curriculum
from miles_core.testing.contracts import SamplerContract

COMPONENTS = {c.name: c for c in miles_curriculum.miles_samplers()}


class TestDifficulty(SamplerContract):
    component = COMPONENTS["difficulty"]


class TestDifficultyOfHardOnes(SamplerContract):
    component = COMPONENTS["difficulty"]
    options = {"target": 0.1, "width": 0.1, "keep_far": 0.01, "max_repeats": 0.5, "rest_steps": 1}


class TestDropSolved(SamplerContract):
    component = COMPONENTS["drop-solved"]


class TestDropAllSolved(SamplerContract):
    component = COMPONENTS["drop-solved"]
    options = {"keep": 0.0}
