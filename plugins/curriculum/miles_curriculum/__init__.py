"""Samplers: which prompts come next, judged by the mean reward that each had when it was last trained.

Both decide by a hash of (seed, prompt, draw) instead of random numbers, so that a decision does not depend on those before
it and a resumed run decides the same. A prompt without history is always taken: nothing that was never seen is starved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from miles_core import BuildContext, Component, ComponentConfig, Prompt, hookimpl
from miles_core.group_state import prompt_from_state, prompt_to_state
from miles_core.seeds import derive_seed


class DifficultyConfig(ComponentConfig):
    """Options of `difficulty`."""

    target: float = 0.5
    """The mean reward of a prompt that teaches most. For rewards of 0 and 1 the spread of a group, and with it the size of
    its advantages, is largest at one half."""
    width: float = Field(default=0.25, ge=0)
    """Prompts whose mean reward is at most this far from the target count as near."""
    keep_far: float = Field(default=0.25, gt=0, le=1)
    """Share of the other prompts that have been seen which is still taken when the data offers them; above 0, so that none
    is given up."""
    max_repeats: float = Field(default=0.25, ge=0, lt=1)
    """Largest share of picks that are repeats of near prompts, out of the order of the data; 0 switches them off."""
    rest_steps: int = Field(default=2, gt=0)
    """Steps' worth of picks (rollout.groups_per_step each) between a prompt's last pick and its repeat, at least."""
    pool: int = Field(default=1000, gt=0)
    """Prompts that are remembered for repeats, those picked last."""


class DropSolvedConfig(ComponentConfig):
    """Options of `drop-solved`."""

    solved: float = 1.0
    """A prompt whose mean reward was at least this is solved."""
    keep: float = Field(default=0.1, ge=0, le=1)
    """Share of solved prompts that is taken all the same when the data offers them, so that forgetting shows."""


class Difficulty:
    """Takes near and unseen prompts, a share of the others, and repeats near ones between them."""

    def __init__(self, config: DifficultyConfig, seed: int, groups_per_step: int) -> None:
        self.config, self.seed = config, seed
        self.rest = config.rest_steps * groups_per_step
        self.per_fresh = config.max_repeats / (1 - config.max_repeats)
        """Repeats that one fresh prompt allows: f of them with r = f * per_fresh make a share of r / (r + f)."""
        self._picked = 0
        self._credit = 0.0
        self._pool: dict[str, tuple[int, Prompt]] = {}
        """By prompt id, longest ago first: (place of its last pick, prompt)."""

    def pick(self, prompts: list[Prompt], history: Mapping[str, Any]) -> list[Prompt]:
        taken: list[Prompt] = []
        for prompt in prompts:
            if not self._wanted(prompt, history):
                continue
            taken.append(self._take(prompt))
            # No hoarding: after a stretch without candidates there is no run of repeats.
            self._credit = min(self._credit + self.per_fresh, max(1.0, self.per_fresh))
            while self._credit >= 1 and (again := self._rested(history)):
                taken.append(self._take(again))
                self._credit -= 1
        return taken

    def _wanted(self, prompt: Prompt, history: Mapping[str, Any]) -> bool:
        return (
            prompt.id not in history or self._near(history[prompt.id]) or chance(self.seed, prompt) < self.config.keep_far
        )

    def _near(self, mean: float) -> bool:
        return abs(mean - self.config.target) <= self.config.width + 1e-9  # .1 + .2 is above .3

    def _take(self, prompt: Prompt) -> Prompt:
        self._pool.pop(prompt.id, None)
        self._pool[prompt.id] = (self._picked, prompt)
        self._picked += 1
        if len(self._pool) > self.config.pool:
            del self._pool[next(iter(self._pool))]
        return prompt

    def _rested(self, history: Mapping[str, Any]) -> Prompt | None:
        """The near prompt that was picked longest ago. Those that turned out to be far are forgotten."""
        for prompt_id, (place, prompt) in list(self._pool.items()):
            if self._picked - place <= self.rest:
                return None
            if prompt_id not in history:
                continue
            if self._near(history[prompt_id]):
                return prompt
            del self._pool[prompt_id]
        return None

    def state(self) -> dict[str, Any]:
        pool = [[place, prompt_to_state(prompt)] for place, prompt in self._pool.values()]
        return {"picked": self._picked, "credit": self._credit, "pool": pool}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._picked, self._credit = state["picked"], state["credit"]
        prompts = [(place, prompt_from_state(prompt)) for place, prompt in state["pool"]]
        self._pool = {prompt.id: (place, prompt) for place, prompt in prompts}


class DropSolved:
    """Leaves out solved prompts, but for a share."""

    def __init__(self, config: DropSolvedConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    def pick(self, prompts: list[Prompt], history: Mapping[str, Any]) -> list[Prompt]:
        def unsolved(prompt: Prompt) -> bool:
            mean = history.get(prompt.id)
            return mean is None or mean < self.config.solved

        return [p for p in prompts if unsolved(p) or chance(self.seed, p) < self.config.keep]


def chance(seed: int, prompt: Prompt) -> float:
    """A number in [0, 1), the same for the same run seed, prompt and draw."""
    return derive_seed(seed, prompt.id, prompt.draw, 0) / 2**63


def _build_difficulty(config: DifficultyConfig, context: BuildContext) -> Difficulty:
    return Difficulty(config, context.seed, context.run_config.rollout.groups_per_step)


def _build_drop_solved(config: DropSolvedConfig, context: BuildContext) -> DropSolved:
    return DropSolved(config, context.seed)


@hookimpl
def miles_samplers() -> Iterable[Component[Any]]:
    return [
        Component(
            name="difficulty",
            summary="Prefers prompts whose mean reward is near a target, and repeats some of them",
            config=DifficultyConfig,
            build=_build_difficulty,
        ),
        Component(
            name="drop-solved",
            summary="Leaves out prompts that were solved the last time, but for a share",
            config=DropSolvedConfig,
            build=_build_drop_solved,
        ),
    ]
