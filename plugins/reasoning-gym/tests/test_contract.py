"""The contract suites of data sources and rewards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import miles_reasoning_gym
from miles_core.testing.contracts import DataContract, RewardContract
from miles_core.types import Sample

pytest.importorskip("reasoning_gym")
(DATA,) = miles_reasoning_gym.miles_data_sources()
(REWARD,) = miles_reasoning_gym.miles_rewards()
SUMS = {"dataset": "chain_sum", "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


class TestEndless(DataContract):
    component = DATA
    options = SUMS


class TestOfASize(DataContract):
    component = DATA
    options = {**SUMS, "size": 8, "shots": (("1 + 1 =", "2"),), "system": ""}


class TestReward(RewardContract):
    component = REWARD
    options = {"extract": "last-integer", "exact": True}

    @pytest.fixture(autouse=True)
    def _prompt(self, tmp_path: Path) -> None:
        source = DATA.build(DATA.config(**SUMS), self.make_context(tmp_path))
        (self.prompt,) = source.next(1)
        self.right, self.wrong = f"It is {self.prompt.label}", "It is 1234"

    def sample(self, response: str, index: int = 0) -> Sample:
        return replace(super().sample(response, index), prompt=self.prompt)
