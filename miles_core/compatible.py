"""Pairs of choices that are each valid and cannot be together, told from what components declare of themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from miles_core.component import Component

if TYPE_CHECKING:
    from miles_core.config import ResolvedRun


def trait(component: Component[Any], name: str, options: Any, default: Any = None) -> Any:
    """The value of a trait, which may be a function of the component's options."""
    value = component.traits.get(name, default)
    return value(options) if callable(value) else value


def clashes(run: ResolvedRun) -> Iterator[str]:
    """One sentence per pair of choices that cannot be together; each names the components and the settings."""
    yield from _truncated_sampling(run)
    yield from _unsampled_answers(run)
    if run.config.loss and not any(table.weight for table in run.config.loss):
        yield f"{run.tables.where(('loss',))}: every [[loss]] has weight 0, and nothing would be trained"


def doubts(run: ResolvedRun) -> Iterator[str]:
    """One sentence per choice that is allowed, and with which a run learns nothing or something else than is meant."""
    config = run.config
    if config.reward and not any(table.weight for table in config.reward):
        yield "every [[reward]] has weight 0: scores are logged, and the reward of every answer is 0"
    for chosen in run.all("loss"):
        if chosen.table.weight < 0:
            yield f"{chosen.where}: {chosen.label} has weight {chosen.table.weight:g}: what it minimises is maximised"
    if config.rollout.samples_per_group == 1 and _only_advantages_teach(run):
        for chosen in run.all("advantage"):
            if trait(chosen.component, "baseline", chosen.options) == "group":
                yield (
                    f"rollout.samples_per_group = 1: {chosen.label} compares the answers to one prompt, and one alone "
                    "gets the advantage 0: nothing is learnt; set it to 2 or more"
                )


def _only_advantages_teach(run: ResolvedRun) -> bool:
    return all(s.component.traits.get("zero_advantage") == "no-gradient" for s in run.all("loss"))


def _truncated_sampling(run: ResolvedRun) -> Iterator[str]:
    """Losses and corrections with the trait `ratio = "sequence"`, and a sampling distribution that is cut.

    Log-probabilities on both sides are those of the whole distribution. What is sampled from a nucleus that holds the
    mass m has a true log-probability that is higher by -log(m): one factor m per token, 0.8**100 = 2e-10 for a hundred.
    """
    sampling = run.config.rollout.sampling
    cut = [f"top_p = {sampling.top_p:g}"] * (sampling.top_p < 1) + [f"top_k = {sampling.top_k}"] * (sampling.top_k > 0)
    for kind in ("loss", "correction") if cut else ():
        for chosen in run.all(kind):
            if trait(chosen.component, "ratio", chosen.options) == "sequence":
                yield (
                    f"{chosen.where}: {chosen.label} weighs whole sequences by their probability, and "
                    f"rollout.sampling cuts the distribution that they are sampled from "
                    f"({', '.join(cut)}): the mass that was cut is missing once per token, which no ratio of a sequence "
                    f"survives; set top_p = 1 and top_k = 0, or choose a {kind} with one ratio per token"
                )


def _unsampled_answers(run: ResolvedRun) -> Iterator[str]:
    """Rollouts with the trait `logprobs = "none"` have no log-probabilities of an engine to compare with."""
    for rollout in run.all("rollout"):
        if trait(rollout.component, "logprobs", rollout.options) != "none":
            continue
        if run.config.train.old_logprobs == "rollout":
            yield (
                f'{run.tables.where(("train", "old_logprobs"))}: "rollout" takes the log-probabilities of the engine, and '
                f'the answers of {rollout.label} were not sampled by one; set it to "recompute"'
            )
        for chosen in run.all("correction"):
            if "old_logprobs" in chosen.component.needed(chosen.options):
                yield (
                    f"{chosen.where}: {chosen.label} compares with the log-probabilities of the engine, and the answers of "
                    f"{rollout.label} were not sampled by one; remove it"
                )
