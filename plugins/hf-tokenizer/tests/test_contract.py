"""The contract suite of tokenizers, on tiny byte-level tokenizers made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import miles_hf_tokenizer
from miles_core.testing.contracts import TokenizerContract

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
(HF,) = miles_hf_tokenizer.miles_tokenizers()
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path, *, bos: bool, template: bool = True) -> Path:
    """A folder with a tokenizer that puts `<s>` before every text (with `bos`), as its template does."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate([*SPECIAL, *alphabet])}, []))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    if bos:
        single = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
        raw.post_processor = single
        config["bos_token"] = "<s>"
    folder.mkdir(exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    if template:
        (folder / "chat_template.jinja").write_text(TEMPLATE if bos else TEMPLATE.replace("{{ bos_token }}", ""))
    return folder


class TestHfWithBos(TokenizerContract):
    component = HF
    bos_id: int | None = SPECIAL.index("<s>")
    texts = ("Hello, world.", "a", "3 + 4 =\n", "é 漢 \U0001f600")

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.options = {"path": str(make(tmp_path / "tokenizer", bos=self.bos_id is not None))}

    def without_template(self, folder: Path) -> Any:
        self.options = {"path": str(make(folder / "bare", bos=self.bos_id is not None, template=False))}
        return self.build(folder)


class TestHfWithoutBos(TestHfWithBos):
    bos_id = None
