"""The stream of prompts that a run draws from: what fits into the context, and how much of it was taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from miles_core.builtin.rollouts import fits, prompt_tokens
from miles_core.errors import ContractError, DataError, MilesError, RunFailed
from miles_core.group_state import prompt_from_state, prompt_to_state
from miles_core.interfaces import DataSource, Sampler, Tokenizer
from miles_core.types import Prompt, SampleGroup
from miles_core.votes import trajectory_rewards, votes

MAX_LONG_IN_A_ROW = 1000
"""Prompts in a row that may be too long before a data set counts as unusable."""
MAX_CHECKED = 10_000
"""Prompts whose lengths are looked at before a run that refuses long ones: a few seconds of encoding."""
MAX_SKIPPED = 1000
"""Prompts in a row that a sampler may drop before it counts as dropping everything; a whole epoch at least."""


class PromptFeed:
    """Prompts of a data source that leave room for at least one new token.

    `dropped` counts those that do not; with `refuse_long` they are an error. `note(text, level)` is told of the first.
    """

    def __init__(
        self,
        data: DataSource,
        tokenizer: Tokenizer,
        max_context: int,
        *,
        refuse_long: bool,
        sampler: Sampler | None = None,
        note: Callable[[str, str], None],
    ) -> None:
        self.data, self.tokenizer, self.max_context = data, tokenizer, max_context
        self.refuse_long, self.note = refuse_long, note
        self.sampler = sampler
        self.dropped = 0
        self.history: dict[str, float] = {}
        """Mean reward of each prompt id the last time that it was judged; what a sampler sees."""
        self._judged: list[tuple[int, str, float]] = []
        self._waiting: list[Prompt] = []  # picked, and more than were asked for
        self._draws = 0

    def remember(self, group: SampleGroup) -> None:
        """Notes the mean reward of a group that was judged, kept or dropped, for the sampler's history."""
        rewards = votes(group.samples, trajectory_rewards(group.samples)).values()
        if self.sampler is not None and rewards:
            self._judged.append((group.order, group.prompt.id, sum(rewards) / len(rewards)))

    def settle(self) -> None:
        """Between steps: what was judged becomes history. Within a step it depends on which group happens to end first,
        and the prompts of a run must not."""
        for _, prompt_id, mean in sorted(self._judged):
            self.history[prompt_id] = mean
        self._judged.clear()

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts; fewer when the source is exhausted. Raises DataError when one is too long and that is
        refused, or when all of an epoch are (at most MAX_LONG_IN_A_ROW)."""
        taken: list[Prompt] = []
        long_in_a_row = 0
        # The last of one epoch and the first of the next may be the same long ones, while a short one is among them.
        limit = min(2 * (self.data.num_prompts or MAX_LONG_IN_A_ROW) - 1, MAX_LONG_IN_A_ROW)
        while len(taken) < n and (prompts := self._next(n - len(taken))):
            for prompt in prompts:
                num_tokens = len(prompt_tokens(prompt, self.tokenizer).token_ids)
                if fits(num_tokens, self.max_context):
                    taken.append(prompt)
                    long_in_a_row = 0
                else:
                    self._drop(prompt, num_tokens)
                    long_in_a_row += 1
            if long_in_a_row >= limit:
                raise DataError(
                    f"all of the last {long_in_a_row} prompts fill the context of {self.max_context} tokens",
                    "raise model.max_context, or use shorter prompts",
                )
        return taken

    def peek_tokens(self) -> np.ndarray:
        """int32 token ids of the prompt that comes next, which stays there."""
        state = self.data.state()
        try:
            return np.asarray(prompt_tokens(self.data.next(1)[0], self.tokenizer).token_ids, np.int32)
        finally:
            self.data.restore(state)

    def check(self, groups_per_step: int) -> None:
        """Reads one usable prompt ahead and puts the source back: a bad row, or a chat template that is missing, shows
        before any model loads. Where long prompts are refused, all of an epoch (at most MAX_CHECKED) are read. Raises
        DataError when there is no prompt."""
        state, sampler, self.sampler = self.data.state(), self.sampler, None
        if self.refuse_long:
            self._refuse_long_ones()
            self.data.restore(state)
        if not self.take(1):
            raise DataError("the data source has no prompts", "look at the options under [data]")
        self.data.restore(state)
        self.dropped, self.sampler = 0, sampler
        size = self.data.num_prompts
        if size is not None and size < groups_per_step:
            self.note(
                f"the data set has {size} prompts and a step takes {groups_per_step} (rollout.groups_per_step): "
                "a step sees some prompts more than once",
                "warning",
            )

    def _refuse_long_ones(self) -> None:
        for prompt in self.data.next(min(self.data.num_prompts or 1, MAX_CHECKED)):
            num_tokens = len(prompt_tokens(prompt, self.tokenizer).token_ids)
            if not fits(num_tokens, self.max_context):
                self._drop(prompt, num_tokens)

    def state(self) -> dict[str, Any]:
        self.settle()
        return {
            "source": self.data.state(),
            "dropped": self.dropped,
            "history": self.history,
            "waiting": [prompt_to_state(p) for p in self._waiting],
            "draws": self._draws,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.data.restore(state["source"])
        self.dropped, self.history = state["dropped"], dict(state["history"])
        self._waiting, self._draws = [prompt_from_state(p) for p in state["waiting"]], state["draws"]

    def _next(self, n: int) -> list[Prompt]:
        """Up to `n` prompts, those of the sampler where there is one. It may have repeated a prompt: each of its picks is a
        draw of its own. Raises DataError when it drops everything for a whole epoch."""
        if self.sampler is None:
            return self.data.next(n)
        skipped = 0
        while not self._waiting and (offered := self.data.next(n)):
            for prompt in self._picks(offered):
                self._waiting.append(replace(prompt, draw=self._draws))
                self._draws += 1
            skipped += len(offered)
            if not self._waiting and skipped >= max(self.data.num_prompts or 0, MAX_SKIPPED):
                raise DataError(f"the sampler kept nothing of the last {skipped} prompts (sampler.use)")
        picked, self._waiting = self._waiting[:n], self._waiting[n:]
        return picked

    def _picks(self, offered: list[Prompt]) -> list[Prompt]:
        """What the sampler makes of `offered`. Raises RunFailed with what it raised, or ContractError."""
        assert self.sampler is not None
        try:
            given = self.sampler.pick(offered, self.history)
            picks = list(given) if isinstance(given, Iterable) else None
        except MilesError:
            raise
        except Exception as error:
            raise RunFailed(f"the sampler (sampler.use) raised {type(error).__name__}: {error}") from error
        if picks is None:
            raise ContractError(f"the sampler (sampler.use) returned {given!r:.60}, not a list of prompts")
        for pick in picks:
            if not isinstance(pick, Prompt):
                raise ContractError(f"the sampler (sampler.use) returned {pick!r:.60} among its picks, which is no Prompt")
        return picks

    def _drop(self, prompt: Prompt, num_tokens: int) -> None:
        problem = f'prompt "{prompt.id}" has {num_tokens} tokens, and the context holds {self.max_context}'
        if self.refuse_long:
            raise DataError(problem, 'shorten it, or drop such prompts with data.long_prompts = "drop"')
        if self.dropped == 0:
            self.note(f"{problem}; prompts that leave no room for an answer are dropped and counted", "warning")
        self.dropped += 1
