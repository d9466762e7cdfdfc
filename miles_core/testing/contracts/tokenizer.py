"""Suite of the kind tokenizer."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.errors import ConfigError
from miles_core.testing.contracts.base import ComponentContract, no_error, refused
from miles_core.types import PromptTokens


class TokenizerContract(ComponentContract):
    """A `Tokenizer`. Set `bos_id`, and `without_template` where a model may come without a chat template."""

    bos_id: int | None = None
    """Id of the token that begins every prompt, or None for a model without one."""
    messages: tuple[Mapping[str, Any], ...] = (
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "3 + 4 ="},
    )
    texts: tuple[str, ...] = ("Hello, world.", "a", "3 + 4 =\n")
    """Plain prompts that the vocabulary can spell."""

    def without_template(self, folder: Path) -> Any:
        """A tokenizer of a model without a chat template, or None where that cannot happen."""
        return None

    def prompts(self, made: Any) -> list[PromptTokens]:
        with no_error("render and encode"):
            return [made.render(list(self.messages)), *map(made.encode, self.texts)]

    def test_prompts_are_ids_of_the_vocabulary(self, tmp_path: Path) -> None:
        """`token_ids` is int32[P] with P > 0, each in [0, vocab_size)."""
        made = self.build(tmp_path)
        for prompt in self.prompts(made):
            ids = prompt.token_ids
            assert isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1 and len(ids), repr(ids)
            assert ids.min() >= 0 and ids.max() < made.vocab_size, f"ids outside the vocabulary of {made.vocab_size}"

    def test_there_is_exactly_one_bos(self, tmp_path: Path) -> None:
        """A model with a BOS has it once and at the start, whether a template was used or not; others have none."""
        for prompt in self.prompts(self.build(tmp_path)):
            if self.bos_id is not None:
                count = np.count_nonzero(prompt.token_ids == self.bos_id)
                assert count == 1 and prompt.token_ids[0] == self.bos_id, f"{count} BOS in {prompt.text!r}"

    def test_the_text_is_what_the_ids_stand_for(self, tmp_path: Path) -> None:
        """`text` is the decoded prompt with its special tokens."""
        made = self.build(tmp_path)
        for prompt in self.prompts(made):
            assert prompt.text == made.decode(prompt.token_ids, skip_special=False)

    def test_decode_is_the_reverse_of_encode(self, tmp_path: Path) -> None:
        """What was encoded can be read again, character by character; and a chat holds what was said in it."""
        made = self.build(tmp_path)
        for text in self.texts:
            assert made.decode(made.encode(text).token_ids) == text
        for message in self.messages:
            assert message["content"] in made.decode(made.render(list(self.messages)).token_ids)

    def test_special_tokens_are_skipped_when_asked(self, tmp_path: Path) -> None:
        """`skip_special` takes stop tokens out of the text, and without it they are visible."""
        made = self.build(tmp_path)
        ids = np.array(made.stop_token_ids, dtype=np.int32)
        assert made.decode(ids) == "", f"stop tokens are left in the text: {made.decode(ids)!r}"
        assert made.decode(ids, skip_special=False) != "", "skip_special=False hides stop tokens"

    def test_an_assistant_message_opens_the_answer(self, tmp_path: Path) -> None:
        """With an assistant message at the end, the prompt is the one without it, followed by its text."""
        made = self.build(tmp_path)
        plain = made.render(list(self.messages))
        opened = made.render([*self.messages, {"role": "assistant", "content": "The sum"}])
        assert opened.text == plain.text + "The sum", f"{opened.text!r} does not continue {plain.text!r}"

    def test_a_prompt_does_not_end_the_turn(self, tmp_path: Path) -> None:
        """The last token of a chat prompt is no stop token: the assistant has yet to speak."""
        made = self.build(tmp_path)
        for more in ([], [{"role": "assistant", "content": "The sum"}]):
            last = int(made.render([*self.messages, *more]).token_ids[-1])
            assert last not in made.stop_token_ids, f"the prompt ends with stop token {last}"

    def test_stop_ids_are_valid(self, tmp_path: Path) -> None:
        """`stop_token_ids` is a tuple of different ids of the vocabulary, and not empty."""
        made = self.build(tmp_path)
        ids = made.stop_token_ids
        assert isinstance(ids, tuple) and ids and len(set(ids)) == len(ids), f"stop_token_ids = {ids!r}"
        assert all(isinstance(i, int) and 0 <= i < made.vocab_size for i in ids), f"stop_token_ids = {ids!r}"

    def test_the_template_hash_is_stable(self, tmp_path: Path) -> None:
        """`template_hash` is a SHA-256 that does not change from one tokenizer, or one call, to the next."""
        made = self.build(tmp_path)
        first = made.template_hash
        made.render(list(self.messages))
        assert re.fullmatch("[0-9a-f]{64}", first), f"template_hash = {first!r}"
        assert {made.template_hash, self.build(tmp_path).template_hash} == {first}

    def test_render_does_not_change_messages(self, tmp_path: Path) -> None:
        """Messages belong to the prompt, and may be rendered again."""
        messages = [copy.deepcopy(dict(m)) for m in self.messages] + [{"role": "assistant", "content": "The sum"}]
        before = copy.deepcopy(messages)
        self.build(tmp_path).render(messages)
        assert messages == before, "render changed the messages"

    def test_a_missing_template_is_explained(self, tmp_path: Path) -> None:
        """Without a chat template `render` raises a ConfigError that names the option; `encode` works."""
        made = self.without_template(tmp_path)
        if made is None:
            pytest.skip("this tokenizer always has a template (without_template gives None)")
        with refused(ConfigError, "render without a chat template") as caught:
            made.render(list(self.messages))
        assert "chat_template" in str(caught[0]), f"the option chat_template is not named: {caught[0]}"
        assert len(made.encode(self.texts[0]).token_ids)
