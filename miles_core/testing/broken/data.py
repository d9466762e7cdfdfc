"""Broken data sources, samplers and tokenizers."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles_core.testing import fakes, suites, toy, toy_model
from miles_core.testing.broken import Shelf
from miles_core.types import Prompt, PromptTokens

COUNTER = itertools.count()

DATA = Shelf(suites.ToyData, lambda cls: lambda config, context: cls(config, context.seed))


@DATA.breaks("test_next_gives_what_was_asked_for")
class NeverEmpty(toy.ToyData):
    def next(self, n: int) -> list[Prompt]:
        return super().next(max(n, 1))


@DATA.breaks("test_prompts_are_well_formed")
class TextBesideMessages(toy.ToyData):
    def next(self, n: int) -> list[Prompt]:
        prompts = super().next(n)
        for prompt in prompts:
            prompt.text = "3,4="
        return prompts


@DATA.breaks("test_the_same_seed_gives_the_same_prompts")
class SeedOfTheClock(toy.ToyData):
    def __init__(self, config: toy.ToyDataConfig, seed: int) -> None:
        super().__init__(config, next(COUNTER))


@DATA.breaks("test_portions_do_not_matter")
class ShufflesPortions(toy.ToyData):
    def next(self, n: int) -> list[Prompt]:
        return super().next(n)[::-1]


@DATA.breaks("test_draws_are_unique")
class DrawsStartAgain(toy.ToyData):
    def next(self, n: int) -> list[Prompt]:
        prompts = super().next(n)
        for prompt in prompts:
            prompt.draw %= self.config.num_prompts
        return prompts


@DATA.breaks("test_an_epoch_holds_every_prompt_once")
class CountsOneTooMany(toy.ToyData):
    @property
    def num_prompts(self) -> int:
        return self.config.num_prompts + 1


@DATA.breaks("test_restore_continues_exactly")
class RestoresTheEpoch(toy.ToyData):
    def state(self) -> dict[str, Any]:
        return {"taken": self.taken - self.taken % self.config.num_prompts}


@DATA.breaks("test_restore_continues_exactly")
class LosesTheEpoch(toy.ToyData):
    def restore(self, state: Mapping[str, Any]) -> None:
        self.taken = state["taken"] % self.config.num_prompts


SAMPLER = Shelf(suites.Sampler)


@SAMPLER.breaks("test_it_picks_from_what_it_is_offered")
class Invents(fakes.HardestFirst):
    def pick(self, prompts: list[Prompt], history: Mapping[str, Any]) -> list[Prompt]:
        return [*super().pick(prompts, history), Prompt(id="invented", text="?")]


@SAMPLER.breaks("test_it_works_without_history")
class NeedsHistory(fakes.HardestFirst):
    def pick(self, prompts: list[Prompt], history: Mapping[str, Any]) -> list[Prompt]:
        return [p for p in super().pick(prompts, history) if p.id in history]


@SAMPLER.breaks("test_the_same_seed_picks_the_same")
class Unseeded(fakes.HardestFirst):
    def pick(self, prompts: list[Prompt], history: Mapping[str, Any]) -> list[Prompt]:
        picked = super().pick(prompts, history)
        turn = next(COUNTER) % len(picked)
        return picked[turn:] + picked[:turn]


@SAMPLER.breaks("test_it_changes_neither_prompts_nor_history")
class Consumes(fakes.HardestFirst):
    def pick(self, prompts: list[Prompt], history: Mapping[str, Any]) -> list[Prompt]:
        picked = super().pick(prompts, history)
        prompts.clear()
        return picked


TOKENIZER = Shelf(suites.ToyTokenizer)


@TOKENIZER.breaks("test_prompts_are_ids_of_the_vocabulary")
class LongIds(toy.ToyTokenizer):
    def _prompt(self, ids: list[int]) -> PromptTokens:
        prompt = super()._prompt(ids)
        prompt.token_ids = prompt.token_ids.astype(np.int64)
        return prompt


@TOKENIZER.breaks("test_there_is_exactly_one_bos")
class TwoBos(toy.ToyTokenizer):
    def encode(self, text: str) -> PromptTokens:
        return self._prompt([toy_model.BOS, *super().encode(text).token_ids])


@TOKENIZER.breaks("test_the_text_is_what_the_ids_stand_for")
class TextWithoutSpecial(toy.ToyTokenizer):
    def _prompt(self, ids: list[int]) -> PromptTokens:
        return PromptTokens(token_ids=np.array(ids, dtype=np.int32), text=self.decode(ids))


@TOKENIZER.breaks("test_decode_is_the_reverse_of_encode")
class LowerCase(toy.ToyTokenizer):
    def encode(self, text: str) -> PromptTokens:
        return super().encode(text.lower())


@TOKENIZER.breaks("test_special_tokens_are_skipped_when_asked")
class ShowsSpecial(toy.ToyTokenizer):
    def decode(self, token_ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        return super().decode(token_ids, skip_special=False)


@TOKENIZER.breaks("test_an_assistant_message_opens_the_answer")
class ClosesTheAnswer(toy.ToyTokenizer):
    def render(self, messages: Any, tools: Any = (), images: Any = ()) -> PromptTokens:
        ids = list(super().render(messages, tools, images).token_ids)
        return self._prompt([*ids, toy_model.EOS, toy_model.ASSISTANT] if messages[-1]["role"] == "assistant" else ids)


@TOKENIZER.breaks("test_a_prompt_does_not_end_the_turn")
class EndsTheTurn(toy.ToyTokenizer):
    def render(self, messages: Any, tools: Any = (), images: Any = ()) -> PromptTokens:
        return self._prompt([*super().render(messages, tools, images).token_ids, toy_model.EOS])


@TOKENIZER.breaks("test_stop_ids_are_valid")
class StopsNowhere(toy.ToyTokenizer):
    stop_token_ids = (toy_model.VOCAB_SIZE + 7,)


@TOKENIZER.breaks("test_the_template_hash_is_stable")
class HashOfTheObject(toy.ToyTokenizer):
    @property
    def template_hash(self) -> str:
        return hashlib.sha256(str(next(COUNTER)).encode()).hexdigest()


@TOKENIZER.breaks("test_render_does_not_change_messages")
class TakesTheLastMessage(toy.ToyTokenizer):
    def render(self, messages: Any, tools: Any = (), images: Any = ()) -> PromptTokens:
        return super().render([messages.pop(0), *messages], tools, images)


TOKENIZER.add(
    "test_a_missing_template_is_explained",
    "makes-one-up",
    without_template=lambda suite, folder: toy.ToyTokenizer(),
)
