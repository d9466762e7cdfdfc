"""The contract suite of rewards."""

from __future__ import annotations

import sys

import pytest

import miles_code_reward
from miles_core.testing.contracts import RewardContract

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="boxes are made of Linux namespaces and limits")
(CODE,) = miles_code_reward.miles_rewards()
JUNK = (
    "```python\n```",
    "```python\n" + "(" * 5000 + "\n```",
    "```python\n\x00\n```",
    "```python\nx = '\ud800'\n```",
    "```" * 1000,
)


class TestCode(RewardContract):
    component = CODE
    label = {"stdin": [{"input": "2 2", "output": "4"}]}
    right = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    wrong = "```python\nprint(5)\n```"
    junk = (*RewardContract.junk, *JUNK)


class TestCodeByAsking(RewardContract):
    component = CODE
    options = {"partial": True, "require_fence": False}
    label = ["assert add(2, 2) == 4", "assert add(1, 2) == 3"]
    right = "```python\ndef add(a, b):\n    return a + b\n```"
    wrong = "```python\ndef add(a, b):\n    return 5\n```"
    junk = (*RewardContract.junk, *JUNK)
