"""The contract suite of advantages, on every component and interesting set of options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import miles_policy_advantages
from miles_core.testing.contracts import AdvantageContract
from miles_core.types import Sample, Score

COMPONENTS = {c.name: c for c in miles_policy_advantages.miles_advantages()}


class BatchScaled(AdvantageContract):
    """Groups share nothing but one factor, which takes the place of the rule that they share nothing."""

    def test_groups_do_not_mix(self, tmp_path: Path) -> None:
        alone = self.advantages(tmp_path, self.samples([0, 1, 0.25]))
        mixed = self.advantages(tmp_path, self.samples([0, 1, 0.25]), self.samples([5, 9, 7], "h@0"))[:3]
        factors = [a[-1] / b[-1] for a, b in zip(mixed, alone, strict=True)]
        assert factors[0] > 0
        np.testing.assert_allclose(factors, factors[0], rtol=1e-5)


class TestDrGrpo(AdvantageContract):
    component = COMPONENTS["dr-grpo"]


class TestReinforcePpBaseline(BatchScaled):
    component = COMPONENTS["reinforce-pp-baseline"]


class TestReinforcePp(AdvantageContract):
    component = COMPONENTS["reinforce-pp"]
    relative = False


class TestReinforcePpWithPenalty(AdvantageContract):
    component = COMPONENTS["reinforce-pp"]
    options = {"kl_coef": 0.1}
    relative = False


class TestReinforcePpOverTrajectories(AdvantageContract):
    component = COMPONENTS["reinforce-pp"]
    options = {"kl_coef": 0.1, "over": "trajectories"}
    relative = False


class TestRemax(AdvantageContract):
    component = COMPONENTS["remax"]
    relative = False


class TestOpo(AdvantageContract):
    component = COMPONENTS["opo"]

    def test_one_trajectory_is_one_vote(self, tmp_path: Path) -> None:
        """Length counts here, so the fan must not make the trajectory longer: the tokens of one are spread over three."""
        plain = self.samples([0, 1, 1])
        fan = [replace(plain[2], segment=n, loss_mask=np.zeros_like(plain[2].loss_mask)) for n in range(3)]
        for n, token in enumerate(np.flatnonzero(plain[2].loss_mask)):
            fan[n % 3].loss_mask[token] = True
        whole = self.advantages(tmp_path, plain)
        parts = self.advantages(tmp_path, [*plain[:2], *fan])
        for a, b in zip(parts[:2], whole[:2], strict=True):
            np.testing.assert_allclose(a, b)
        np.testing.assert_allclose(sum(parts[2:]), whole[2])


class TestGdpo(BatchScaled):
    component = COMPONENTS["gdpo"]
    options = {"weights": {"right": 1.0, "short": 0.5}}

    def samples(self, rewards: Sequence[float | None], group: str = "g@0") -> list[Sample]:
        """Both scores rise with the reward, not in proportion."""
        made = super().samples(rewards, group)
        for sample, reward in zip(made, rewards, strict=True):
            known = reward is not None
            sample.scores = {
                "right": Score(value=reward),
                "short": Score(value=float(np.cbrt(reward)) if known else None),
            }
        return made


class TestDistillationAlone(AdvantageContract):
    component = COMPONENTS["on-policy-distillation"]
    relative = False


class TestDistillationInAChain(AdvantageContract):
    component = COMPONENTS["on-policy-distillation"]
    options = {"coef": 0.5, "gamma": 0.9, "clip": 1.0}
    relative = False
    follows = True


class TestWhiten(AdvantageContract):
    component = COMPONENTS["whiten"]
    relative = False
    follows = True


class TestScaleOnly(AdvantageContract):
    component = COMPONENTS["whiten"]
    options = {"shift": False}
    relative = False
    follows = True
