"""Why groups were dropped: counts by the filter's reason and by what the rewards of the group looked like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from miles_core.errors import ContractError, MilesError, RunFailed
from miles_core.interfaces import Filter
from miles_core.types import SampleGroup, Verdict


def verdict_of(filters: Iterable[tuple[str, Filter]], group: SampleGroup) -> Verdict:
    """The first refusal, under its own reason or the filter's name, or else a Verdict that keeps the group.

    Raises RunFailed with what a filter raised, ContractError when it returned no Verdict; both name filter and group."""
    for name, judge in filters:
        try:
            verdict = judge.check(group)
        except MilesError:
            raise
        except Exception as error:
            raise RunFailed(f'filter "{name}" raised {type(error).__name__} on group {group.id}: {error}') from error
        if not isinstance(verdict, Verdict) or not isinstance(verdict.reason, str):
            raise ContractError(
                f'filter "{name}" returned {verdict!r:.80} for group {group.id}, not a Verdict whose reason is a text'
            )
        if not verdict.keep:
            return Verdict(keep=False, reason=verdict.reason or name)
    return Verdict(keep=True)


class Drops:
    """`step` counts since the last batch, which bounds how many prompts a step may try; `run` over the whole run."""

    def __init__(self) -> None:
        self.step: Counter[tuple[str, str]] = Counter()
        self.run: Counter[tuple[str, str]] = Counter()

    def add(self, reason: str, group: SampleGroup) -> None:
        self.step[reason, outcome(group)] += 1
        self.run[reason, outcome(group)] += 1

    def rows(self) -> list[tuple[str, str, int]]:
        """(reason, rewards of the group, number) over the run, the most frequent first."""
        return [(*key, count) for key, count in self.run.most_common()]

    def step_lines(self) -> list[str]:
        """A table of the step, for an error message."""
        return [f"  {n:6d}  {reason}: {what}" for (reason, what), n in self.step.most_common()]

    def step_summary(self) -> str:
        """The same in one line."""
        return ", ".join(f"{n} {reason} ({what})" for (reason, what), n in self.step.most_common()) or "none"

    def state(self) -> dict[str, Any]:
        return {name: [[*key, n] for key, n in getattr(self, name).items()] for name in ("step", "run")}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in ("step", "run"):
            setattr(self, name, Counter({(reason, what): n for reason, what, n in state[name]}))


def outcome(group: SampleGroup) -> str:
    """What the rewards of a dropped group looked like: "all 0", "all 1", "all equal", "mixed", "error" or "no verdict"."""
    rewards = {s.reward for s in group.samples if s.reward is not None}
    if not rewards:
        return "error" if any(s.status in ("error", "timeout", "aborted") for s in group.samples) else "no verdict"
    if len(rewards) > 1:
        return "mixed"
    return {0.0: "all 0", 1.0: "all 1"}.get(rewards.pop(), "all equal")
