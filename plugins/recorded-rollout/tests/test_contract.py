"""The contract suite of rollouts, as far as it is not about requests."""

from __future__ import annotations

import miles_recorded_rollout
from miles_core.testing.contracts import RolloutContract
from miles_core.types import Prompt

(RECORDED,) = miles_recorded_rollout.miles_rollouts()
USER = {"role": "user", "content": "3,4="}


class Recorded(RolloutContract):
    component = RECORDED
    samples, resumes = False, False
    row: dict = {}
    messages: tuple = (USER,)

    def prompt(self) -> Prompt:
        return Prompt(id="p", draw=2, messages=list(self.messages), label="3", metadata=self.row)


class TestResponses(Recorded):
    row = {"response": ["3", "34", ""]}


class TestLabel(Recorded):
    options = {"answers": "label"}
    num_samples = 1


class TestLastMessage(Recorded):
    options = {"answers": "last-message"}
    num_samples = 1
    messages = (USER, {"role": "assistant", "content": "3"})


class TestPair(Recorded):
    options = {"answers": "pair"}
    num_samples = 2
    row = {"chosen": "3", "rejected": [{"role": "assistant", "content": "4"}]}
