"""Going on from sampled ids under real and awkward chat templates."""

from __future__ import annotations

import numpy as np
import pytest
from agent_words import END, HE, HELLO, LLO, WordTokenizer, ids

from miles_agent_rollout.history import answer_text, appended, continued
from miles_core.errors import DataError
from miles_core.types import Generation

USER = {"role": "user", "content": "hi"}
CHATML = """{%- for m in messages -%}
{%- set content = m.content.split('</think>')[-1] if FORGETS and m.role == 'assistant' and not loop.last else m.content -%}
{{- '<|im_start|>' + m.role + '\\n' + (content | trim if TRIMS else content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
PLAIN = """{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"""


# --- Without any library ---------------------------------------------------------------------------------------------


class Glued(WordTokenizer):
    """A template without any mark between turns: texts of two turns make one token."""

    def render(self, messages, tools=(), images=()):
        return self.encode("".join(m["content"] for m in messages))


def test_T1_a_token_across_the_border_does_not_change_what_was_sampled():
    """ "he" + "llo" renders as [hello]: the new text is encoded by itself."""
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "he"}]
    so_far = np.array([*ids("x"), HE], dtype=np.int32)
    got = continued(Glued(), so_far, [[*said, {"role": "user", "content": "llo"}]], ())
    assert got is not None and got.tolist() == [*ids("x"), HE, LLO]


def test_T3_nothing_new_is_no_continuation():
    """A template that shows no trace of the new messages gives no empty delta."""
    so_far = np.array(ids("x"), dtype=np.int32)
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": ""}]
    assert continued(Glued(), so_far, [messages], ()) is None


def test_appending_needs_a_template_that_only_appends():
    class Backwards(WordTokenizer):
        def render(self, messages, tools=(), images=()):
            return self.encode("".join(m["content"] for m in reversed(messages)))

    with pytest.raises(DataError, match='choose history = "segment"'):
        appended(Backwards(), np.array([HE], np.int32), [USER], ())


@pytest.mark.parametrize(
    ("tokens", "finish", "text"),
    [([HE, LLO, END], "stop", "hello"), ([HELLO], "length", "hello"), ([HE, END], "length", "he<end>"), ([], "stop", "")],
)
def test_the_stop_token_is_no_text(tokens, finish, text):
    made = Generation(
        id="", token_ids=np.array(tokens, np.int32), logprobs=np.zeros(len(tokens)), finish=finish, versions=()
    )
    assert answer_text(WordTokenizer(), made) == text


# --- A byte-level tokenizer of Hugging Face --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hugging(tmp_path_factory):
    """`make(template)`: a byte-level BPE of 400 tokens with that chat template."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    module = pytest.importorskip("miles_hf_tokenizer.tokenizer", reason="needs miles-hf-tokenizer")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(["hello there, the answer is 42\n", "user: hello\nassistant: hello\n"] * 20, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    fast.save_pretrained(folder)

    def make(template: str, **flags: bool):
        text = "".join(f"{{%- set {name} = {str(flag).lower()} -%}}" for name, flag in flags.items()) + template
        return module.HfTokenizer(folder, chat_template=text)

    return make


def split(tokenizer, text: str) -> list[int]:
    """The text as single bytes: ids that no encoding would give back."""
    return [int(i) for c in text for i in tokenizer.hf.convert_tokens_to_ids([*map(str, tokenizer.hf.tokenize(c))])]


@pytest.mark.parametrize("answer", ["hello there", " the answer is 42 😀", "ünï\ncode", "", "a\n\n"])
@pytest.mark.parametrize("ends", [True, False])
def test_T1_a_real_template_goes_on_from_ids_that_it_would_not_give(hugging, answer, ends):
    tokenizer = hugging(CHATML, FORGETS=False, TRIMS=False)
    (stop,) = tokenizer.stop_token_ids
    start = tokenizer.render([USER]).token_ids.tolist()
    so_far = np.array([*start, *split(tokenizer, answer), *([stop] if ends else [])], dtype=np.int32)
    messages = [USER, {"role": "assistant", "content": answer}, {"role": "user", "content": "again"}]
    got = continued(tokenizer, so_far, [messages], ())
    assert got is not None and got[: len(so_far)].tolist() == so_far.tolist()
    rest = ("" if ends else "<|im_end|>") + "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(got[len(so_far) :], skip_special=False) == rest
    assert tokenizer.decode(got, skip_special=False) == tokenizer.render(messages).text


def test_T1_a_character_that_was_cut_in_two(hugging):
    """Half of an emoji was sampled: its text is a replacement character, and the conversation still goes on from the ids,
    or is seen to be rewritten - never from other ids."""
    tokenizer = hugging(CHATML, FORGETS=False, TRIMS=False)
    half = split(tokenizer, "😀")[:2]
    so_far = np.array([*tokenizer.render([USER]).token_ids.tolist(), *half], dtype=np.int32)
    told = tokenizer.decode(half)
    got = continued(tokenizer, so_far, [[USER, {"role": "assistant", "content": told}, USER]], ())
    assert got is None or got[: len(so_far)].tolist() == so_far.tolist()


@pytest.mark.parametrize(
    ("flags", "answer", "kept"),
    [
        ({"FORGETS": True, "TRIMS": False}, "<think>x</think>hello", False),
        ({"FORGETS": True, "TRIMS": False}, "hello", True),
        ({"FORGETS": False, "TRIMS": True}, "hello ", False),
        ({"FORGETS": False, "TRIMS": True}, "hello", True),
    ],
)
def test_T3_a_real_template_that_rewrites_is_found_out(hugging, flags, answer, kept):
    tokenizer = hugging(CHATML, **flags)
    ids_ = tokenizer.encode(answer + "<|im_end|>").token_ids
    so_far = np.concatenate([tokenizer.render([USER]).token_ids, ids_]).astype(np.int32)
    messages = [USER, {"role": "assistant", "content": answer}, USER]
    assert (continued(tokenizer, so_far, [messages], ()) is not None) == kept
    got = appended(tokenizer, so_far, [USER], ())
    assert got[: len(so_far)].tolist() == so_far.tolist()
    text = tokenizer.decode(got[len(so_far) :], skip_special=False)
    assert text == "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_T1_a_template_without_special_tokens(hugging):
    """ "assistant: hello" + "\\nuser: hi\\n": whatever merges across the border, the sampled ids stay."""
    tokenizer = hugging(PLAIN)
    so_far = np.concatenate([tokenizer.render([USER]).token_ids, split(tokenizer, "hello")]).astype(np.int32)
    messages = [USER, {"role": "assistant", "content": "hello"}, USER]
    got = continued(tokenizer, so_far, [messages], ())
    assert got is not None and got[: len(so_far)].tolist() == so_far.tolist()
    assert tokenizer.decode(got) == "user: hi\nassistant: hello\nuser: hi\nassistant: "
