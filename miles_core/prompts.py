"""The stream of prompts that a run draws from: what fits into the context, and how much of it was taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from miles_core.builtin.rollouts import fits, prompt_tokens
from miles_core.errors import DataError
from miles_core.interfaces import DataSource, Sampler, Tokenizer
from miles_core.types import Prompt, SampleGroup

MAX_LONG_IN_A_ROW = 1000
"""Prompts in a row that may be too long before a data set counts as unusable."""


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

    def remember(self, group: SampleGroup) -> None:
        rewards = [s.reward for s in group.samples if s.reward is not None]
        if self.sampler is not None and rewards:
            self.history[group.prompt.id] = sum(rewards) / len(rewards)

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts; fewer when the source is exhausted. Raises DataError when one is too long and that is
        refused, or when a whole epoch (at most MAX_LONG_IN_A_ROW) is."""
        taken: list[Prompt] = []
        long_in_a_row = skipped_in_a_row = 0
        limit = min(self.data.num_prompts or MAX_LONG_IN_A_ROW, MAX_LONG_IN_A_ROW)
        while len(taken) < n and (prompts := self.data.next(n - len(taken))):
            if self.sampler is not None and not (prompts := self._pick(prompts)):
                skipped_in_a_row += 1
            for prompt in prompts:
                num_tokens = len(prompt_tokens(prompt, self.tokenizer).token_ids)
                if fits(num_tokens, self.max_context):
                    taken.append(prompt)
                    long_in_a_row = 0
                else:
                    self._drop(prompt, num_tokens)
                    long_in_a_row += 1
            if skipped_in_a_row >= MAX_LONG_IN_A_ROW:
                raise DataError(f"the sampler kept nothing of the last {skipped_in_a_row} draws (sampler.use)")
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
        before any model loads. Raises DataError when there is no prompt."""
        state = self.data.state()
        if not self.take(1):
            raise DataError("the data source has no prompts", "look at the options under [data]")
        self.data.restore(state)
        self.dropped = 0
        size = self.data.num_prompts
        if size is not None and size < groups_per_step:
            self.note(
                f"the data set has {size} prompts and a step takes {groups_per_step} (rollout.groups_per_step): "
                "a step sees some prompts more than once",
                "warning",
            )

    def state(self) -> dict[str, Any]:
        return {"source": self.data.state(), "dropped": self.dropped, "history": self.history}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.data.restore(state["source"])
        self.dropped, self.history = state["dropped"], dict(state["history"])

    def _pick(self, prompts: list[Prompt]) -> list[Prompt]:
        assert self.sampler is not None
        return list(self.sampler.pick(prompts, self.history))

    def _drop(self, prompt: Prompt, num_tokens: int) -> None:
        problem = f'prompt "{prompt.id}" has {num_tokens} tokens, and the context holds {self.max_context}'
        if self.refuse_long:
            raise DataError(problem, 'shorten it, or drop such prompts with data.long_prompts = "drop"')
        if self.dropped == 0:
            self.note(f"{problem}; prompts that leave no room for an answer are dropped and counted", "warning")
        self.dropped += 1
