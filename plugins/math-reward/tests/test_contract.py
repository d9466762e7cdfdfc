"""The contract suite of rewards."""

from __future__ import annotations

import pytest

import miles_math_reward
from miles_core.testing.contracts import RewardContract

pytest.importorskip("math_verify")
(MATH,) = miles_math_reward.miles_rewards()


class TestMath(RewardContract):
    component = MATH
    right = "The sum is \\boxed{4}."
    wrong = "The sum is \\boxed{5}."
    junk = (
        *RewardContract.junk,
        "\\boxed{",
        "\\boxed{" + "(" * 300 + "}",
        "####",
        "\\boxed{}" * 500,
    )


class TestMathWithoutBoxes(RewardContract):
    component = MATH
    options = {"require_box": False}
    label = "1/2"
    right = "So the answer is 0.5"
    wrong = "So the answer is 0.4"
