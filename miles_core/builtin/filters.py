"""Filters of the core: groups that cannot teach anything, were not judged completely, or are too short, cut or old.

Filters see a group once, when it has been judged, and cannot know when it will be trained: that it is not too old then is
the buffer's business (`rollout.max_lag`). A trajectory is one answer, however many segments it fanned out into.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from miles_core.component import Component, ComponentConfig, Environment
from miles_core.errors import ConfigError
from miles_core.types import Sample, SampleGroup, Verdict
from miles_core.votes import CUT, FAILED, all_equal, last_segments, trajectory_rewards, votes

KEEP = Verdict(keep=True)


class NonzeroStdConfig(ComponentConfig):
    """Options of `nonzero-std`."""

    min_verdicts: int = Field(default=2, ge=2)
    """Fewest trajectories with a verdict; a group with fewer is dropped."""
    score: str = ""
    """Name of the score that is compared, for example of the accuracy beside a length penalty (DAPO); by default the
    combined reward."""


class LengthConfig(ComponentConfig):
    """Options of `length`."""

    min_tokens: int = Field(default=1, ge=0)
    """Fewest sampled tokens of an answer."""
    max_tokens: int = Field(default=0, ge=0)
    """Most sampled tokens of an answer; 0 sets no limit."""
    max_share: float = Field(default=0.0, ge=0, lt=1)
    """Largest share of a group's answers that may be outside; 0 drops it for a single one."""

    @model_validator(mode="after")
    def _in_order(self) -> LengthConfig:
        if 0 < self.max_tokens < self.min_tokens:
            raise ValueError(f"max_tokens = {self.max_tokens} is less than min_tokens = {self.min_tokens}")
        return self


class TruncationConfig(ComponentConfig):
    """Options of `truncation`."""

    max_share: float = Field(default=0.5, ge=0, lt=1)
    """Largest share of a group's answers that may have been cut by max_new_tokens or the context."""


class StalenessConfig(ComponentConfig):
    """Options of `staleness`."""

    max_age: int = Field(default=1, ge=0)
    """Most weight versions that a group's oldest token may be older than its newest one."""


@dataclass(slots=True, frozen=True)
class NonzeroStd:
    """Drops groups whose verdicts are all equal: "zero-std". Before that, "no-verdict" and "too-few-verdicts". Dynamic
    sampling of DAPO, arXiv:2503.14476 section 3.2."""

    min_verdicts: int
    score: str = ""

    def check(self, group: SampleGroup) -> Verdict:
        values = list(_scores(group, self.score) if self.score else _votes(group).values())
        if not values:
            return Verdict(keep=False, reason="no-verdict")
        if len(values) < self.min_verdicts:
            return Verdict(keep=False, reason="too-few-verdicts")
        return Verdict(keep=False, reason="zero-std") if all_equal(values) else KEEP


class AllVerdicts:
    """Drops groups in which a trajectory failed or has no verdict: "missing-verdict"."""

    def check(self, group: SampleGroup) -> Verdict:
        complete = len(_votes(group)) == len(last_segments(group.samples)) == group.num_samples
        return KEEP if complete else Verdict(keep=False, reason="missing-verdict")


@dataclass(slots=True, frozen=True)
class Length:
    """Drops groups with too many answers outside the bounds: "too-short" or "too-long", whichever more of them are. What
    counts are sampled tokens over all segments, without those of tools; failed answers do not count."""

    config: LengthConfig

    def check(self, group: SampleGroup) -> Verdict:
        lengths = np.array(list(_sampled_tokens(group).values()))
        if not len(lengths):
            return KEEP
        low = np.count_nonzero(lengths < self.config.min_tokens)
        high = np.count_nonzero(lengths > self.config.max_tokens) if self.config.max_tokens else 0
        if low + high <= self.config.max_share * len(lengths):
            return KEEP
        return Verdict(keep=False, reason="too-long" if high >= low else "too-short")


@dataclass(slots=True, frozen=True)
class Truncation:
    """Drops groups of which a larger share was cut than max_share: "truncated". Failed answers do not count."""

    max_share: float

    def check(self, group: SampleGroup) -> Verdict:
        ends = [s.status in CUT for s in _ended(group)]
        return Verdict(keep=False, reason="truncated") if sum(ends) > self.max_share * len(ends) else KEEP


@dataclass(slots=True, frozen=True)
class Staleness:
    """Drops groups whose oldest token is more than max_age versions older than their newest: "stale". The newest was
    sampled just before the filter looks, so that this is the age in pushes at that moment; it needs a run in which
    requests go on over a push (`rollout.partial`), or siblings that wait for one."""

    max_age: int

    def check(self, group: SampleGroup) -> Verdict:
        versions = [span.version for s in group.samples if s.status not in FAILED for span in s.versions]
        return Verdict(keep=False, reason="stale") if versions and max(versions) - min(versions) > self.max_age else KEEP


def _votes(group: SampleGroup) -> dict[str, float]:
    return votes(group.samples, trajectory_rewards(group.samples))


def _ended(group: SampleGroup) -> Iterable[Sample]:
    """The last segment of every trajectory that did not fail."""
    return [s for s in last_segments(group.samples).values() if s.status not in FAILED]


def _scores(group: SampleGroup, name: str) -> list[float]:
    scores = (s.scores.get(name) for s in _ended(group))
    return [score.value for score in scores if score is not None and score.value is not None]


def _sampled_tokens(group: SampleGroup) -> Mapping[str, int]:
    counts = {s.trajectory_id: 0 for s in _ended(group)}
    for sample in group.samples:
        if sample.trajectory_id in counts:
            counts[sample.trajectory_id] += int(np.count_nonzero(sample.loss_mask))
    return counts


def _check_score(config: NonzeroStdConfig, env: Environment) -> None:
    names = [table.name or table.use.rpartition(":")[2] for table in env.run_config.reward]
    if config.score and config.score not in names:
        raise ConfigError(
            f'{env.where}: filter "nonzero-std" looks at the score "{config.score}", and no reward has that name',
            f"scores of this run: {', '.join(names) or 'none'}; without `score` it looks at the combined reward",
        )


COMPONENTS: dict[str, list[Component[Any]]] = {
    "miles_filters": [
        Component(
            name="nonzero-std",
            summary="Keeps groups whose rewards differ",
            config=NonzeroStdConfig,
            build=lambda config, context: NonzeroStd(config.min_verdicts, config.score),
            check=_check_score,
        ),
        Component(
            name="all-verdicts",
            summary="Keeps groups in which every trajectory has a verdict",
            build=lambda config, context: AllVerdicts(),
        ),
        Component(
            name="length",
            summary="Keeps groups whose answers are neither too short nor too long",
            config=LengthConfig,
            build=lambda config, context: Length(config),
        ),
        Component(
            name="truncation",
            summary="Keeps groups of which not too many answers were cut",
            config=TruncationConfig,
            build=lambda config, context: Truncation(config.max_share),
        ),
        Component(
            name="staleness",
            summary="Keeps groups that were sampled under few versions of the weights",
            config=StalenessConfig,
            build=lambda config, context: Staleness(config.max_age),
        ),
    ]
}
