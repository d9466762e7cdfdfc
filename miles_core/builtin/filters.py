"""Filters of the core: groups that cannot teach anything, or that were not judged completely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from miles_core.component import Component, ComponentConfig
from miles_core.types import SampleGroup, Verdict
from miles_core.votes import all_equal, last_segments, trajectory_rewards, votes


class NonzeroStdConfig(ComponentConfig):
    """Options of `nonzero-std`."""

    min_verdicts: int = Field(default=2, ge=2)
    """Fewest trajectories with a verdict; a group with fewer is dropped."""


@dataclass(slots=True, frozen=True)
class NonzeroStd:
    """Drops groups whose verdicts are all equal: "zero-std". Before that, "no-verdict" and "too-few-verdicts"."""

    min_verdicts: int

    def check(self, group: SampleGroup) -> Verdict:
        values = list(_votes(group).values())
        if not values:
            return Verdict(keep=False, reason="no-verdict")
        if len(values) < self.min_verdicts:
            return Verdict(keep=False, reason="too-few-verdicts")
        return Verdict(keep=False, reason="zero-std") if all_equal(values) else Verdict(keep=True)


class AllVerdicts:
    """Drops groups in which a trajectory failed or has no verdict: "missing-verdict"."""

    def check(self, group: SampleGroup) -> Verdict:
        complete = len(_votes(group)) == len(last_segments(group.samples)) == group.num_samples
        return Verdict(keep=True) if complete else Verdict(keep=False, reason="missing-verdict")


def _votes(group: SampleGroup) -> dict[str, float]:
    return votes(group.samples, trajectory_rewards(group.samples))


COMPONENTS: dict[str, list[Component[Any]]] = {
    "miles_filters": [
        Component(
            name="nonzero-std",
            summary="Keeps groups whose rewards differ",
            config=NonzeroStdConfig,
            build=lambda config, context: NonzeroStd(config.min_verdicts),
        ),
        Component(
            name="all-verdicts",
            summary="Keeps groups in which every trajectory has a verdict",
            build=lambda config, context: AllVerdicts(),
        ),
    ]
}
