"""Messages and text -> token ids, with the template that the model was trained on, and back for people to read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.errors import ConfigError, DataError, RuntimeMissing
from miles_core.interfaces import Tokenizer
from miles_core.types import PromptTokens

OPEN_TURN = "miles-open-turn-5d1c"
"""Stands where an opened answer ends while the template is rendered; the prompt is cut there. Searching for the answer's
own text instead goes wrong when a template trims it, when it is empty, or when it occurs again later."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class HfTokenizer(Tokenizer):
    """`AutoTokenizer` of a folder, loaded without a network and without remote code.

    The BOS rule: a model "has a BOS" when its tokenizer puts one before plain text by itself. Then every prompt starts
    with exactly one, whether or not the template or the text brings its own; otherwise none is added.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_folder(folder)
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise RuntimeMissing(
                "the tokenizer hf needs transformers, which is not installed", 'pip install "miles-hf-tokenizer[runtime]"'
            ) from error
        self.folder = Path(folder)
        self.hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if chat_template is not None:
            self.hf.chat_template = chat_template
        self._options = dict(template_options or {})
        self._bos = self._own_bos()

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), images: Sequence[Any] = ()
    ) -> PromptTokens:
        """See `Tokenizer.render`. Raises ConfigError without a chat template, DataError when the template refuses the
        messages or when there are images, which this tokenizer cannot place."""
        if images:
            raise DataError("the tokenizer hf renders text only, and a prompt has images")
        if not messages:
            raise DataError("a prompt has an empty list of messages")
        opened = messages[-1].get("role") == "assistant"
        text = self._template([*messages[:-1], _with_marker(messages[-1])] if opened else messages, tools, not opened)
        if opened:
            text, found, _ = text.rpartition(OPEN_TURN)
            if not found:
                raise ConfigError(
                    f"the chat template of {self.folder} does not print the text of a final assistant message",
                    'give one that does: [tokenizer] chat_template = "file:PATH"',
                )
        return self.encode(text)

    def encode(self, text: str) -> PromptTokens:
        ids = self.hf(text, add_special_tokens=False)["input_ids"]
        if self._bos is not None:
            ids = [self._bos, *_without_leading(ids, self._bos)]
            bos = self.hf.convert_ids_to_tokens(self._bos)
            text = text if text.startswith(bos) else bos + text
        return PromptTokens(token_ids=np.asarray(ids, dtype=np.int32), text=text)

    def decode(self, token_ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        ids = np.asarray(token_ids).tolist()
        return self.hf.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """EOS of the generation config and of the tokenizer, and the special token that the template puts after an
        answer; sorted."""
        ids = {self.hf.eos_token_id, self._end_of_turn(), *self._generation_eos()}
        return tuple(sorted(ids - {None}))

    @property
    def vocab_size(self) -> int:
        return len(self.hf)

    @property
    def has_template(self) -> bool:
        return bool(self.hf.chat_template)

    @cached_property
    def template_hash(self) -> str:  # type: ignore[override]
        template = self.hf.chat_template or ""
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _template(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], open_answer: bool) -> str:
        from jinja2 import TemplateError

        if not self.has_template:
            raise ConfigError(
                f"the model {self.folder} has no chat template, and a prompt consists of messages",
                'give one with [tokenizer] chat_template = "file:PATH", or use plain text prompts',
            )
        try:
            return self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=open_answer,
                **self._options,
            )
        except TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(f"the chat template of {self.folder} refused the messages ({roles}): {error}") from error

    def _own_bos(self) -> int | None:
        """The BOS id if the tokenizer adds it by itself."""
        bos = self.hf.bos_token_id
        with_special = self.hf("a")["input_ids"]
        without = self.hf("a", add_special_tokens=False)["input_ids"]
        adds = bos is not None and with_special[:1] == [bos] and without[:1] != [bos]
        return bos if adds else None

    def _end_of_turn(self) -> int | None:
        """The special token that follows an answer in the template, if the template shows one."""
        if not self.has_template:
            return None
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": OPEN_TURN}]
        try:
            _, found, after = self._template(turn, (), False).rpartition(OPEN_TURN)
        except DataError:  # a template for another kind of conversation: the EOS ids stand alone
            return None
        first = self.hf(after.lstrip(), add_special_tokens=False)["input_ids"][:1] if found else []
        special = {i for i, token in self.hf.added_tokens_decoder.items() if token.special}
        return first[0] if first and first[0] in special else None

    def _generation_eos(self) -> list[int]:
        path = self.folder / "generation_config.json"
        if not path.is_file():
            return []
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        return [eos] if isinstance(eos, int) else list(eos or ())


def check_folder(folder: str | Path) -> None:
    """Raises ConfigError when there is no tokenizer in the folder."""
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"no tokenizer in {folder}: none of {', '.join(TOKENIZER_FILES)}",
            "give a folder that has one: [tokenizer.hf] path = PATH",
        )


def read_template(option: str | None) -> str | None:
    """`[tokenizer] chat_template`: Jinja text, or "file:PATH". Raises ConfigError when the file cannot be read or the text
    is no template."""
    if option is None:
        return None
    text = option
    if option.startswith("file:"):
        try:
            text = Path(option.removeprefix("file:")).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read the chat template {option} ([tokenizer] chat_template): {error}") from error
    if "{{" not in text and "{%" not in text:
        raise ConfigError(
            f'"{option[:80]}" is no chat template ([tokenizer] chat_template): it holds no Jinja expression',
            'a file is written as "file:PATH"',
        )
    return text


def _with_marker(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the marker after its text; content may be a string, None, or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        if not content or "text" not in content[-1]:
            raise DataError("the answer that a prompt opens must end with text")
        parts = [*content[:-1], {**content[-1], "text": content[-1]["text"] + OPEN_TURN}]
        return {**message, "content": parts}
    return {**message, "content": (content or "") + OPEN_TURN}


def _without_leading(ids: list[int], token: int) -> list[int]:
    start = 0
    while start < len(ids) and ids[start] == token:
        start += 1
    return ids[start:]
