"""Suites of the kinds data and sampler."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_core.testing.contracts.base import ComponentContract, as_json, no_error
from miles_core.types import Prompt


class DataContract(ComponentContract):
    """A `DataSource`. Give it a small data set: the suite goes through several epochs."""

    take: int = 25
    """Prompts to look at; more than two epochs of your data set, where it has epochs."""

    def test_next_gives_what_was_asked_for(self, tmp_path: Path) -> None:
        """`next(n)` gives n prompts, fewer only at the end of the source, and none for 0."""
        source = self.build(tmp_path)
        assert source.next(0) == [], "next(0) gave prompts"
        got = source.next(self.take)
        assert len(got) <= self.take, f"next({self.take}) gave {len(got)} prompts"
        assert len(got) == self.take or source.next(1) == [], f"next({self.take}) gave {len(got)}, and yet there are more"

    def test_prompts_are_well_formed(self, tmp_path: Path) -> None:
        """A prompt has an id, and exactly one of `messages` (role and content each) and `text`."""
        prompts = self.build(tmp_path).next(self.take)
        assert prompts, "the source gave no prompt at all"
        for prompt in prompts:
            assert isinstance(prompt.id, str) and prompt.id, f"id {prompt.id!r}"
            assert (prompt.messages is None) != (prompt.text is None), f"{prompt.id}: exactly one of messages and text"
            for message in prompt.messages or ():
                assert isinstance(message.get("role"), str) and "content" in message, f"{prompt.id}: message {message}"
            assert prompt.messages != [], f"{prompt.id} has no messages"

    def test_the_same_seed_gives_the_same_prompts(self, tmp_path: Path) -> None:
        """Two sources with one seed give the same prompts in the same order."""
        assert self.build(tmp_path).next(self.take) == self.build(tmp_path).next(self.take)

    def test_portions_do_not_matter(self, tmp_path: Path) -> None:
        """The n-th prompt is the same whether prompts are taken one by one, in portions, or all at once."""
        whole, portions = self.build(tmp_path).next(self.take), self.build(tmp_path)
        parts = [prompt for size in (1, 3, self.take - 4) for prompt in portions.next(size)]
        assert [name(p) for p in parts] == [name(p) for p in whole]

    def test_draws_are_unique(self, tmp_path: Path) -> None:
        """(id, draw) is unique over all epochs."""
        source = self.build(tmp_path)
        names = [name(p) for n in (2, self.take - 2) for p in source.next(n)]
        double = {n for n in names if names.count(n) > 1}
        assert not double, f"taken twice under the same draw: {sorted(double)}"

    def test_an_epoch_holds_every_prompt_once(self, tmp_path: Path) -> None:
        """Where `num_prompts` is a number, that many prompts in a row are all different, and the next as many the same."""
        source = self.build(tmp_path)
        if (count := source.num_prompts) is None:
            return
        epochs = [sorted(p.id for p in source.next(count)) for _ in range(2)]
        assert len(set(epochs[0])) == count, f"num_prompts is {count}, and the first {count} prompts hold repetitions"
        assert epochs[1] in ([], epochs[0]), "the second epoch holds other prompts than the first"

    def test_restore_continues_exactly(self, tmp_path: Path) -> None:
        """A new source that is given the state after n prompts goes on with prompt n + 1, for every n: also in the middle
        and at the end of an epoch."""
        whole = self.build(tmp_path).next(self.take)
        source = self.build(tmp_path)
        for taken in range(len(whole)):
            state, other = as_json(source.state()), self.build(tmp_path)
            with no_error("restore of its own state"):
                other.restore(state)
            rest = other.next(len(whole) - taken)
            assert [name(p) for p in rest] == [name(p) for p in whole[taken:]], f"after {taken} it goes on elsewhere"
            source.next(1)


def name(prompt: Prompt) -> tuple[str, int]:
    return prompt.id, prompt.draw


class SamplerContract(ComponentContract):
    """A `Sampler` (provisional)."""

    prompts: tuple[Prompt, ...] = tuple(Prompt(id=f"p{i}", draw=i, text="?") for i in range(6))
    """What it is offered."""
    history: Mapping[str, Any] = {"p0": 0.0, "p1": 0.5, "p2": 1.0}
    """Mean rewards by prompt id."""

    def picked(self, folder: Path, history: Mapping[str, Any] | None = None) -> list[Prompt]:
        with no_error("pick"):
            return self.build(folder).pick(list(self.prompts), self.history if history is None else history)

    def test_it_picks_from_what_it_is_offered(self, tmp_path: Path) -> None:
        """Every picked prompt is one of those offered."""
        strange = [p.id for p in self.picked(tmp_path) if p not in self.prompts]
        assert not strange, f"picked what was not offered: {strange}"

    def test_it_works_without_history(self, tmp_path: Path) -> None:
        """At the start of a run there is no history, and something is picked."""
        assert self.picked(tmp_path, {}), "picked nothing, with which no run could start"

    def test_the_same_seed_picks_the_same(self, tmp_path: Path) -> None:
        """Two samplers with one seed pick the same."""
        assert self.picked(tmp_path) == self.picked(tmp_path)

    def test_it_changes_neither_prompts_nor_history(self, tmp_path: Path) -> None:
        """Prompts and history belong to the run."""
        prompts, history = copy.deepcopy(list(self.prompts)), copy.deepcopy(dict(self.history))
        self.build(tmp_path).pick(prompts, history)
        assert (prompts, history) == (list(self.prompts), dict(self.history)), "pick changed its arguments"
